"""One request for text: what is asked for, checked before anything runs; what has become of it; and its result.

Who runs requests together is `generation.py`. Nothing in here knows of other requests: what a request gets depends on
its prompt, its options and the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.transformer.call import digest
from weft.transformer.sampling import (
    ChosenToken,
    History,
    Processor,
    Row,
    Rules,
    Sampling,
    TokenChoice,
    TokenLogprob,
    sampling_of,
)

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, eq=False)
class TextRequest:
    """What is asked for, checked: the tokens that follow a prompt [n], at most `most`.

    `stops` are runs of tokens, or texts, after which it is over. `number` is its place among those that share a seed:
    random numbers follow from both.
    """

    prompt: Tensor
    most: int
    choice: TokenChoice
    seed: int = 0
    number: int = 0
    stops: tuple[str | tuple[int, ...], ...] = ()

    @property
    def options(self) -> str:
        """In words that ranks compare."""
        more = f" stop={self.stops!r}" if self.stops else ""
        return f"max_new_tokens={self.most} {self.choice} seed={self.seed}{more}"

    def __str__(self) -> str:
        return f"a prompt of {self.prompt.numel()} tokens {digest(self.prompt)}, {self.options}"


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    tokens     the new tokens. One that ended it, and those of a stop, are among them
    finish     "eos", "stop", "length" (as many as were asked for) or "cancelled"
    text       the tokens as text where the generator has a tokenizer: without the token that ended it, cut off where a
               stop begins
    logprobs   of each token, where they were asked for
    """

    tokens: list[int]
    finish: str
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(eq=False)
class RequestState:
    """A request under way: tokens made, how many tokens its slot of the cache has `taken` in, and whether it is over.

    It is over when `finish` says how, or `error` why not.
    """

    request: TextRequest
    history: History = field(init=False)
    taken: int = 0
    slot: int | None = None
    finish: str | None = None
    error: BaseException | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    draws: torch.Generator | None = None
    _cut: int | None = None  # where the text ends

    def __post_init__(self) -> None:
        self.history = History(self.request.prompt)
        if self.request.choice.sampling.temperature:
            self.draws = _generator(self.request.seed, self.request.number)
        if not self.request.most:
            self.finish = "length"

    @cached_property
    def said(self) -> str:
        return str(self.request)

    @property
    def made(self) -> list[int]:
        return self.history.made

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def known(self) -> int:
        """Tokens of the prompt and made: what its slot will hold before the next one is chosen."""
        return self.request.prompt.numel() + len(self.made)

    def next_tokens(self, count: int) -> Tensor:
        """The first `count` tokens that its slot has not taken in."""
        n = self.request.prompt.numel()
        if self.taken < n:
            return self.request.prompt[self.taken : self.taken + count]
        return torch.tensor(self.made[self.taken - n : self.taken - n + count])

    @property
    def row(self) -> Row:
        """How its next token is chosen."""
        return self.request.choice, self.history, self.draws

    def add(self, chosen: ChosenToken, decode: Decode | None) -> None:
        """One more token; sees whether that was the last."""
        if self.is_done:  # cancelled meanwhile
            return
        if chosen.error is None and chosen.token < 0:
            self.error = ValueError(
                "the model's logits are not numbers (nan or inf), so that no token is the most likely one"
            )
            return
        try:
            if chosen.error is not None:
                raise chosen.error
            self.made.append(chosen.token)
            if chosen.logprob is not None:
                self.logprobs.append(chosen.logprob)
            self.finish = self._finish(chosen.token, decode)
        except Exception as error:  # of the caller's own code, a processor or a tokenizer: it concerns this one only
            self.error = error

    def _finish(self, token: int, decode: Decode | None) -> str | None:
        if token in self.request.choice.ends:
            return "eos"
        if self._is_stopped(decode):
            return "stop"
        return "length" if len(self.made) >= self.request.most else None

    def _is_stopped(self, decode: Decode | None) -> bool:
        stops, made = self.request.stops, self.made
        strings = [stop for stop in stops if isinstance(stop, str)]
        if strings:
            assert decode is not None
            text = decode(made)  # all of it: a token's text may depend on those before it
            found = [at for at in (text.find(stop) for stop in strings) if at >= 0]
            if found:
                self._cut = min(found)
                return True
        runs = [stop for stop in stops if not isinstance(stop, str) and tuple(made[-len(stop) :]) == stop]
        if runs and decode is not None:
            self._cut = len(decode(made[: len(made) - max(map(len, runs))]))
        return bool(runs)

    def result(self, decode: Decode | None) -> Completion:
        """When it is over. Raises what went wrong."""
        if self.error is not None:
            raise self.error
        assert self.finish is not None
        text = None
        if decode is not None:
            text = decode(self.made[:-1] if self.finish == "eos" else list(self.made))[: self._cut]
        logprobs = None if self.request.choice.logprobs is None else list(self.logprobs)
        return Completion(list(self.made), self.finish, text, logprobs)


def _generator(seed: int, number: int) -> torch.Generator:
    """Far apart for neighbouring seeds and prompts."""
    mixed = torch.Generator().manual_seed(seed % 2**63)
    offset = int(torch.randint(2**62, (1,), generator=mixed))
    return torch.Generator().manual_seed((offset + number * 0x9E3779B97F4A7C15) % 2**63)


# What was given, checked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLimits:
    """What a model takes: tokens below `words`, sequences of up to `length`; its own generation config; its ranks."""

    words: int
    length: int
    config: Any = None
    ranks: int = 1


def request_of(
    limits: ModelLimits,
    prompt: Any,
    *,
    name: str = "the prompt",
    max_new_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    number: int = 0,
    eos: Any = None,
    stop: Any = None,
    logprobs: int | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logits_processor: Any = None,
) -> TextRequest:
    """What a caller asks for. Where that says nothing, the model's generation config counts. Raises for what is wrong,
    or cannot be followed."""
    check_numbers(max_new_tokens, seed, temperature, top_k, top_p)
    sampling = sampling_of(limits.config, temperature, top_k, top_p)
    rules = Rules.of(limits.config, drawn=temperature is None and sampling.temperature > 0.0)
    penalty = rules.penalty if repetition_penalty is None else repetition_penalty
    rules = replace(rules, penalty=penalty, presence=presence_penalty, frequency=frequency_penalty)
    own = getattr(limits.config, "eos_token_id", None)
    ends = _ends(own) if eos is None else _checked_ends(eos, limits.words)
    if logprobs is not None:
        check_number("logprobs", logprobs, lowest=0, highest=limits.words)
    choice = TokenChoice(sampling, rules, frozenset(ends), logprobs, _checked_processors(logits_processor))
    stops, tokens = _checked_stops(stop, limits.words), _checked(name, prompt, limits, max_new_tokens)
    return TextRequest(tokens, max_new_tokens, choice, seed, number, stops)


def check_numbers(
    most: int, seed: int, temperature: float | None, top_k: int | None, top_p: float | None
) -> None:  # fmt: skip
    """Raises for numbers that are wrong whatever the model is."""
    Sampling(0.0 if temperature is None else temperature, top_k, top_p)
    check_number("max_new_tokens", most, lowest=0)
    check_number("seed", seed)


def check_number(name: str, value: Any, *, lowest: int | None = None, highest: int | None = None) -> None:
    """Raises unless it is a whole number within limits."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or (lowest is not None and value < lowest) or (highest is not None and value > highest):
        expected = "a whole number" if lowest is None else f"a whole number, {lowest} or more"
        expected += "" if highest is None else f", up to {highest}"
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def _ends(eos: int | Collection[int] | Tensor | None) -> set[int]:
    if isinstance(eos, Tensor):
        eos = eos.reshape(-1).tolist()
    return {eos} if isinstance(eos, int) else {operator.index(token) for token in (() if eos is None else eos)}


def _checked_ends(eos: Any, words: int) -> set[int]:
    try:
        ends = _ends(eos)
    except TypeError as error:
        raise ValueError(f"eos is {eos!r:.60}, expected a token number, or several") from error
    if odd := [token for token in sorted(ends) if not 0 <= token < words]:
        raise ValueError(f"eos has the tokens {odd}, expected 0 to {words - 1}, the vocabulary; () for none")
    return ends


def _checked_stops(stop: Any, words: int) -> tuple[str | tuple[int, ...], ...]:
    given = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    found: list[str | tuple[int, ...]] = []
    for item in given:
        try:
            found.append(item if isinstance(item, str) else tuple(operator.index(token) for token in item))
        except TypeError as error:
            raise ValueError(
                f"stop has {item!r:.60}, expected texts, or lists of tokens such as [[5, 6]] for one list"
            ) from error
        if not found[-1]:
            raise ValueError("stop has an empty text or list, which everything ends with; leave it out")
        if not isinstance(found[-1], str) and (odd := [t for t in found[-1] if not 0 <= t < words]):
            raise ValueError(f"stop has the tokens {odd}, expected 0 to {words - 1}, the vocabulary")
    return tuple(found)


def _checked_processors(given: Any) -> tuple[Processor, ...]:
    if given is None:
        return ()
    if not isinstance(given, Iterable) or not all(map(callable, given := list(given))):
        raise ValueError(f"logits_processor is {given!r:.80}, expected a list of functions of (input_ids, scores)")
    return tuple(given)


def decode_of(tokenizer: Any) -> Decode:
    """From tokens to text, by a tokenizer or a function.

    >>> decode_of(lambda tokens: "".join(map(chr, tokens)))([104, 105])
    'hi'
    """
    own = getattr(tokenizer, "decode", None)
    if callable(own):
        return lambda tokens: str(own(tokens, skip_special_tokens=True))
    if callable(tokenizer):
        decode: Decode = tokenizer
        return decode
    raise ValueError(
        f"tokenizer is a {type(tokenizer).__name__}, expected one with decode(tokens, skip_special_tokens=True), or a "
        "function from a list of tokens to text"
    )


def listed(prompts: Any) -> list[Any]:
    """Several prompts, whatever holds them."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts are a {type(prompts).__name__}, expected a list of prompts, each a list of tokens")
    return list(prompts)


def _as_tensor(name: str, tokens: Sequence[Any]) -> Tensor:
    if not tokens:
        return torch.empty(0, dtype=torch.int64)
    try:  # of numpy, too; a float is none
        return torch.tensor([operator.index(token) for token in tokens], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} is {tokens!r:.60}, expected a list of token numbers") from error


def _checked(name: str, prompt: Any, limits: ModelLimits, most: int) -> Tensor:
    if not isinstance(prompt, Tensor) and (isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable)):
        raise ValueError(f"{name} is {prompt!r:.60}, expected token numbers: a list or tensor of them for each prompt")
    tokens = prompt if isinstance(prompt, Tensor) else _as_tensor(name, list(prompt))
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"{name} is {tokens.dtype} {list(tokens.shape)}, expected token numbers [length]")
    if not tokens.numel():
        raise ValueError(f"{name} is empty, expected at least one token, such as the one that begins a text")
    tokens = tokens.detach().to(torch.int64, copy=True).contiguous()  # the caller's may change before it is its turn
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.words:
        raise ValueError(f"{name} has tokens from {low} to {high}, expected 0 to {limits.words - 1}, the vocabulary")
    if tokens.numel() + most > limits.length:
        raise ValueError(
            f"{name} has {tokens.numel()} tokens and {most} are to follow, but the model's limit is {limits.length}; "
            f"shorten the prompt or lower max_new_tokens"
        )
    return tokens
