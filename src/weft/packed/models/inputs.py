"""The inputs of a call, checked and packed."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.common import Unsupported

IGNORED_LABEL = -100


class HeadKind(Enum):
    TOKENS = "tokens"  # each token by itself
    NEXT_TOKEN = "next token"  # each token by itself, its label is the next one's
    FIRST = "first"  # the first column of the padded states
    SPANS = "spans"  # each token by itself, a softmax over the columns
    PADDED = "padded"  # whatever it likes of the padded states


# Arguments that carry no work: these values change nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {"use_cache": (None, False), "return_dict": (None, True, False)}


def reject(arguments: dict[str, Any], supported: set[str], model: Any) -> None:
    """Raises if an argument or the config asks for what a packed model would not heed."""
    what = type(model).__name__
    for name, value in arguments.items():
        if name in supported or value is None or value is False or value in _HARMLESS.get(name, ()):
            continue
        raise Unsupported(f"{what}: the argument {name} is not supported; supported are {', '.join(sorted(supported))}")
    if model.config.output_attentions and arguments.get("output_attentions") is None:
        raise Unsupported(
            f"{what}: config.output_attentions = True is not supported; attention weights are never stored"
        )


def pack_inputs(arguments: dict[str, Any]) -> tuple[PackedBatch, Tensor | None]:
    """The tokens of a call, ids [T] or embeddings [T, width], and the padded ids where there are some."""
    ids, vectors, mask = (arguments.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    if ids is not None and vectors is not None:
        raise ValueError("got both input_ids and inputs_embeds, expected one of them")
    if isinstance(ids, PackedBatch):
        if mask is not None:
            raise Unsupported("a PackedBatch needs no attention_mask: it has no padding; leave it out")
        return ids, None
    if vectors is None:
        padded = checked_ids(ids)
        return PackedBatch.from_padded(padded, checked_mask(mask)), padded
    if not isinstance(vectors, Tensor) or vectors.dim() != 3 or not vectors.is_floating_point():
        got = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"inputs_embeds must be floating-point numbers of shape [batch, length, width], got {got}")
    return PackedBatch.from_padded(vectors, checked_mask(mask)), None


def first_tokens(batch: PackedBatch, what: str) -> Tensor:
    """[B, width]: the state in column 0 of each sequence, zeros for a sequence without tokens."""
    starts = batch.cu_seqlens[:-1].long()
    filled = batch.lengths > 0
    if batch.tokens and bool((batch.columns[starts[filled]] != 0).any()):
        raise Unsupported(
            f"{what} reads the first column, which is padding in some sequences here, and padding is never computed; "
            f"pad on the right"
        )
    out = batch.values.new_zeros(batch.sequences, batch.values.shape[1])
    return out.index_copy(0, filled.nonzero().squeeze(1), batch.values[starts[filled]])


def ends_in_last_column(batch: PackedBatch) -> bool:
    """Whether the last column holds a token of every sequence."""
    last = (batch.columns == batch.padded_shape[1] - 1).sum()
    return int(last) == batch.sequences


def packed_labels(batch: PackedBatch, labels: Tensor, kind: HeadKind) -> Tensor:
    """[T]. Raises where the padded model would count a loss on what it computed of padding."""
    packed = packed_like(batch, labels, "labels")
    if labels.dim() == 2 and int((labels != IGNORED_LABEL).sum()) != int((packed != IGNORED_LABEL).sum()):
        raise ValueError(f"labels of padding must be {IGNORED_LABEL}, so that they do not count in the loss")
    if kind is not HeadKind.NEXT_TOKEN:
        return packed
    # A label is predicted from the token before it; the first of a sequence has none, or padding.
    gap = torch.ones(batch.tokens, dtype=torch.bool)
    gap[1:] = (batch.padded_index.diff() != 1) | (batch.positions[1:] == 0)
    if bool((gap & (batch.columns > 0) & (packed != IGNORED_LABEL)).any()):
        raise ValueError(
            f"a token right after padding has a label, which would be predicted from padding; "
            f"set it to {IGNORED_LABEL} or pad on the right"
        )
    return packed.masked_fill(gap, IGNORED_LABEL)


def checked_ids(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        got = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be integers of shape [batch, length] or a PackedBatch, got {got}")
    return ids


def checked_mask(mask: Any) -> Tensor | None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape [batch, length], 1 for tokens and 0 for padding, got {got}")
    return mask


def packed_like(batch: PackedBatch, given: Tensor | None, name: str) -> Tensor:
    """What was given for each token, [T] or padded like the ids; zeros for None."""
    if given is None:
        return torch.zeros(batch.tokens, dtype=torch.int64)
    if given.shape == (batch.tokens,):
        return given.to(torch.int64)
    if tuple(given.shape) != batch.padded_shape:
        raise ValueError(f"{name} must have shape {list(batch.padded_shape)} like input_ids, got {list(given.shape)}")
    return batch.gather(given).to(torch.int64)


def checked_index(index: Tensor, name: str, rows: int) -> Tensor:
    if index.numel():
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= rows:
            what = "more positions than the model has" if name == "position_ids" else "values out of range"
            raise ValueError(f"{name}: {what}; got {low} to {high}, expected 0 to {rows - 1}")
    return index.to(torch.int64).contiguous()
