"""How a token is chosen from logits whose columns the ranks share: what is done to the logits before (a model's
generation config, penalties, processors of the caller's), the draw, and log-probabilities.

Only candidates travel: of greedy choice one of each rank and sequence, of `top_k` as many as that. All ranks get all
candidates and draw by the same random numbers, so that all choose the same tokens, without a message about it.
Log-probabilities need the whole rows of those that ask for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.transformer.parts import IndexRun, Words

Gather = Callable[[Tensor], list[Tensor]]
Processor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [1, n], scores [1, V]) -> scores, as of transformers

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
    """int64 [n]: a token for each row of `part` [n, V_r], this rank's logits, whose first column is token `first`; -1
    for a row whose logits are not numbers, so that no token is the most likely one.

    A row draws from its own generator, one number a token: what others draw does not matter.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0]])
    >>> choose(logits, 0, 3, Sampling(), [], lambda mine: [mine]).tolist()
    [1]
    """
    values, tokens = _most_likely(part, first, sampling.candidates(total), gather)
    good = torch.isfinite(values[:, 0])
    if sampling.temperature == 0.0:
        return tokens[:, 0].masked_fill(~good, -1)
    weights = torch.softmax(values.double() / sampling.temperature, dim=1)
    if sampling.top_p is not None:
        before = weights.cumsum(1) - weights
        weights = weights.masked_fill(before >= sampling.top_p, 0.0)
    drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    sums = weights.cumsum(1)
    at = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)
    # A number that rounds up to the whole sum would choose what lies behind the last token that can be chosen.
    last = ((weights > 0).sum(1, keepdim=True) - 1).clamp(min=0)
    return tokens.gather(1, torch.minimum(at, last)).squeeze(1).masked_fill(~good, -1)


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


@dataclass(frozen=True, eq=False)
class History:
    """What came before a token: its prompt [n], and the tokens made since."""

    prompt: Tensor
    made: list[int] = field(default_factory=list)

    @cached_property
    def words(self) -> frozenset[int]:
        """Those of the prompt."""
        return frozenset(self.prompt.tolist())

    def tokens(self) -> Tensor:
        """int64 [n + m]"""
        return torch.cat([self.prompt, torch.tensor(self.made, dtype=torch.int64)])


@dataclass(frozen=True)
class Rules:
    """What is done to logits before a token is chosen: a penalty on tokens that came before, as of transformers; tokens
    that come never or not first; how many tokens come before an end, with the prompt (least) or without it; and what is
    subtracted from tokens that were made before, once (presence) or each time (frequency), as of vLLM and OpenAI."""

    penalty: float = 1.0
    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    least: int = 0
    least_new: int | None = None
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        names = {"repetition_penalty": self.penalty, "presence_penalty": self.presence}
        for name, value in {**names, "frequency_penalty": self.frequency}.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}, expected a number")
        if self.penalty <= 0.0:
            raise ValueError(f"repetition_penalty is {self.penalty}, expected a number above 0; 1 is none")

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

    def apply(self, own: Tensor, first: int, history: History, ends: Collection[int]) -> None:
        """Changes float32 logits [V_r] in place; their first column is token `first`."""
        made, here = history.made, IndexRun(first, first + own.numel())
        if self.penalty != 1.0:
            seen = _columns(sorted({*history.words, *made}), here)
            own[seen] = torch.where(own[seen] < 0, own[seen] * self.penalty, own[seen] / self.penalty)
        if made and (self.presence or self.frequency):
            counts = Counter(made)
            columns = _columns(counts, here)
            times = torch.tensor([counts[column + first] for column in columns], dtype=torch.float32)
            own[columns] = own[columns] - self.frequency * times - self.presence
        least = self.least - history.prompt.numel() if self.least_new is None else self.least_new
        hidden = {*self.never, *(() if made else self.not_first), *(ends if len(made) < least else ())}
        own[_columns(hidden, here)] = float("-inf")


def _columns(tokens: Iterable[int], here: IndexRun) -> list[int]:
    """Where a rank has those of some tokens that it has."""
    return [token - here.first for token in tokens if here.first <= token < here.end]


def processed(scores: Tensor, processors: Sequence[Processor], history: History) -> Tensor:
    """What the caller's processors make of a row of logits [V], in the form that they know from transformers."""
    with torch.inference_mode(False), torch.no_grad():  # they may keep what they get, or write to it
        ids, own = history.tokens().clone()[None], scores.clone()[None]
        shape = own.shape
        for processor in processors:
            own = processor(ids, own)
            if not isinstance(own, Tensor) or own.shape != shape or not own.is_floating_point():
                got = f"{own.dtype} {list(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
                raise ValueError(f"a logits processor gave {got}, expected scores {list(shape)}: {processor!r:.80}")
        return own[0].float()


def sampling_of(config: Any, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
    """What the caller says; the config's where that is no temperature, and the config wants draws."""
    if temperature is not None or config is None or not config.do_sample:
        return Sampling(0.0 if temperature is None else temperature, top_k, top_p)
    own_k, own_p = 50 if config.top_k is None else config.top_k, config.top_p  # 50 is transformers' own
    return Sampling(
        1.0 if config.temperature is None else config.temperature,
        (own_k or None) if top_k is None else top_k,
        (None if own_p is None or own_p >= 1.0 else own_p) if top_p is None else top_p,
    )


# Log-probabilities -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token that was chosen, and the most likely tokens with theirs, the most likely first.

    They are the model's own, log_softmax of its logits: before penalties, processors and temperature.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits: Tensor, token: int, count: int) -> TokenLogprob:
        """From a whole row of logits [V].

        >>> TokenLogprob.of(torch.tensor([0.0, 2.0, 0.0]).log_softmax(0), 0, 1).top[0][0]
        1
        """
        row = torch.log_softmax(logits[None].float(), dim=1)[0]
        if not count:
            return cls(token, float(row[token]))
        # Among equals the lower token counts as more likely, as everywhere here; topk does not say.
        least = row.topk(count).values[-1]
        high = (row >= least).nonzero().squeeze(1)
        best = high[torch.sort(row[high], descending=True, stable=True).indices[:count]]
        return cls(token, float(row[token]), tuple(zip(best.tolist(), row[best].tolist(), strict=True)))


def whole_rows(part: Tensor, words: Words, gather: Gather, size: int) -> Tensor:
    """[n, V] on every rank, of what each has of them, [n, V_r]."""
    if size == 1:
        return part
    counts = [IndexRun.of(words.total, rank, size).count for rank in range(size)]
    padded = torch.nn.functional.pad(part, (0, max(counts) - part.shape[1]))  # ranks send as much as each other
    return torch.cat([p[:, :n] for p, n in zip(gather(padded), counts, strict=True)], 1)


# Many sequences at once, each in its own way ---------------------------------------------------------------


@dataclass(frozen=True)
class TokenChoice:
    """How a sequence chooses its tokens; `logprobs`: of so many likely tokens besides the one chosen, None for none."""

    sampling: Sampling = Sampling()
    rules: Rules = Rules()
    ends: frozenset[int] = frozenset()
    logprobs: int | None = None
    processors: tuple[Processor, ...] = ()

    def __str__(self) -> str:
        """In words that ranks compare."""
        more = "" if self.logprobs is None else f" logprobs={self.logprobs}"
        return f"{self.sampling} {self.rules} eos={sorted(self.ends)}{more}"


@dataclass(eq=False)
class ChosenToken:
    """The token that follows (-1: none can), its log-probability where asked for, or what a processor raised."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: Exception | None = None


Row = tuple[TokenChoice, History, torch.Generator | None]


def choose_each(part: Tensor, rows: Sequence[Row], words: Words, gather: Gather, size: int) -> list[ChosenToken]:
    """What follows in each sequence, from this rank's logits [n, V_r]. Rows that are chosen alike go in one message."""
    found = [ChosenToken() for _ in rows]
    asking = [i for i, (choice, _, _) in enumerate(rows) if choice.logprobs is not None]
    whole = whole_rows(part[asking], words, gather, size) if asking else part[:0]
    scores = _ruled(part, rows, words, found)
    alike: dict[Sampling, list[int]] = {}
    for i, (choice, _, _) in enumerate(rows):
        alike.setdefault(choice.sampling, []).append(i)
    for sampling, some in alike.items():
        draws = [draw for i in some if (draw := rows[i][2]) is not None]
        own = scores if len(some) == len(rows) else scores[some]
        for i, token in zip(some, choose(own, words.first, words.total, sampling, draws, gather).tolist(), strict=True):
            found[i].token = token
    for i, row in zip(asking, whole, strict=True):
        if found[i].token >= 0:
            found[i].logprob = TokenLogprob.of(row, found[i].token, rows[i][0].logprobs or 0)
    return found


def _ruled(part: Tensor, rows: Sequence[Row], words: Words, found: list[ChosenToken]) -> Tensor:
    """The logits to choose from."""
    if all(choice.rules == _NO_RULES and not choice.processors for choice, _, _ in rows):
        return part
    scores = part.to(torch.float32, copy=True)
    for own, (choice, history, _), result in zip(scores, rows, found, strict=True):
        if choice.rules != _NO_RULES:
            choice.rules.apply(own, words.first, history, choice.ends)
        if choice.processors:
            try:
                own.copy_(processed(own, choice.processors, history))
            except Exception as error:  # the caller's own code: it concerns one request
                result.error = error
    return scores


_NO_RULES = Rules()
