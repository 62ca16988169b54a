"""Where one text ends and the next begins: the one place that says so. Nothing is ever computed across a boundary.

mask [B, S]                      one text a row, of the tokens where it is not 0
lengths [B]                      texts end to end, as lists and nested tensors give them
cu_seqlens [B + 1]               the same as offsets, int32, as the core reads them
starts [B, S]                    rows that hold several texts: True where one begins
cu_seq_lens_q and _k, seq_idx    how Hugging Face says `starts` of a flattened row
position_ids [B, S]              they rise inside of a text; where they do not, the next one begins
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.errors import Unsupported
from weft.kernels import door

MOST_TOKENS = torch.iinfo(torch.int32).max

MARKS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Arguments of a call that say where the texts of a flattened row end."""

_REMEDY = "a PackedBatch says where texts end, and so do cu_seq_lens_q and cu_seq_lens_k"


def offsets_of(lengths: Tensor) -> Tensor:
    """int32 [B + 1]: where each of the texts of these lengths [B] starts, and the end.

    >>> offsets_of(torch.tensor([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    ends = lengths.to(torch.int64).cumsum(0)
    if ends.numel() and int(ends[-1]) > MOST_TOKENS:
        raise ValueError(f"a batch holds at most 2^31 - 1 tokens, got {int(ends[-1])}; split it")
    cu = torch.zeros(ends.numel() + 1, dtype=torch.int32, device=ends.device)
    cu[1:] = ends
    return cu


def positions_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int64 [T]: the place of each token in its text.

    >>> positions_of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist()
    [0, 1, 0, 1, 2]
    """
    cu = cu_seqlens.to(torch.int64)
    return torch.arange(tokens, device=cu.device) - cu[:-1].repeat_interleave(cu.diff(), output_size=tokens)


def check_offsets(cu: Any, tokens: int, name: str = "cu_seqlens") -> None:
    """Raises unless `cu` is what the core may read as offsets of texts with `tokens` tokens in all."""
    if not isinstance(cu, Tensor):
        raise ValueError(f"{name} must be an int32 tensor of sequences + 1 offsets, got {type(cu).__name__}")
    door.check_offsets(cu.cpu(), name, tokens)


def starts_of(shape: tuple[int, int], arguments: Mapping[str, Any], *, positions_split: bool) -> Tensor | None:
    """[B, S], True where a text begins in the middle of a row; None where no row holds more than one.

    `positions_split` says that the model itself takes a step in `position_ids` that is not 1 for the start of another
    text where there is no mask, as the decoders of Hugging Face do.
    """
    marks = [_from_offsets(shape, arguments), _from_numbers(shape, arguments.get("seq_idx"))]
    given = [starts for starts in marks if starts is not None]
    if len(given) == 2 and not torch.equal(given[0], given[1]):
        raise ValueError("cu_seq_lens_q and seq_idx say different things about where texts begin")
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if given and mask is not None and not bool((mask != 0).all()):
        raise ValueError("an attention_mask with padding and rows of several texts do not go together; leave one out")
    if not given and positions_split and mask is None and positions is not None:
        steps = positions.expand(*shape).diff(dim=1) != 1
        given = [torch.nn.functional.pad(steps, (1, 0))]
    return given[0] if given and bool(given[0].any()) else None


def check_positions(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Raises where the positions [T] of a text do not rise: they may well be those of several texts."""
    at = (positions.diff() <= 0).nonzero().squeeze(1) + 1
    if not at.numel():
        return
    inside = at[~torch.isin(at, cu_seqlens.to(torch.int64))]
    if inside.numel():
        token = int(inside[0])
        raise Unsupported(
            f"position_ids restart inside of a text: token {token} has position {int(positions[token])} after "
            f"{int(positions[token - 1])}, so this row may hold several texts, and it is not clear which tokens see "
            f"each other; {_REMEDY}, and decoders take position_ids that restart without an attention_mask"
        )


def _from_offsets(shape: tuple[int, int], arguments: Mapping[str, Any]) -> Tensor | None:
    q, k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if q is None and k is None:
        return None
    if q is None or k is None or not isinstance(q, Tensor) or not isinstance(k, Tensor) or not torch.equal(q, k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be the same tensor of offsets, of queries and of keys")
    if shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k are of one flattened row [1, tokens], got {shape[0]} rows")
    check_offsets(q.to(torch.int32).contiguous(), shape[1], "cu_seq_lens_q")
    starts = torch.zeros(shape, dtype=torch.bool, device=q.device)
    inner = q.to(torch.int64)
    starts[0, inner[(inner > 0) & (inner < shape[1])]] = True
    return starts


def _from_numbers(shape: tuple[int, int], numbers: Any) -> Tensor | None:
    if numbers is None:
        return None
    if not isinstance(numbers, Tensor) or tuple(numbers.shape) != shape:
        got = list(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"seq_idx must give the number of each token's text, of shape {list(shape)}, got {got}")
    steps = numbers.diff(dim=1)
    if bool((steps < 0).any()):
        raise ValueError("seq_idx must not fall along a row: the tokens of a text lie side by side")
    return torch.nn.functional.pad(steps != 0, (1, 0))
