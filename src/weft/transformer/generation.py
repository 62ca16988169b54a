"""`weft.generate` and `weft.Generator`: prompts of any lengths in, tokens out, without a padded token anywhere.

`generate` runs a list of prompts to the end. A `Generator` takes requests as they come, and hands out streams.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from weft.comm.deadline import LOOK_AGAIN_SECONDS
from weft.errors import ModelChanged, Unsupported
from weft.models.family import HeadKind
from weft.transformer.call import digest
from weft.transformer.program import RankProgram
from weft.transformer.requests import (
    Completion,
    ModelLimits,
    RequestState,
    check_number,
    check_numbers,
    decode_of,
    listed,
    request_of,
)
from weft.transformer.sampling import Processor
from weft.transformer.steps import RequestBatch

_PREFILL_TOKENS = 8192  # `generate` takes in so many tokens of prompts at once
_CHANGED = (
    "the model's weights or modules have changed since this request began: the tokens it has are the old model's, and "
    "what would follow the new one's; submit it again"
)


def generate(
    model: Any,
    prompts: Iterable[Sequence[int] | Tensor] | Mapping[str, Any],
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos: int | Collection[int] | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt: lists of at most `max_new_tokens`, the same on every rank.

    model:     what `weft.pack` or `weft.parallelize` made of a Hugging Face decoder, or a `RankProgram`
    prompts:   token numbers, a list or tensor [length] each; a `PackedBatch`, nested, a tokenizer's or collator's dict
    eos:       a token, or several, that ends a sequence; it is the last of its list. The model's own if None is given
               and its generation config has one; an empty collection for none

    Temperature 0 takes the most likely token, and so does None, unless the model's generation config has `do_sample`;
    then its temperature counts, and its top_k and top_p where None is given. Otherwise tokens are drawn with random
    numbers that follow from `seed` and the prompt's number in the list: the same prompt, seed and place give the same
    tokens, whatever else is in the list. A sequence that has ended leaves the batch. Collective.

    The generation config's repetition_penalty, min_length, min_new_tokens, suppress_tokens and begin_suppress_tokens
    count, too; a setting that would change tokens and is not followed is an error.

        model = weft.pack(AutoModelForCausalLM.from_pretrained(...))
        weft.generate(model, [[1, 5, 9], [1, 7]], max_new_tokens=32)
    """
    prompts = getattr(model, "weft_prompts", dict)(prompts) if isinstance(prompts, Mapping) else prompts
    check_numbers(max_new_tokens, seed, temperature, top_k, top_p)  # raises, whatever model there is
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "eos": eos,
    }  # fmt: skip
    source = ProgramSource(model)
    with source.held() as limits:
        request_of(limits, [0], **{**options, "max_new_tokens": 0})  # raises, also without a prompt
        given = [request_of(limits, p, name=f"prompt {i}", number=i, **options) for i, p in enumerate(listed(prompts))]
        if not given or max_new_tokens == 0:
            return [[] for _ in given]
        held = [request.prompt for request in given]
        asked = f"{len(held)} prompts {digest(*held)} of {[len(p) for p in held[:8]]} tokens and more, "
        program = source.program(f"generate: {asked}{given[0].options}")
        capacity = max(prompt.numel() for prompt in held) + max_new_tokens
        batch = RequestBatch(slots=len(given), prefill=_PREFILL_TOKENS, first=(len(given), capacity))
        states = [batch.add(request) for request in given]
        while plan := batch.plan():
            batch.begin(plan, program)
            batch.finish(plan, batch.run(plan, program), None)
    return [state.result(None).tokens for state in states]


class ProgramSource:
    """Where the program comes from: a model that `weft.pack` or `weft.parallelize` made, or one that is given."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, RankProgram):
            kind = getattr(model, "_weft_head", None) if hasattr(model, "weft_program") else None
            if kind is None:
                raise ValueError(
                    f"got a {type(model).__name__}, expected a decoder with a language head that weft.pack has packed, "
                    f"or that weft.parallelize has shared among ranks"
                )
            if kind is not HeadKind.NEXT_TOKEN:
                raise Unsupported(f"{type(model).__name__} is no decoder; expected a causal language model")
        self._model = model

    @property
    def config(self) -> Any:
        """The model's generation config, as it is now."""
        return getattr(self._model, "generation_config", None)

    @contextmanager
    def held(self) -> Iterator[ModelLimits]:
        """What the model takes, while nobody else calls it who may not."""
        model = self._model
        if isinstance(model, RankProgram):
            embedding = model.transformer.embedding
            positions = None if embedding is None or len(embedding.tables) < 2 else embedding.tables[1].shape[0]
            yield ModelLimits(
                model.model.words.total, positions or torch.iinfo(torch.int32).max, None, model.model.size
            )
            return
        with model.weft_alone() as engine:
            limit = getattr(model.config, "max_position_embeddings", None) or torch.iinfo(torch.int32).max
            yield ModelLimits(engine.vocabulary, int(limit), self.config, engine.size)

    def program(self, asked: str) -> RankProgram:
        """Fresh; while it is held. Collective; `asked` is the same on all ranks, or they raise `PeerMismatch`."""
        program: RankProgram = self._model if isinstance(self._model, RankProgram) else self._model.weft_program(asked)
        return program

    def check_stays(self) -> None:
        """Raises where the weights lie in memory for one call only."""
        if any(base.__name__ == "FSDPModule" for base in type(self._model).__mro__):
            raise Unsupported(
                "weft.Generator does not take a model that was given to fully_shard, whose weights would be gathered "
                "for each step; call weft.generate, which gathers them once"
            )


class Generator:
    """Requests that come and go: each gets the tokens that it would get alone, bit by bit, whatever else runs.

    model:           what `weft.pack` or `weft.parallelize` made of a Hugging Face decoder, or a `RankProgram`
    tokenizer:       for stop strings and texts: one of Hugging Face's, with `decode(tokens, skip_special_tokens=True)`,
                     or a function from a list of tokens to text
    slots:           so many requests run at once; others wait
    prefill_tokens:  so many tokens of prompts are taken in by a step, beside one token of each request that decodes

    Somebody must make the steps. `step()` makes one, `run()` all that are left, and whoever waits for a stream makes
    those that it takes. On one rank `with generator:` has a thread make them; leaving it waits for what is under way.

    On one rank `submit` and streams may be used from any thread. Where ranks share the model, all of them submit the
    same requests and make the same calls in the same order: a step is collective, and they compare what they are about
    to do before anything moves.

    Every step looks whether the model has changed. If so, requests that have begun end with `weft.errors.ModelChanged`;
    those that still wait run on the new weights. A step that fails ends the requests that have begun, by its error.

        generator = weft.Generator(weft.pack(model))
        stream = generator.submit([1, 5, 9], max_new_tokens=32)
        for token in stream: ...
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, slots: int = 64, prefill_tokens: int = 512) -> None:
        check_number("slots", slots, lowest=1)
        check_number("prefill_tokens", prefill_tokens, lowest=1)
        self._source = ProgramSource(model)
        self._source.check_stays()
        with self._source.held() as limits:
            self._limits = limits
        self._decode = None if tokenizer is None else decode_of(tokenizer)
        self._batch = RequestBatch(slots=slots, prefill=prefill_tokens)
        self._program: Callable[[], RankProgram | None] = lambda: None  # of the last step; a weak reference
        self._turn = threading.RLock()  # one step at a time
        self._is_inside = False
        self._changed = threading.Condition(threading.RLock())  # for the requests; what waits for them waits for this
        self._thread: threading.Thread | None = None
        self._is_leaving = False

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: int | Collection[int] | None = None,
        stop: str | Sequence[str | Sequence[int]] | None = None,
        logprobs: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logits_processor: Sequence[Processor] | None = None,
    ) -> TokenStream:
        """A request that joins at the next step. What is wrong with it is raised here, and disturbs no other.

        Sampling, `seed`, `eos` and the model's generation config count as in `weft.generate` of this prompt alone.

        stop:              texts or lists of tokens after which it is over; texts need the generator's tokenizer
        logprobs:          also the log-probability of each token, and of so many of the most likely ones
        ..._penalty:       repetition_penalty as of transformers, over prompt and output; the others as of vLLM and
                           OpenAI, over the output
        logits_processor:  functions (input_ids [1, n], scores [1, V]) -> scores, as those of transformers, that run
                           after the penalties and before the temperature; on one rank only
        """
        request = request_of(
            replace(self._limits, config=self._source.config), prompt, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, eos=eos, stop=stop, logprobs=logprobs,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, logits_processor=logits_processor,
        )  # fmt: skip
        if self._decode is None and any(isinstance(item, str) for item in request.stops):
            raise ValueError(
                "stop has texts, but the generator has no tokenizer; give it one: Generator(tokenizer=...)"
            )
        if request.choice.processors and self._limits.ranks > 1:
            raise Unsupported(
                "logits_processor: where ranks share the model, nobody can tell whether they compute the same; "
                "run the model on one rank, by weft.pack"
            )
        with self._changed:
            state = self._batch.add(request)
            self._changed.notify_all()
        return TokenStream(state, self)

    def step(self) -> bool:
        """One pass through the model; whether requests are left that need more."""
        with self._turn:
            if self._is_inside:
                raise RuntimeError("a step of a Generator was asked for inside of one, by a tokenizer or a processor")
            self._is_inside = True
            try:
                return self._step()
            finally:
                self._is_inside = False

    def run(self) -> None:
        """Steps until no request is left."""
        while self.step():
            pass

    def _step(self) -> bool:
        batch = self._batch
        with self._changed:
            plan = batch.plan()
            asked = batch.said(plan) if plan and self._limits.ranks > 1 else ""
        if not plan:
            return False
        self._source.check_stays()
        with self._source.held() as self._limits:
            program = self._source.program(asked)  # ranks that plan otherwise raise here, and all is as before
            last, self._program = self._program(), weakref.ref(program)
            if last is not program and self._ended(ModelChanged(_CHANGED)):
                return True
            try:
                with self._changed:
                    batch.begin(plan, program)
                chosen = batch.run(plan, program)
                with self._changed:
                    batch.finish(plan, chosen, self._decode)
                    self._changed.notify_all()
                    return bool(batch.states)
            except BaseException as error:
                by = error if isinstance(error, Exception) else RuntimeError(f"a step was ended by {error!r}")
                self._ended(by)
                raise

    def _ended(self, error: Exception) -> bool:
        """Ends all requests that have begun; whether there were some."""
        with self._changed:
            were = self._batch.forget(error)
            self._changed.notify_all()
            return were

    def _until(self, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Returns when `ready`; makes the steps that it takes, unless a thread does."""
        end = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"waited {timeout:g} s for a request, which goes on")
            if self._thread is None and self._turn.acquire(blocking=False):
                try:
                    if not ready():
                        self.step()
                finally:
                    self._turn.release()
                continue
            with self._changed:  # of every step, whoever makes it; looks again now and then, in case nobody does
                if not ready():
                    self._changed.wait(LOOK_AGAIN_SECONDS if left is None else min(left, LOOK_AGAIN_SECONDS))

    def _cancel(self, state: RequestState) -> None:
        """Ends a request as it is; it leaves before the next step."""
        with self._changed:
            if not state.is_done:
                state.finish = "cancelled"
            self._changed.notify_all()

    # A thread that makes the steps -----------------------------------------------------------------------------

    def __enter__(self) -> Generator:
        if self._limits.ranks > 1:
            raise Unsupported(
                "where ranks share the model, all of them make steps at the same places of their programs, which a "
                "thread of its own does not; call run(), step(), or wait for a stream"
            )
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("a thread makes the steps of this Generator already")
            self._is_leaving = False
            self._thread = threading.Thread(target=self._drive, name="weft.Generator", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for what is under way; after an error, cancels it."""
        with self._changed:
            for state in self._batch.states if kind is not None else ():
                self._cancel(state)
            thread, self._is_leaving = self._thread, True
            self._changed.notify_all()
        assert thread is not None
        thread.join()
        with self._changed:
            self._thread = None
            self._changed.notify_all()

    def _drive(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_leaving or self._batch.states)
                if not self._batch.states:
                    return
            try:
                self.step()
            except Exception as error:  # nobody else would hear of it
                with self._changed:
                    for state in self._batch.states:
                        state.error = error
                    self._changed.notify_all()


class TokenStream:
    """The tokens of a request as they come; several may iterate over it, each from the first token on."""

    def __init__(self, state: RequestState, generator: Generator) -> None:
        self._state, self._generator = state, generator

    def __iter__(self) -> Iterator[int]:
        state = self._state
        for at in count():
            self._generator._until(lambda at=at: len(state.made) > at or state.is_done)  # type: ignore[misc]
            if at < len(state.made):
                yield state.made[at]
            elif state.error is not None:
                raise state.error
            else:
                return

    @property
    def tokens(self) -> list[int]:
        """Those that are there."""
        return list(self._state.made)

    @property
    def is_done(self) -> bool:
        """Whether no more tokens come."""
        return self._state.is_done

    def result(self, timeout: float | None = None) -> Completion:
        """What became of the request, when that is known. Raises what ended it otherwise; `TimeoutError` after
        `timeout` seconds, and then the request goes on."""
        self._generator._until(lambda: self._state.is_done, timeout)
        return self._state.result(self._generator._decode)

    def cancel(self) -> None:
        """Ends it as it is, if it is not over; other requests go on."""
        self._generator._cancel(self._state)

    def __repr__(self) -> str:
        state = self._state
        how = repr(state.error) if state.error is not None else state.finish or "under way"
        return f"TokenStream({state.request.prompt.numel()} tokens, {len(state.made)} since, {how})"
