"""`weft.generate`: prompts of any lengths in, tokens out, without a padded token anywhere; and how a token is chosen
from logits whose columns the ranks share.

Only candidates travel: of greedy choice one of each rank and sequence, of `top_k` as many as that. All ranks get all
candidates and draw by the same random numbers, so that all choose the same tokens, without a message about it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.transformer.call import Inputs, digest
from weft.transformer.memory import RankCache
from weft.transformer.passes import RankProgram

Gather = Callable[[Tensor], list[Tensor]]

_LEAST_TEMPERATURE = 1e-6  # logits divided by less are no numbers any more


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the most likely one at temperature 0, else drawn from the softmax of logits / temperature.

    `top_k` keeps the k most likely tokens; `top_p` as many of the most likely ones as it takes to reach that much
    probability. Among equals, the token with the lower number counts as more likely.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and not (name == "top_p" and value is None):
                raise ValueError(f"{name} is {value!r}, expected a number")
        if self.temperature != 0.0 and not _LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}, expected 0 (greedy) or a number from {_LEAST_TEMPERATURE:g} on"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k}, expected a whole number, at least 1, or None for all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, expected a number above 0 and up to 1, or None for all tokens")

    def candidates(self, words: int) -> int:
        """How many of the most likely tokens are needed, of `words`."""
        return 1 if self.temperature == 0.0 else min(self.top_k or words, words)


def choose(
    part: Tensor, first: int, total: int, sampling: Sampling, generators: Sequence[torch.Generator], gather: Gather
) -> Tensor:  # fmt: skip
    """int64 [n]: a token for each row of `part` [n, V_r], this rank's logits, whose first column is token `first`.

    A row draws from its own generator, one number a token: what others draw does not matter.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0]])
    >>> choose(logits, 0, 3, Sampling(), [], lambda mine: [mine]).tolist()
    [1]
    """
    values, tokens = _most_likely(part, first, sampling.candidates(total), gather)
    if not bool(torch.isfinite(values[:, 0]).all()):
        raise ValueError("the model's logits are not numbers (nan or inf), so that no token is the most likely one")
    if sampling.temperature == 0.0:
        return tokens[:, 0].clone()
    weights = torch.softmax(values.double() / sampling.temperature, dim=1)
    if sampling.top_p is not None:
        before = weights.cumsum(1) - weights
        weights = weights.masked_fill(before >= sampling.top_p, 0.0)
    drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    sums = weights.cumsum(1)
    at = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)
    # A number that rounds up to the whole sum would choose what lies behind the last token that can be chosen.
    last = (weights > 0).sum(1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(at, last)).squeeze(1)


def _most_likely(part: Tensor, first: int, count: int, gather: Gather) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, [n, count] in falling order, and their tokens."""
    values, places = _largest(part.float(), min(count, part.shape[1]))
    tokens = places + first
    missing = count - values.shape[1]
    if missing > 0:  # a rank with fewer words sends as much as the others
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        tokens = torch.nn.functional.pad(tokens, (0, missing), value=first)
    # One message: the tokens of a vocabulary fit into the bits of a float.
    message = torch.stack([values, tokens.to(torch.int32).view(torch.float32)])
    parts = gather(message)
    values = torch.cat([p[0] for p in parts], 1)
    tokens = torch.cat([p[1].contiguous().view(torch.int32) for p in parts], 1).to(torch.int64)
    if len(parts) == 1:
        return values, tokens
    best, at = _largest(values, count)
    return best, tokens.gather(1, at)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `topk`, but among equals the first one comes first."""
    if count == 1:  # numpy's argmax is many times faster than torch's, and takes the first of equals
        array: Any = values.numpy()
        at = torch.from_numpy(array.argmax(1))[:, None]
        return values.gather(1, at), at
    best, at = torch.sort(values, dim=1, descending=True, stable=True)
    return best[:, :count], at[:, :count]


# Of a model's generation config: what is followed, and what changes no token that is chosen here. Lengths are the
# caller's, there is no padding and always a prompt, beams are refused by their number, logits that are no numbers are
# an error, and an assistant's guesses are checked by the model. All else is refused unless it is None or neutral.
_KNOWN = {
    "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "min_length", "min_new_tokens",
    "suppress_tokens", "begin_suppress_tokens",
    "max_length", "max_new_tokens", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
    "use_cache", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config", "low_memory",
    "prefill_chunk_size", "return_dict_in_generate", "early_stopping", "length_penalty", "diversity_penalty",
    "renormalize_logits", "remove_invalid_values", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
}  # fmt: skip
_OF_DRAWS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "guidance_scale": 1.0, "token_healing": False,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": 0.0, "use_mtp": False,
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """What a model's generation config does to logits: a penalty on tokens that came before, tokens that come never or
    not first, and how many tokens come before an end, with the prompt (least) or without it."""

    penalty: float = 1.0
    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    least: int = 0
    least_new: int | None = None

    @classmethod
    def of(cls, config: Any, *, drawn: bool) -> Rules:
        """Those of a config. Raises for what is set there and not followed; `drawn`: its settings of draws count."""
        if config is None:
            return cls()
        odd = []
        for name, value in vars(config).items():
            known = value is None or name in _KNOWN or name.startswith(("_", "output_", "cache_"))
            neutral = (name in _OF_DRAWS and not drawn) or (name in _NEUTRAL and value == _NEUTRAL[name])
            if not known and not neutral and value != getattr(type(config)(), name, None):
                odd.append(f"{name}={value!r:.60}")
        if odd:
            raise ValueError(
                f"the model's generation_config sets {', '.join(odd)}, which weft.generate does not follow: its tokens "
                "would be others; set None there, or call model.generate()"
            )
        return cls(
            1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
            tuple(config.suppress_tokens or ()),
            tuple(config.begin_suppress_tokens or ()),
            config.min_length or 0,
            config.min_new_tokens,
        )

    def applied(self, part: Tensor, first: int, rows: list[tuple[Tensor, list[int]]], ends: set[int]) -> Tensor:
        """The logits to choose from; each row has its prompt and the tokens made since."""
        if self == Rules():
            return part
        scores = part.to(torch.float32, copy=True)
        for own, (prompt, made) in zip(scores, rows, strict=True):
            if self.penalty != 1.0:
                seen = torch.tensor(sorted({*prompt.tolist(), *made})) - first
                seen = seen[(seen >= 0) & (seen < own.numel())]
                own[seen] = torch.where(own[seen] < 0, own[seen] * self.penalty, own[seen] / self.penalty)
            least = self.least - prompt.numel() if self.least_new is None else self.least_new
            hidden = {*self.never, *(() if made else self.not_first), *(ends if len(made) < least else ())}
            own[[token - first for token in hidden if 0 <= token - first < own.numel()]] = float("-inf")
        return scores


def _sampling(config: Any, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
    """What the caller says; the config's where that is no temperature, and the config wants draws."""
    if temperature is not None or config is None or not config.do_sample:
        return Sampling(0.0 if temperature is None else temperature, top_k, top_p)
    own_k, own_p = 50 if config.top_k is None else config.top_k, config.top_p  # 50 is transformers' own
    return Sampling(
        1.0 if config.temperature is None else config.temperature,
        (own_k or None) if top_k is None else top_k,
        (None if own_p is None or own_p >= 1.0 else own_p) if top_p is None else top_p,
    )


_PREFILL_TOKENS = 8192  # prompts are taken in together up to this many tokens


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

    model:     what `weft.parallelize` made of a Hugging Face decoder, or a `RankProgram`
    prompts:   token numbers, a list or tensor [length] each; a `PackedBatch`, nested, a tokenizer's or collator's dict
    eos:       a token, or several, that ends a sequence; it is the last of its list. The model's own if None is given
               and its generation config has one; an empty collection for none

    Temperature 0 takes the most likely token, and so does None, unless the model's generation config has `do_sample`;
    then its temperature counts, and its top_k and top_p where None is given. Otherwise tokens are drawn with random
    numbers that follow from `seed` and the prompt's number in the list: the same prompt, seed and place give the same
    tokens, whatever else is in the list. A sequence that has ended leaves the batch. Collective.

    The generation config's repetition_penalty, min_length, min_new_tokens, suppress_tokens and begin_suppress_tokens
    count, too; a setting that would change tokens and is not followed is an error.

        model = weft.parallelize(AutoModelForCausalLM.from_pretrained(...), mesh)
        weft.generate(model, [[1, 5, 9], [1, 7]], max_new_tokens=32)
    """
    prompts = getattr(model, "weft_prompts", dict)(prompts) if isinstance(prompts, Mapping) else prompts
    Sampling(0.0 if temperature is None else temperature, top_k, top_p)  # raises, whatever model there is
    _check_number("max_new_tokens", max_new_tokens, lowest=0)
    _check_number("seed", seed)
    with _whole(model) as (words, limit, config, program_for):
        sampling = _sampling(config, temperature, top_k, top_p)
        rules = Rules.of(config, drawn=temperature is None and sampling.temperature > 0.0)
        ends = _ends(getattr(config, "eos_token_id", None)) if eos is None else _checked_ends(eos, words)
        given = [_checked(i, p, words, limit, max_new_tokens) for i, p in enumerate(_listed(prompts))]
        if not given or max_new_tokens == 0:
            return [[] for _ in given]
        asked = f"{len(given)} prompts {digest(*given)} of {[len(p) for p in given[:8]]} tokens and more, "
        asked += f"max_new_tokens={max_new_tokens} {sampling} {rules} seed={seed} eos={sorted(ends)}"
        program = program_for(f"generate: {asked}")
        with torch.inference_mode():
            return Generation(program, given, max_new_tokens, sampling, seed, ends, rules).run()


class Generation:
    """One call: a slot of the cache, a list of tokens and a source of random numbers for each prompt."""

    def __init__(
        self, program: RankProgram, prompts: list[Tensor], most: int, sampling: Sampling, seed: int, ends: set[int],
        rules: Rules,
    ) -> None:  # fmt: skip
        self._program, self._prompts, self._most = program, prompts, most
        self._sampling, self._ends, self._rules = sampling, ends, rules
        longest = max(p.numel() for p in prompts)
        self._cache: RankCache = program.cache(slots=len(prompts), capacity=longest + most)
        self._made: list[list[int]] = [[] for _ in prompts]
        self._generators = [_generator(seed, i) for i in range(len(prompts))] if sampling.temperature else []

    def run(self) -> list[list[int]]:
        """All tokens."""
        for some in self._prefills():
            tokens = torch.cat([self._prompts[i] for i in some])
            self._step(some, tokens, [self._prompts[i].numel() for i in some])
        while alive := [i for i, made in enumerate(self._made) if not self._is_done(made)]:
            self._step(alive, torch.tensor([self._made[i][-1] for i in alive]), [1] * len(alive))
        return self._made

    def _prefills(self) -> Iterator[list[int]]:
        """The prompts in their order, as many at once as fit."""
        some: list[int] = []
        tokens = 0
        for i, prompt in enumerate(self._prompts):
            if some and tokens + prompt.numel() > _PREFILL_TOKENS:
                yield some
                some, tokens = [], 0
            some.append(i)
            tokens += prompt.numel()
        yield some

    def _step(self, sequences: list[int], tokens: Tensor, lengths: list[int]) -> None:
        """Takes in new tokens of these sequences, and adds the next token to each."""
        program, slots = self._program, torch.tensor(sequences)
        inputs = inputs_of(tokens, torch.tensor(lengths), self._cache.lengths[slots], program)
        last = None if tokens.numel() == len(sequences) else inputs.cu_seqlens[1:].to(torch.int64) - 1
        hidden = program.run(inputs, cache=self._cache, slots=slots, rows=last)
        words = program.model.words
        generators = [self._generators[i] for i in sequences] if self._generators else []
        rows = [(self._prompts[i], self._made[i]) for i in sequences]
        logits = self._rules.applied(program.logits(hidden), words.first, rows, self._ends)
        chosen = choose(logits, words.first, words.total, self._sampling, generators, program.gather)
        for i, token in zip(sequences, chosen.tolist(), strict=True):
            self._made[i].append(token)

    def _is_done(self, made: list[int]) -> bool:
        return len(made) >= self._most or made[-1] in self._ends


def inputs_of(tokens: Tensor, lengths: Tensor, past: Tensor, program: RankProgram) -> Inputs:
    """New tokens [T] of sequences that have `past` tokens already, `lengths` new ones each."""
    cu = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    positions = torch.arange(tokens.numel()) + (past - cu[:-1]).repeat_interleave(lengths)
    embedding = program.transformer.embedding
    assert embedding is not None
    known = {"input_ids": tokens, "position_ids": positions}
    if any(name not in known for name in embedding.names):
        raise ValueError(f"a model with {', '.join(embedding.names)} does not generate text; expected a decoder")
    indices = tuple(known[name].contiguous() for name in embedding.names)
    return Inputs(cu, tokens.numel(), indices, None, positions, int(positions.max()) if tokens.numel() else 0)


@contextmanager
def _whole(model: Any) -> Iterator[tuple[int, int, Any, Callable[[str], RankProgram]]]:
    """How many words a model has, how long a sequence may be, its generation config, and its program; nobody else calls
    the model meanwhile.
    """
    if isinstance(model, RankProgram):
        embedding = model.transformer.embedding
        positions = None if embedding is None or len(embedding.tables) < 2 else embedding.tables[1].shape[0]
        yield model.model.words.total, positions or torch.iinfo(torch.int32).max, None, lambda asked: model
        return
    if not hasattr(model, "weft_program"):
        raise ValueError(
            f"got a {type(model).__name__}, expected a decoder with a language head that weft.parallelize has shared "
            f"among ranks; a group of one rank will do"
        )
    limit = int(model.config.max_position_embeddings)
    with model.weft_alone() as engine:
        yield engine.vocabulary, limit, getattr(model, "generation_config", None), model.weft_program


def _check_number(name: str, value: Any, *, lowest: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (lowest is not None and value < lowest):
        expected = "a whole number" if lowest is None else f"a whole number, {lowest} or more"
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


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts are a {type(prompts).__name__}, expected a list of prompts, each a list of tokens")
    return list(prompts)


def _as_tensor(number: int, tokens: list[Any]) -> Tensor:
    if not tokens:
        return torch.empty(0, dtype=torch.int64)
    try:  # of numpy, too; a float is none
        return torch.tensor([operator.index(token) for token in tokens], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"prompt {number} is {tokens!r:.60}, expected a list of token numbers") from error


def _checked(number: int, prompt: Any, words: int, limit: int, most: int) -> Tensor:
    if not isinstance(prompt, Tensor) and (isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable)):
        raise ValueError(
            f"prompt {number} is {prompt!r:.60}, expected token numbers: a list or tensor of them for each prompt"
        )
    tokens = prompt if isinstance(prompt, Tensor) else _as_tensor(number, list(prompt))
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"prompt {number} is {tokens.dtype} {list(tokens.shape)}, expected token numbers [length]")
    if not tokens.numel():
        raise ValueError(f"prompt {number} is empty, expected at least one token, such as the one that begins a text")
    tokens = tokens.detach().to(torch.int64).contiguous()
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= words:
        raise ValueError(f"prompt {number} has tokens from {low} to {high}, expected 0 to {words - 1}, the vocabulary")
    if tokens.numel() + most > limit:
        raise ValueError(
            f"prompt {number} has {tokens.numel()} tokens and {most} are to follow, but the model's limit is {limit}; "
            f"shorten the prompt or lower max_new_tokens"
        )
    return tokens


def _generator(seed: int, number: int) -> torch.Generator:
    """Far apart for neighbouring seeds and prompts."""
    mixed = torch.Generator().manual_seed(seed % 2**63)
    offset = int(torch.randint(2**62, (1,), generator=mixed))
    return torch.Generator().manual_seed((offset + number * 0x9E3779B97F4A7C15) % 2**63)
