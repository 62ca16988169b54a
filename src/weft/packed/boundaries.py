"""Where one text ends and the next begins: this is the one place that says so, and nothing is ever computed across a
boundary. Where two arguments of a call say it, they say the same, or the call is refused.

    mask [B, S]                      one text a row, of the tokens where it is not 0
    lengths [B]                      texts end to end, as lists and nested tensors give them
    cu_seqlens [B + 1]               the same as offsets, int32, as the core reads them
    starts [B, S]                    rows that hold several texts: True where one begins
    cu_seq_lens_q and _k, seq_idx    how Hugging Face says `starts` of a flattened row
    position_ids [B, S]              they rise inside of a text; where they restart, the next one begins
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import Unsupported
from weft.kernels import door

MOST_TOKENS = torch.iinfo(torch.int32).max

MARKS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Arguments of a call that say where the texts of a flattened row end."""

_REMEDY = "a PackedBatch says where texts end, and so do cu_seq_lens_q and cu_seq_lens_k"


@dataclass(frozen=True)
class Restarts:
    """What `position_ids` say about texts where there is no mask.

    every_step  each step that is not 1 begins a text, as in the decoders of Hugging Face; else only one down to `first`
    first       the position of a text's first token; None: what the row begins with
    """

    every_step: bool
    first: int | None = None


# Offsets ----------------------------------------------------------------------------------------------------


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


# Starts -----------------------------------------------------------------------------------------------------


def starts_of(shape: tuple[int, int], arguments: Mapping[str, Any], restarts: Restarts) -> Tensor | None:
    """[B, S], True where a text begins in the middle of a row; None where no row holds more than one.

    Raises where `cu_seq_lens_q`, `cu_seq_lens_k`, `seq_idx`, `max_length_q`, `max_length_k`, `position_ids` and
    `attention_mask` of a call say different things.
    """
    marks = marked_starts(shape, arguments)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if marks is None:
        starts = None if mask is not None or positions is None else restarted(positions.expand(*shape), restarts)
    else:
        starts, name = marks
        if mask is not None and not bool((mask != 0).all()):
            raise ValueError(
                f"attention_mask hides tokens of a row that {name} cuts into several texts; an attention_mask with "
                f"padding and rows of several texts do not go together; leave one out"
            )
        if positions is not None:
            check_agreement(starts, positions.expand(*shape), restarts, name)
    check_longest(shape, starts, arguments)
    return starts if starts is not None and bool(starts.any()) else None


def marked_starts(shape: tuple[int, int], arguments: Mapping[str, Any]) -> tuple[Tensor, str] | None:
    """[B, S], True where offsets or numbers of texts say that one begins inside of a row, and which of them does."""
    offsets, numbers = _from_offsets(shape, arguments), _from_numbers(shape, arguments.get("seq_idx"))
    if offsets is not None and numbers is not None and not torch.equal(offsets, numbers):
        raise ValueError("cu_seq_lens_q and seq_idx say different things about where texts begin")
    if offsets is not None:
        return offsets, "cu_seq_lens_q"
    return None if numbers is None else (numbers, "seq_idx")


def restarted(positions: Tensor, restarts: Restarts) -> Tensor:
    """[B, S], True where positions [B, S] say that another text begins. Raises where that is not clear: they fall to
    elsewhere, or restart at one place of a row and jump ahead at another.

    >>> restarted(torch.tensor([[2, 3, 2, 3, 4]]), Restarts(every_step=False)).tolist()
    [[False, False, True, False, False]]
    >>> restarted(torch.tensor([[2, 3, 2, 5, 6]]), Restarts(every_step=True)).tolist()
    [[False, False, True, True, False]]
    """
    steps = positions.diff(dim=1)
    if restarts.every_step:
        return F.pad(steps != 1, (1, 0))
    first = positions[:, :1] if restarts.first is None else restarts.first
    falls = F.pad(steps <= 0, (1, 0))
    jumps = F.pad(steps > 1, (1, 0)) & falls.any(1, keepdim=True)
    odd = ((falls & (positions != first)) | jumps).nonzero()
    if odd.numel():
        row, column = (int(n) for n in odd[0])
        wanted = int(positions[row, 0]) if restarts.first is None else restarts.first
        raise Unsupported(
            f"position_ids restart inside of a text: token {column} of row {row} has position "
            f"{int(positions[row, column])} after {int(positions[row, column - 1])}, but a text of this model begins "
            f"at position {wanted}; let them restart there (position_ids_start of DataCollatorWithFlattening); "
            f"{_REMEDY}"
        )
    return falls


def check_agreement(starts: Tensor, positions: Tensor, restarts: Restarts, name: str) -> None:
    """Raises unless positions [B, S] restart where `starts` [B, S], which the argument `name` says, has a text begin,
    and nowhere else."""
    steps = positions.diff(dim=1)
    inside = F.pad(steps != 1 if restarts.every_step else steps <= 0, (1, 0)) & ~starts
    passed = F.pad(steps == 1, (1, 0)) & starts
    for wrong, says in ((inside, "restart inside of a text"), (passed, "go on where a text begins")):
        at = wrong.nonzero()
        if at.numel():
            row, column = (int(n) for n in at[0])
            raise ValueError(
                f"position_ids and {name} say different things about where texts begin: position_ids {says}, at token "
                f"{column} with {int(positions[row, column])} after {int(positions[row, column - 1])}; mend one of "
                f"them, or leave it out"
            )


def check_longest(shape: tuple[int, int], starts: Tensor | None, arguments: Mapping[str, Any]) -> None:
    """Raises where `max_length_q` or `max_length_k` is less than the longest text."""
    given = {name: arguments.get(name) for name in ("max_length_q", "max_length_k")}
    if all(value is None for value in given.values()):
        return
    mask, longest = arguments.get("attention_mask"), shape[1]
    if mask is not None and mask.numel():
        longest = int((mask != 0).sum(1).max())
    if starts is not None and starts.numel():
        first = starts.clone()
        first[:, 0] = True
        longest = int(torch.cat([first.reshape(-1).nonzero().squeeze(1), torch.tensor([starts.numel()])]).diff().max())
    for name, value in given.items():
        if value is not None and int(value) < longest:
            raise ValueError(f"{name} is {int(value)}, but a text has {longest} tokens; mend it, or leave it out")


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
            f"each other; {_REMEDY}, and so do position_ids that restart without an attention_mask"
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
    return F.pad(steps != 0, (1, 0))
