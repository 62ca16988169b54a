"""The next token of each sequence, from logits whose columns the ranks share.

Only candidates travel: of greedy choice one of each rank and sequence, of `top_k` as many as that. All ranks get all
candidates and draw by the same random numbers, so that all choose the same tokens, without a word about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        raise ValueError("the model's logits are no numbers (nan or inf), so that no token is the most likely one")
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
