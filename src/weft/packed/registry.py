"""`attn_implementation="weft"`: packed attention for every model that takes its attention from transformers' registry.

The linears of such a model stay torch's, on whatever rows the caller gives: padded batches save attention only,
flattened rows save everything. A mask function and an attention function work together. The first turns what
transformers knows of a call (a padding mask, texts that lie end to end in a row, causal or not, a window) into a table
of numbers, which any layer may hand on, copy or detach:

    [MARK, left, right, queries, masked | number of each query's text | of each key's]   int64 [B, 1, 1, 5 + S + K]

Four dims, because transformers hands such masks on as they are, and takes two for a padding mask.
Number 0 is padding: such keys are not seen, and such queries give zeros. The second packs q, k and v by the table and
puts its output where the queries were. Without padding and a cache, the numbers of queries and keys are the same. A
query of a bidirectional model is never taken for padding: the mask may be that of another text (cross-attention).

Whatever the two cannot do raises by name, before anything is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import Unsupported
from weft.kernels.attention import attention, dropout_seed
from weft.kernels.cpu_attention import MAX_HEAD_DIM, Scoring
from weft.packed.boundaries import MARKS, Restarts, check_agreement, check_longest, marked_starts, restarted

NAME = "weft"
_MARK = -0x77656674  # a number that no mask holds
_HEADER = 5
_MASKING = "transformers.masking_utils"
# Arguments of a layer that say nothing about its attention, or that the table says better.
_HARMLESS = frozenset(
    {
        "sliding_window", "position_ids", "cache_position", "use_cache", "past_key_values", "output_hidden_states",
        "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep", "deterministic", "labels",
        "max_length_q", "max_length_k",
    }
)  # fmt: skip
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_ids")
_TYPES = (torch.float32, torch.bfloat16)


def register_attention() -> None:
    """Makes transformers know `attn_implementation="weft"`; `pack` and `parallelize` call it too. Any number of times.

        weft.register_attention()
        model = AutoModel.from_pretrained(folder, attn_implementation="weft")

    Or `model.set_attn_implementation("weft")` on a model that is there. Inputs may be padded with a mask, or flattened
    rows whose `position_ids` restart, or that come with `cu_seq_lens_q` and `cu_seq_lens_k`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, registry_attention)
    AttentionMaskInterface.register(NAME, registry_mask)


def is_registered() -> bool:
    """Whether transformers knows the name, and means this by it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = ALL_ATTENTION_FUNCTIONS.get(NAME), ALL_MASK_ATTENTION_FUNCTIONS.get(NAME)
    return functions == (registry_attention, registry_mask)


# The mask ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sight:
    """What a token sees: `left` keys before it and `right` after it, -1 for all, of its own text.

    `texts` [B, S] are the numbers of texts in a row where there are several.
    """

    left: int = -1
    right: int = -1
    texts: Tensor | None = None


def registry_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """The table of a call, as transformers' functions that make masks ask for it."""
    sight = _sight(mask_function, _Sight())
    masked = attention_mask is not None
    positions = _positions_of_call(batch_size, q_length, masked=masked) if q_length == kv_length else None
    if positions is not None and attention_mask is not None:
        _check_one_text(positions, attention_mask != 0)
    elif positions is not None and sight.texts is None:
        starts = restarted(positions.expand(batch_size, -1), Restarts(every_step=sight.right == 0))
        sight = replace(sight, texts=starts.to(torch.int64).cumsum(1)) if bool(starts.any()) else sight
    keys = torch.ones(batch_size, kv_length, dtype=torch.int64, device=device)
    if sight.texts is not None:
        keys = sight.texts.to(torch.int64).expand(batch_size, -1) + 1
    first = int(q_offset) - kv_offset  # the column of the first query among the keys
    if sight.right == 0 and first + q_length < kv_length:  # room of a static cache that nobody has filled
        keys = keys.clone()
        keys[:, first + q_length :] = 0
    if attention_mask is not None:
        real = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length]
        keys = keys * F.pad(real, (0, kv_length - real.shape[1]))
    # A window is over the tokens of the text itself, and so are positions.
    is_self = sight.right == 0 or sight.left >= 0 or sight.texts is not None
    queries = keys[:, first : first + q_length] if is_self else keys.new_ones(batch_size, q_length)
    if queries.shape[1] != q_length:
        raise Unsupported(f"{q_length} queries from key {first} on, but there are {kv_length} keys")
    head = [_MARK, sight.left, sight.right, q_length, int(attention_mask is not None)]
    return torch.cat([keys.new_tensor(head).expand(batch_size, _HEADER), queries, keys], 1)[:, None, None]


def _positions_of_call(rows: int, columns: int, *, masked: bool) -> Tensor | None:
    """The `position_ids` [B or 1, S] of the model's call; None where there are none of this shape.

    Transformers hands these neither to the masks of encoders nor, with a cache, to those of decoders, and many layers
    do not get them either. Then a row of several texts would be computed as one, and nobody would know. So the mask
    looks for them in the `forward` that it is made in.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name != "forward":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    positions, others = frame.f_locals.get("position_ids"), frame.f_locals.get("kwargs", {})
    if masked and any(others.get(name) is not None for name in MARKS):  # layers get these, and compare
        return None
    if not isinstance(positions, Tensor) or tuple(positions.shape) not in ((1, columns), (rows, columns)):
        return None
    return positions


def _check_one_text(positions: Tensor, real: Tensor) -> None:
    """Raises where the positions of a row restart that a mask says is one text. Of several rows they say where padding
    is, as well."""
    if real.shape != positions.shape or real.shape[0] != 1 or not bool((positions[real].diff() <= 0).any()):
        return
    raise Unsupported(
        "position_ids restart, so that the row holds several texts, and by its attention_mask it is one; leave the "
        "attention_mask out"
    )


def _sight(function: Any, seen: _Sight) -> _Sight:
    """What a function of transformers' masking_utils means; one that is not known there is refused."""
    name = getattr(function, "__qualname__", repr(function))
    known = getattr(function, "__module__", None) == _MASKING
    inside = _closure(function)
    if known and name == "causal_mask_function":
        return replace(seen, right=0)
    if known and name == "bidirectional_mask_function":
        return seen
    if known and name == "and_masks.<locals>.and_mask":
        for part in inside["mask_functions"]:
            seen = _sight(part, seen)
        return seen
    if known and name == "sliding_window_overlay.<locals>.inner_mask":
        return replace(seen, left=int(inside["sliding_window"]) - 1)
    if known and name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return replace(seen, left=int(inside["sliding_window"]), right=int(inside["sliding_window"]))
    if known and name == "packed_sequence_mask_function.<locals>.inner_mask":
        return replace(seen, texts=inside["packed_sequence_mask"])
    if known and name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return _sight(inside["mask_function"], seen)
    shown = name.replace("<locals>.", "")
    raise Unsupported(
        f'attn_implementation="weft": the mask {shown} is not supported; supported are causal and '
        f'bidirectional attention, sliding windows and texts side by side; use attn_implementation="sdpa"'
    )


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


# The attention ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows of [B * columns] are tokens (None: all), and where each text begins; int32 offsets."""

    index: Tensor | None
    cu: Tensor


def registry_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key and value [B, Hkv, K, D or another] -> [B, S, H, value's D], as layers ask for it."""
    _reject(query, key, value, arguments)
    batch, heads, length, width = query.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    table = _table(attention_mask, query, key, causal, arguments)
    left, right = (int(n) for n in table[0, 1:3]) if batch else (-1, -1)
    q_rows, k_rows = _rows(table[:, _HEADER : _HEADER + length], table[:, _HEADER + length :])
    wide, out_width = max(width, value.shape[3]), value.shape[3]
    q, k, v = (_packed(t, rows, wide) for t, rows in ((query, q_rows), (key, k_rows), (value, k_rows)))
    scale = float(max(width, 1)) ** -0.5 if scaling is None else float(scaling)
    scoring = Scoring(scale, left, right, dropout=dropout, seed=dropout_seed() if dropout else None)
    packed = attention(q, k, v, q_rows.cu, k_rows.cu, scoring)[..., :out_width]
    if q_rows.index is None:
        out = packed
    else:
        out = packed.new_zeros(batch * length, heads, out_width).index_copy(0, q_rows.index, packed)
    return out.reshape(batch, length, heads, out_width), None


def _reject(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
    for name, given in arguments.items():
        if name not in _HARMLESS and name not in _BOUNDARIES and given is not None and given is not False:
            raise Unsupported(
                f'attn_implementation="weft": the attention of this model has {name}, which is not supported; use '
                f'attn_implementation="sdpa" or "eager"'
            )
    if query.dtype not in _TYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise Unsupported(
            f'attn_implementation="weft" computes in float32 or bfloat16, got {query.dtype}, {key.dtype} and '
            f"{value.dtype}; convert the model by .to(torch.bfloat16) or .float()"
        )
    if max(query.shape[3], value.shape[3]) > MAX_HEAD_DIM:
        raise Unsupported(
            f'attn_implementation="weft": heads of {max(query.shape[3], value.shape[3])}, expected at most '
            f"{MAX_HEAD_DIM}"
        )


def _table(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, arguments: dict[str, Any]) -> Tensor:
    """The table of `registry_mask`, or one made here where the model gives none; with the texts that arguments say."""
    (batch, _, length, _), keys = query.shape, key.shape[2]
    if mask is not None:
        columns = _HEADER + length + keys
        if tuple(mask.shape) != (batch, 1, 1, columns) or bool((mask[..., 0] != _MARK).any()):
            raise Unsupported(
                f'attn_implementation="weft" got a mask of shape {list(mask.shape)} that transformers did not make for '
                f"it (a mask of 4 dims of your own, or the model makes its own); pass attention_mask [batch, length], "
                f'or use attn_implementation="sdpa"'
            )
        mask = mask[:, 0, 0]
    elif causal and length not in (1, keys):
        raise Unsupported(
            f'attn_implementation="weft": {length} queries to {keys} keys without a mask; it is not clear which keys '
            f'they see; use attn_implementation="sdpa"'
        )
    else:
        right = 0 if causal and length > 1 else -1
        head = torch.tensor([_MARK, -1, right, length, 0], device=query.device).expand(batch, _HEADER)
        mask = torch.cat([head, head.new_ones(batch, length + keys)], 1)
    return _with_texts(mask, batch, length, keys, arguments)


def _with_texts(table: Tensor, batch: int, length: int, keys: int, arguments: dict[str, Any]) -> Tensor:
    """The table with the texts of a flattened row, where arguments of the call say them."""
    if length != keys or not batch:
        return table
    numbers, restarts = table[:, _HEADER + keys :], Restarts(every_step=bool(table[0, 2] == 0))
    marks, positions = marked_starts((batch, length), arguments), arguments.get("position_ids")
    # Of several rows they say where padding is, and of images something else.
    if batch != 1 or not isinstance(positions, Tensor) or tuple(positions.shape) != (1, length):
        positions = None
    starts = None if marks is None else marks[0]
    if positions is not None and bool(table[0, 4]) and marks is None:
        _check_one_text(positions, numbers > 0)
    elif positions is not None:
        found = restarted(positions, restarts)
        if starts is None:
            starts = found
        elif bool(found.any()):  # else they may be those that the model makes of none
            check_agreement(starts, positions, restarts, "cu_seq_lens_q (or seq_idx)")
    if starts is None:
        return table
    check_longest((batch, length), starts, arguments)
    if not bool(starts.any()):
        return table
    if bool((numbers == 0).any()):
        raise ValueError("an attention_mask with padding and rows of several texts do not go together; leave one out")
    texts = starts.to(torch.int64).cumsum(1) + 1
    several = bool((numbers != 1).any())
    if several and not torch.equal(numbers.diff(dim=1) != 0, texts.diff(dim=1) != 0):
        raise ValueError("position_ids and cu_seq_lens_q (or seq_idx) say different things about where texts begin")
    return torch.cat([table[:, :_HEADER], texts, texts], 1)


def _rows(queries: Tensor, keys: Tensor) -> tuple[_Rows, _Rows]:
    """The tokens of queries [B, S] and keys [B, K], by the numbers of their texts."""
    most = max(int(queries.max()) if queries.numel() else 0, int(keys.max()) if keys.numel() else 0, 1)
    same = queries.shape == keys.shape and torch.equal(queries, keys)
    found = _tokens(keys, most)
    return (found if same else _tokens(queries, most)), found


def _tokens(numbers: Tensor, most: int) -> _Rows:
    rows = torch.arange(numbers.shape[0], device=numbers.device)[:, None] * most
    real = numbers > 0
    texts = (rows + numbers - 1)[real]
    counts = torch.bincount(texts, minlength=numbers.shape[0] * most)
    cu = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return _Rows(None if bool(real.all()) else real.reshape(-1).nonzero().squeeze(1), cu)


def _packed(t: Tensor, rows: _Rows, width: int) -> Tensor:
    """[B, heads, columns, D] -> [T, heads, width], zeros behind D."""
    batch, heads, columns, own = t.shape
    flat = t.transpose(1, 2).reshape(batch * columns, heads, own)
    flat = flat if rows.index is None else flat[rows.index]
    return flat if own == width else F.pad(flat, (0, width - own))
