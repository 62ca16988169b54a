"""Lengths and texts for the packed benchmarks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Length at shares 0, 0.1, 0.5, 0.9, 0.99 and 1 of the texts; between these it rises evenly.
_QUANTILES = {
    "squad-384": (32, 107, 159, 260, 384, 384),
    "wikipedia-512": (16, 48, 204, 512, 512, 512),
}
_SHARES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, eq=False)
class Padded:
    """A batch as users have it: ids and mask [B, S], and the lengths."""

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def uniform(longest: int) -> Callable[[random.Random], int]:
    """Uniform on [0.2 S, S], as ByteTransformer measures."""
    return lambda rng: rng.randint(max(1, longest // 5), longest)


def equal(length: int) -> Callable[[random.Random], int]:
    """No padding to save."""
    return lambda rng: length


def measured(name: str) -> Callable[[random.Random], int]:
    """As long as real texts are; see `_QUANTILES`."""
    values = _QUANTILES[name]

    def draw(rng: random.Random) -> int:
        share = rng.random()
        at = max(i for i, s in enumerate(_SHARES[:-1]) if s <= share)
        part = (share - _SHARES[at]) / (_SHARES[at + 1] - _SHARES[at])
        return round(values[at] + part * (values[at + 1] - values[at]))

    return draw


def batch(draw: Callable[[random.Random], int], size: int, *, vocabulary: int = 30_000, seed: int = 0) -> Padded:
    """`size` sequences of random ids with lengths from `draw`, padded on the right to the longest."""
    rng = random.Random(seed)
    lengths = tuple(draw(rng) for _ in range(size))
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, vocabulary, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return Padded(ids, mask, lengths)


def sentences(count: int) -> list[str]:
    """Real sentences of different length, from the documentation that ships with Python; they repeat if need be."""
    from pydoc_data import topics

    parts = [
        re.sub(r"\s+", " ", part).strip()
        for text in topics.topics.values()
        for part in re.split(r"\n\n|(?<=[.:;])\s+", text)
    ]
    found = [part for part in parts if part]
    random.Random(0).shuffle(found)
    return [found[i % len(found)] for i in range(count)]
