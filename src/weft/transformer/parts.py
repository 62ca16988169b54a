"""Each rank's part of a model, as values. P ranks share a stack; a model in one process is the part of one rank. Rank r
computes with its own heads and its own columns of the MLP; T tokens lie as T_r rows between blocks (sequence parallel),
or as T rows on every rank where T is too small to split.

    embedding   table[ids] of the rank's words, summed over ranks        -> x [T_r, width]
    column      y = all_gather(x) w_r^T + b_r                            -> [T, N_r]     qkv, up (and gate)
    row         x = reduce_scatter(y w_r^T) + b                          -> [T_r, width] out, down
    head        logits = all_gather(x) w_r^T                             -> [T, V_r]

The same words as `weft.models.spec`: `transformer` describes a model with the rank's heads and the rank's weights. The
biases of `out` and `down` and all norms are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.models.spec import HeadTransform, Projection, Transformer

# With fewer rows a rank, a reduce-scatter and an all-gather cost two latencies where an all-reduce costs one, and
# norms on so few rows are not worth sharing.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class IndexRun:
    """The numbers `first` to `end`.

    >>> [IndexRun.of(5, rank, 2) for rank in range(2)]
    [IndexRun(first=0, end=3), IndexRun(first=3, end=5)]
    """

    first: int
    end: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> IndexRun:
        """The part of rank `rank` of `size`, as torch.chunk cuts."""
        step = -(-total // size)
        return cls(min(rank * step, total), min((rank + 1) * step, total))

    @classmethod
    def balanced(cls, total: int, rank: int, size: int) -> IndexRun:
        """The part of rank `rank` of `size`, as torch.tensor_split cuts: no part is empty where there are enough.

        >>> [IndexRun.balanced(5, rank, 4).count for rank in range(4)]
        [2, 1, 1, 1]
        """
        step, larger = divmod(total, size)
        return cls(rank * step + min(rank, larger), (rank + 1) * step + min(rank + 1, larger))

    def times(self, width: int) -> IndexRun:
        """The same run of blocks of `width`."""
        return IndexRun(self.first * width, self.end * width)

    def shifted(self, by: int) -> IndexRun:
        """The same run, `by` further on."""
        return IndexRun(self.first + by, self.end + by)

    @property
    def count(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Share:
    """Rank `rank`'s share of `tokens` rows: a run of them where they are `split`, else all.

    >>> Share.of(37, rank=1, size=2).mine, Share.of(5, rank=1, size=2).mine
    (IndexRun(first=19, end=37), IndexRun(first=0, end=5))
    """

    tokens: int
    rank: int
    size: int
    split: bool

    @classmethod
    def of(cls, tokens: int, *, rank: int, size: int) -> Share:
        """Split where every rank has enough rows."""
        return cls(tokens, rank, size, size > 1 and tokens >= FEWEST_ROWS * size)

    @property
    def mine(self) -> IndexRun:
        return self.of_rank(self.rank)

    def of_rank(self, rank: int) -> IndexRun:
        """The rows that a rank holds."""
        return IndexRun.of(self.tokens, rank, self.size) if self.split else IndexRun(0, self.tokens)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's rows of [T, ...]: a view."""
        return whole[self.mine.first : self.mine.end]


@dataclass(frozen=True)
class Words:
    """The rows of the vocabulary that a rank holds: `first` to `end` of `total`."""

    first: int
    end: int
    total: int

    @classmethod
    def of(cls, total: int, rank: int = 0, size: int = 1) -> Words:
        """The words of rank `rank` of `size`."""
        run = IndexRun.of(total, rank, size)
        return cls(run.first, run.end, total)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), in the type of the logits; these themselves without a cap.

    >>> capped(torch.tensor([1.0, 100.0]), 30.0)
    tensor([ 0.9996, 29.9237])
    """
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True, eq=False)
class RankModel:
    """What rank r of `group` computes with. `transformer.embedding.tables[0]` holds the rows `words` of the table.

    `head` gives the rank's logits, [V_r, width], after `transform` and below `cap` where there is one; or it is None,
    for a model without one. `group` is None for a whole model that nobody shares.
    """

    transformer: Transformer
    group: ProcessGroup | None
    words: Words
    head: Projection | None = None
    transform: HeadTransform | None = None
    cap: float | None = None

    @classmethod
    def alone(cls, transformer: Transformer) -> RankModel:
        """The whole model, of one rank."""
        words = 0 if transformer.embedding is None else transformer.embedding.tables[0].shape[0]
        return cls(transformer, None, Words.of(words))

    @property
    def size(self) -> int:
        """How many ranks share the model."""
        return 1 if self.group is None else self.group.size()
