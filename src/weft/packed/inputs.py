"""A call as Hugging Face makes it: its arguments, checked and packed, and the forms of what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import Unsupported
from weft.models.family import HeadKind
from weft.models.spec import Transformer
from weft.models.twin import takes
from weft.packed.batch import PackedBatch
from weft.packed.boundaries import MARKS, Restarts, starts_of

IGNORED_LABEL = -100
CACHE_ARGUMENTS = {"use_cache", "past_key_values", "cache_position"}
HEAD_ARGUMENTS = {"labels", "return_dict", "num_items_in_batch"}  # they go to the head itself, not to its base model


# Arguments that carry no work for a base model: these values change nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {"use_cache": (None, False), "return_dict": (None, True, False)}
# What a trainer tells the loss, which is the head's: the base model's own code ignores it.
_IGNORED = {"num_items_in_batch"}
_TYPES = "token_type_ids"


def reject(arguments: dict[str, Any], supported: set[str], model: Any) -> None:
    """Raises if an argument or the config asks for what a packed model would not heed.

    A tokenizer that several families share gives types of tokens. A model whose own `forward` has no such argument
    swallows them: nothing that it computes depends on them.
    """
    what = type(model).__name__
    ignored = _IGNORED if takes(model.forward, _TYPES) else _IGNORED | {_TYPES}
    for name, value in arguments.items():
        if name in supported or name in ignored or value is None or value is False:
            continue
        if not isinstance(value, Tensor) and value in _HARMLESS.get(name, ()):
            continue
        raise Unsupported(f"{what}: the argument {name} is not supported; supported are {', '.join(sorted(supported))}")
    if model.config.output_attentions and arguments.get("output_attentions") is None:
        raise Unsupported(
            f"{what}: config.output_attentions = True is not supported; attention weights are never stored"
        )


def pack_inputs(arguments: dict[str, Any], restarts: Restarts) -> tuple[PackedBatch, Tensor | None]:
    """The tokens of a call, ids [T] or embeddings [T, width], and the padded ids where there are some.

    `restarts`: what position_ids say about texts.
    """
    ids, vectors, mask = (arguments.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    if ids is not None and vectors is not None:
        raise ValueError("got both input_ids and inputs_embeds, expected one of them")
    if isinstance(ids, PackedBatch):
        for name in sorted({"attention_mask"} | MARKS):
            if arguments.get(name) is not None:
                raise Unsupported(
                    f"a PackedBatch needs no {name}, nor does a nested tensor: it says itself where texts end; leave "
                    f"it out"
                )
        return ids, None
    padded = checked_vectors(vectors) if vectors is not None else checked_ids(ids)
    mask, positions = checked_mask(mask), arguments.get("position_ids")
    rows, columns = padded.shape[:2]
    if positions is not None and (not isinstance(positions, Tensor) or tuple(positions.shape) not in
                                  ((1, columns), (rows, columns))):  # fmt: skip
        got = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"position_ids must have shape [{rows}, {columns}] like the input, got {got}")
    starts = starts_of((rows, columns), arguments, restarts)
    batch = PackedBatch.from_padded(padded, mask, starts=starts)
    return batch, padded if vectors is None else None


def is_flat(arguments: dict[str, Any]) -> bool:
    """Whether a call brings a `PackedBatch`, so that what else it has of each token may be [T]."""
    return isinstance(arguments.get("input_ids"), PackedBatch)


def padded_arguments(arguments: dict[str, Any], padding: int | None) -> dict[str, Any]:
    """The arguments of a call with a `PackedBatch` as those of the same call with padded rows, for heads that give one
    result a text."""
    texts: PackedBatch = arguments["input_ids"].one_a_row()
    if arguments.get("output_hidden_states"):
        raise Unsupported("output_hidden_states: this head needs padded input_ids and an attention_mask for that")
    if texts.values.is_floating_point():
        given: dict[str, Any] = {"inputs_embeds": texts.to_padded(), "input_ids": None}
    else:
        given = {"input_ids": texts.to_padded(fill=0 if padding is None else padding)}
    for name in ("position_ids", "token_type_ids"):
        value = arguments.get(name)
        if value is not None:
            given[name] = texts.with_values(packed_like(texts, value, name, flat=True)).to_padded()
    return {**arguments, **given, "attention_mask": texts.real().to(torch.int64)}


def checked_vectors(vectors: Any) -> Tensor:
    if not isinstance(vectors, Tensor) or vectors.dim() != 3 or not vectors.is_floating_point():
        got = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
        raise ValueError(f"inputs_embeds must be floating-point numbers of shape [batch, length, width], got {got}")
    return vectors


def reads_padding(batch: PackedBatch) -> bool:
    """Whether the first column is padding in a row that has tokens."""
    real = batch.real()
    return bool(batch.tokens and (real.any(1) & ~real[:, 0]).any())


def first_tokens(batch: PackedBatch, what: str) -> Tensor:
    """[rows, width]: the state in column 0 of each row, zeros for a row without tokens."""
    if reads_padding(batch):
        raise Unsupported(
            f"{what} reads the first column, which is padding in some sequences here, and padding is never computed; "
            f"pad on the right"
        )
    if batch.is_flattened:
        raise Unsupported(f"{what} reads the first column, but rows hold several texts here; pass them row by row")
    out = batch.values.new_zeros(batch.padded_shape[0], batch.values.shape[1])
    in_first = batch.columns == 0
    rows = batch.padded_index[in_first] // max(batch.padded_shape[1], 1)
    return out.index_copy(0, rows, batch.values[in_first])


def last_tokens(batch: PackedBatch, padded_ids: Tensor | None, padding: int | None) -> Tensor:
    """int64 [rows]: the column that a decoder's classifier reads: the last that does not hold the token `padding`.

    Without such a token, or without ids, it is the last column.
    """
    rows, columns = batch.padded_shape
    if padding is None or padded_ids is None:
        return torch.full((rows,), columns - 1, dtype=torch.int64)
    counted = torch.arange(columns, dtype=torch.int32) * (padded_ids != padding)
    return counted.argmax(-1)


def check_columns(batch: PackedBatch, columns: Tensor, what: str) -> None:
    """Raises where one of the columns [rows] that a head reads is padding."""
    real = batch.real()
    bad = (~real[torch.arange(real.shape[0]), columns]).nonzero().squeeze(1)
    if bad.numel():
        row = int(bad[0])
        raise Unsupported(
            f"{what} reads column {int(columns[row])} of row {row}, which is padding there, and padding is never "
            f"computed; every row needs a token, and padding the token config.pad_token_id"
        )


def ends_in_last_column(batch: PackedBatch) -> bool:
    """Whether the last column holds a token of every row."""
    last = (batch.columns == batch.padded_shape[1] - 1).sum()
    return int(last) == batch.padded_shape[0]


def packed_labels(batch: PackedBatch, labels: Tensor, kind: HeadKind, *, flat: bool) -> Tensor:
    """[T]; `flat` as of `packed_like`. Raises where the padded model would count a loss on padding."""
    packed = packed_like(batch, labels, "labels", flat=flat)
    if labels.dim() == 2 and int((labels != IGNORED_LABEL).sum()) != int((packed != IGNORED_LABEL).sum()):
        raise ValueError(f"labels of padding must be {IGNORED_LABEL}, so that they do not count in the loss")
    if kind is not HeadKind.NEXT_TOKEN:
        return packed
    # A label is predicted from the token before it; the first of a sequence has none, or padding.
    gap = torch.ones(batch.tokens, dtype=torch.bool, device=packed.device)
    gap[1:] = (batch.padded_index.diff() != 1) | (batch.positions[1:] == 0)
    if bool((gap & (batch.columns > 0) & (packed != IGNORED_LABEL)).any()):
        raise ValueError(
            f"a token right after padding, or after the end of another text, has a label, which would be predicted "
            f"from padding or from that text; set it to {IGNORED_LABEL}, or pad on the right"
        )
    return packed.masked_fill(gap, IGNORED_LABEL)


def checked_ids(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        got = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be integers of shape [batch, length] or a PackedBatch, got {got}")
    return ids


def checked_mask(mask: Any) -> Tensor | None:
    if isinstance(mask, Tensor) and mask.dim() == 4:
        raise Unsupported(
            f"a mask of 4 dims is not supported, got shape {list(mask.shape)}; attention_mask must have shape "
            f"[batch, length], and generate makes such masks for a static cache: use the default one"
        )
    if isinstance(mask, dict):
        raise Unsupported(
            f"a mask for each kind of layers ({', '.join(map(str, mask))}) is not supported; attention_mask must have "
            f"shape [batch, length], and generate makes such masks for a static cache: use the default one"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape [batch, length], 1 for tokens and 0 for padding, got {got}")
    return mask


def packed_like(batch: PackedBatch, given: Any, name: str, *, flat: bool) -> Tensor:
    """What was given for each token, padded like the ids, or [T] where the ids came `flat`; zeros for None."""
    if given is None:
        return torch.zeros(batch.tokens, dtype=torch.int64, device=batch.values.device)
    if not isinstance(given, Tensor) or given.is_floating_point():
        got = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be whole numbers, got {got}")
    if flat and given.shape == (batch.tokens,):
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


def wants_states(config: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for hidden states, by itself or by the config."""
    given = arguments.get("output_hidden_states")
    wants = config.output_hidden_states if given is None else given
    if not isinstance(wants, bool):
        raise Unsupported(f"output_hidden_states = {wants!r}: single states cannot be asked for, expected True")
    return wants


def as_output(name: str, fields: dict[str, Any], config: Any, arguments: dict[str, Any]) -> Any:
    """The fields as the class `name` of transformers' outputs, or as a tuple where the call asks for one."""
    from transformers import modeling_outputs

    return returned(getattr(modeling_outputs, name)(**fields), config, arguments)


def returned(output: Any, config: Any, arguments: dict[str, Any]) -> Any:
    """The output, or a tuple of it where the call asks for one."""
    wants = arguments.get("return_dict")
    return output if (config.return_dict if wants is None else wants) else output.to_tuple()


# logits_to_keep: which tokens a caller wants logits of, and where those go ----------------------------------


@dataclass(frozen=True, eq=False)
class LogitRows:
    """The tokens [n] that a caller wants logits of, in that order; for padded inputs, their places in [B, columns] and
    that shape."""

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


def rows_to_keep(batch: PackedBatch, keep: int | Tensor | None, *, packed: bool) -> LogitRows | None:
    """The last `keep` columns, or the columns in a tensor; of packed inputs, the last tokens of each sequence.

    None where all are wanted.

    >>> batch = PackedBatch.from_list([torch.tensor([5, 6, 7]), torch.tensor([8])])
    >>> rows_to_keep(batch, 2, packed=True).tokens.tolist()
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
        return LogitRows((from_end <= keep).nonzero().squeeze(1))
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
    return LogitRows(wanted[places], places, (rows, columns.numel()))


# Caches of keys and values: filled by a packed prefill, in the form that Hugging Face's own decoding goes on with


def goes_on(arguments: dict[str, Any]) -> bool:
    """Whether a call brings a cache that holds tokens already."""
    cache: Any = arguments.get("past_key_values")
    return hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0


def cache_to_fill(
    model: Any, arguments: dict[str, Any], batch: PackedBatch, described: Transformer, is_differentiable: bool
) -> Any:  # fmt: skip
    """The cache that a call must fill: the one given, or a new one where it asks for one; else None.

    A call that says nothing gets what the config says, but in training none, which nobody would read.
    """
    given, wanted = arguments.get("past_key_values"), arguments.get("use_cache")
    is_packed, several = isinstance(arguments.get("input_ids"), PackedBatch), batch.is_flattened
    sees_itself = any(layer.attention.left == 0 for layer in described.layers)
    if given is not None and not hasattr(given, "update"):
        raise Unsupported(f"past_key_values must be a cache of transformers, got {type(given).__name__}")
    if wanted is None and given is None:
        wanted = model.config.use_cache and not (is_packed or several or is_differentiable or sees_itself)
    if is_packed and (given is not None or wanted):
        raise Unsupported("use_cache: a cache is padded, so it needs padded input_ids and an attention_mask")
    if several and (given is not None or wanted):
        raise Unsupported("use_cache: a cache holds one text a row, but rows hold several here; pass them row by row")
    if sees_itself and (given is not None or wanted):
        raise Unsupported(
            "use_cache: a sliding window of 1, which transformers' cache takes for none: it would give other tokens; "
            "pass use_cache=False, or call weft.generate"
        )
    if given is not None or not wanted:
        return given
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def fill_cache(cache: Any, batch: PackedBatch, keys_values: list[tuple[Tensor, Tensor]]) -> Any:
    """Adds the k and v [T, kv_heads, head_dim] of each layer, padded to [B, kv_heads, S, head_dim]; returns the cache.

    Padding gets zeros, which the mask hides in the calls that follow.
    """
    for layer, pair in enumerate(keys_values):
        k, v = (batch.with_values(t).to_padded().transpose(1, 2) for t in pair)
        cache.update(k, v, layer)
    real = batch.real()
    if not bool(real.all()):
        cache.weft_real = real
    return cache


def check_past(arguments: dict[str, Any]) -> None:
    """Raises where a call that goes on with a cache of `fill_cache` sees what was padding then."""
    cache, mask = arguments["past_key_values"], arguments.get("attention_mask")
    real = getattr(cache, "weft_real", None)
    if real is None:
        return
    real = real[:, : int(cache.get_seq_length())]
    check_hidden(~real, torch.ones_like(real) if mask is None else mask, "the cache")


def check_hidden(padding: Tensor, mask: Tensor, what: str) -> None:
    """Raises unless `mask` [B, columns or more] is 0 wherever there is padding [B, columns]."""
    rows, columns = padding.shape
    if mask.dim() != 2 or mask.shape[0] != rows or bool((padding & (mask[:, :columns] != 0)).any()):
        raise Unsupported(
            f"{what} holds padding, which was not computed, and this call would read it; pass an attention_mask "
            f"[{rows}, columns of the cache and new ones] that is 0 where it was 0 before"
        )
