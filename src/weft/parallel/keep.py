"""`logits_to_keep`: which tokens a caller wants logits of, and where those go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.common import Unsupported
from weft.packed.models.inputs import ends_in_last_column


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tokens [n], in the order of their logits; for padded inputs, their places in [B, columns] and that shape."""

    tokens: Tensor
    places: Tensor | None = None
    shape: tuple[int, int] = (0, 0)

    def placed(self, logits: Tensor) -> Tensor:
        """[n, V] as the caller gets them: packed, or padded [B, columns, V] with zeros where there is no token."""
        if self.places is None:
            return logits
        rows, columns = self.shape
        flat = logits.new_zeros(rows * columns, logits.shape[1]).index_copy(0, self.places, logits)
        return flat.view(rows, columns, logits.shape[1])


def kept_tokens(batch: PackedBatch, keep: int | Tensor | None, *, packed: bool) -> Chosen | None:
    """The last `keep` columns, or the columns in a tensor; of packed inputs, the last tokens of each sequence.

    None where all are wanted.

    >>> batch = PackedBatch.from_list([torch.tensor([5, 6, 7]), torch.tensor([8])])
    >>> kept_tokens(batch, 2, packed=True).tokens.tolist()
    [1, 2, 3]
    """
    if keep is None or (isinstance(keep, int) and keep == 0):
        return None
    if isinstance(keep, int) and keep < 0:
        raise ValueError(f"logits_to_keep is {keep}, expected 0 for all, or how many of the last columns to keep")
    if packed:
        if not isinstance(keep, int) or keep < 0:
            raise Unsupported("logits_to_keep: of a PackedBatch, the last tokens of each sequence: expected a number")
        lengths = batch.lengths
        from_end = lengths.repeat_interleave(lengths) - batch.positions
        return Chosen((from_end <= keep).nonzero().squeeze(1))
    rows, width = batch.padded_shape
    if isinstance(keep, int):
        if keep == 1 and not ends_in_last_column(batch):
            raise Unsupported(
                "logits_to_keep: the last column is padding in some sequences here, and padding is never computed; "
                "pad on the left, as generation needs it"
            )
        columns = torch.arange(max(0, width - keep), width)
    else:
        columns = torch.arange(width)[keep]
    token_at = torch.full((rows * width,), -1)
    token_at[batch.padded_index] = torch.arange(batch.tokens)
    wanted = token_at[(torch.arange(rows)[:, None] * width + columns[None]).reshape(-1)]
    places = (wanted >= 0).nonzero().squeeze(1)
    return Chosen(wanted[places], places, (rows, columns.numel()))
