"""One rank's part of a tensor-parallel transformer, as a value.

P ranks share a stack. Rank r computes with its own heads and its own columns of the MLP; T tokens lie as T_r rows
between blocks (sequence parallel), or as T rows on every rank where T is too small to split.

    embedding   table[ids] of the rank's words, summed over ranks        -> x [T_r, width]
    column      y = all_gather(x) w_r^T + b_r                            -> [T, N_r]     qkv, up (and gate)
    row         x = reduce_scatter(y w_r^T) + b                          -> [T_r, width] out, down
    head        logits = all_gather(x) w_r^T                             -> [T, V_r]

The same words as `weft.packed.spec`: `transformer` describes a model with the rank's heads and the rank's weights.
The biases of `out` and `down` and all norms are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from weft.packed.spec import Projection, Transformer


@dataclass(frozen=True)
class Words:
    """The rows of the vocabulary that a rank holds: `first` to `end` of `total`."""

    first: int
    end: int
    total: int


@dataclass(frozen=True, eq=False)
class RankModel:
    """What rank r of `group` computes with. `transformer.embedding.tables[0]` holds the rows `words` of the table.

    `head` gives the rank's logits, [V_r, width], or is None for a model without one.
    """

    transformer: Transformer
    group: ProcessGroup
    words: Words
    head: Projection | None = None
