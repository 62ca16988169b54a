"""Hugging Face's models, packed from outside: the same call, on packed tokens.

The layers of a base model are computed by weft, what is around them by their own code. Heads that work token by token
(masked LM, token classification, causal LM) see packed rows as a batch of one, and their logits are padded again at the
end; heads that look at one token of each sequence get padded states. Where a head has been given modules that may look
at more than one token, it gets padded states, too, and only if nothing is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft._torch import own_modules
from weft.errors import Unsupported
from weft.models.family import Family, HeadKind, is_known_leaf
from weft.models.modules import home_of, is_of
from weft.models.spec import Transformer, VocabularyHead
from weft.models.twin import twin_of
from weft.packed.batch import PackedBatch
from weft.packed.boundaries import MARKS, Restarts, check_positions
from weft.packed.engine import AttentionDropout, DecoderEngine, Engine, PackedEngine
from weft.packed.forms import AnyForm
from weft.packed.inputs import (
    CACHE_ARGUMENTS,
    HEAD_ARGUMENTS,
    as_output,
    cache_to_fill,
    check_columns,
    check_past,
    checked_index,
    ends_in_last_column,
    fill_cache,
    first_tokens,
    goes_on,
    is_flat,
    last_tokens,
    pack_inputs,
    packed_labels,
    packed_like,
    padded_arguments,
    reads_padding,
    reject,
    returned,
    wants_states,
)
from weft.transformer.call import Extras, Inputs
from weft.transformer.program import RankProgram


def pack_base(model: nn.Module, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a base model."""
    twin: Any = twin_of(model, PackedBase, {"_weft": (family, dropout), "weft_splits": family.has_cache})
    twin.weft_engine().model  # noqa: B018  # raises now if the model cannot be packed
    return twin  # type: ignore[no-any-return]


def pack_head(model: nn.Module, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a model with a head."""
    base, head = family.base_of(model), family.heads[type(model).__name__]
    packed = pack_base(getattr(model, base), family, dropout)
    attributes: dict[str, Any] = {"_weft_head": head.kind, "_weft_base": base}
    if head.kind is HeadKind.NEXT_TOKEN and head.vocabulary is not None:
        twin = twin_of(model, PackedDecoder, {**attributes, "_weft_vocabulary": head.vocabulary})
    else:
        twin = twin_of(model, PackedHead, attributes)
    own_modules(twin)[base] = packed
    return twin


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Checked inputs on their way through a head to the base model, and what the output must hold."""

    batch: PackedBatch
    inputs: Inputs
    wants_states: bool
    cache: Any  # to be filled, or None


_BaseT = TypeVar("_BaseT", bound="PackedBase")
_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "output_hidden_states", "return_dict"}


class PackedBase(AnyForm):
    """Mixed into the class of a base model. `_weft` is (family, whether attention weights are dropped).

    `weft_splits`: position_ids that do not rise by 1 begin another text, as in Hugging Face's decoders; else those that
    go back to the model's own first position. `weft_is_unpooled`: nobody reads what the pooler gives, so that it is
    left out where it would read padding.
    """

    _weft: tuple[Family, AttentionDropout]
    weft_splits: bool
    weft_is_unpooled = False

    def weft_engine(self) -> Engine:
        module: Any = self
        family, dropout = self._weft
        return self.weft_kept("_weft_engine", lambda: PackedEngine(module, family.read, dropout))

    def weft_prepare(self, arguments: dict[str, Any]) -> PackedCall:
        """Packs and checks the inputs of a call."""
        self.weft_check()
        family, _ = self._weft
        model = self.weft_engine().model
        assert model.embedding is not None
        supported = _INPUTS | set(model.embedding.names) | (CACHE_ARGUMENTS if family.has_cache else set())
        reject(arguments, supported | MARKS, self)
        if self.weft_splits and arguments.get("is_causal") is False:
            raise Unsupported(f"{type(self).__name__}: is_causal=False, a decoder that looks ahead, is not supported")
        batch, padded = self.weft_pack(arguments)
        self.weft_check_holes(batch, model)
        positions = self._positions(batch, padded, arguments)
        vectors = batch.values.contiguous() if batch.values.is_floating_point() else None
        given = {"input_ids": batch.values, "position_ids": positions}
        indices = []
        for name, table in zip(model.embedding.names, model.embedding.tables, strict=True):
            index = given[name] if name in given else self._others(batch, arguments, name, positions)
            is_vectors = name == "input_ids" and vectors is not None
            indices.append(index if is_vectors else checked_index(index, name, table.shape[0]))
        width = model.input_width
        if vectors is not None and vectors.shape[1:] != (width,):
            raise ValueError(
                f"inputs_embeds must have shape [batch, length, {width}], got {list(vectors.shape[1:])} a token"
            )
        inputs = Inputs.at(batch.cu_seqlens, batch.tokens, tuple(indices), vectors, positions, model)
        cache = (
            cache_to_fill(self, arguments, batch, model, self.weft_engine().is_differentiable(inputs))
            if family.has_cache
            else None
        )
        return PackedCall(batch, inputs, self._wants_states(arguments), cache)

    def weft_pack(self, arguments: dict[str, Any]) -> tuple[PackedBatch, Tensor | None]:
        """The tokens of a call, and the padded ids where there are some."""
        is_needed = arguments.get("position_ids") is not None and not self.weft_splits
        return pack_inputs(arguments, Restarts(self.weft_splits, self._first() if is_needed else None))

    def _first(self) -> int:
        """The position of the first token of a text that says none: 0, or padding_idx + 1 of RoBERTa and its kin."""
        one = PackedBatch.from_list([torch.zeros(1)])  # a vector: of ids, the padding token would count apart
        return int(self._own_positions(one, None)[0])

    def _own_positions(self, batch: PackedBatch, padded: Tensor | None) -> Tensor:
        """The positions [T] that the model itself gives tokens which say none. Those of a text are its own, whatever
        is in the row beside it."""
        family = self._weft[0]
        if batch.is_flattened:
            batch, padded = batch.one_a_row(), None
        return batch.columns if family.positions is None else family.positions(self, batch, padded).to(torch.int64)

    def _wants_states(self, arguments: dict[str, Any]) -> bool:
        config: Any = self.config  # type: ignore[attr-defined]
        wants = wants_states(config, arguments)
        if wants and getattr(config, "tie_last_hidden_states", None) is False:
            raise Unsupported("config.tie_last_hidden_states = False is not supported; expected True")
        return wants

    def _positions(self, batch: PackedBatch, padded: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        given = arguments.get("position_ids")
        if given is None:
            return self._own_positions(batch, padded)
        if given.dim() == 2 and given.shape[0] == 1:
            given = given.expand(batch.padded_shape[0], -1)
        positions = packed_like(batch, given, "position_ids", flat=is_flat(arguments))
        if batch.tokens and int(positions.min()) < 0:
            raise ValueError(f"position_ids must be >= 0, got {int(positions.min())}")
        check_positions(batch.cu_seqlens, positions)
        return positions

    def _others(self, batch: PackedBatch, arguments: dict[str, Any], name: str, positions: Tensor) -> Tensor:
        family, given = self._weft[0], arguments.get(name)
        if given is None and family.types is not None and name == "token_type_ids":
            return family.types(self, positions)
        return packed_like(batch, given, name, flat=is_flat(arguments))

    @staticmethod
    def weft_check_holes(batch: PackedBatch, model: Transformer) -> None:
        """Raises where a mask has holes that the model would count and a packed one would not."""
        layers = [layer.attention for layer in model.layers]
        if not any(a.left >= 0 or a.right > 0 or a.bias is not None for a in layers) or not batch.has_holes:
            return
        what = "sliding windows" if all(a.bias is None for a in layers) else "a relative bias"
        raise Unsupported(
            f"the mask has holes and the model has {what}, which counts the tokens in the holes; "
            "take the masked tokens out of the sequences, or pad on one side only"
        )

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the base model: padded for padded inputs, packed [T, width] for a `PackedBatch`."""
        given = arguments.get("input_ids")
        if goes_on(arguments):  # one new token for each sequence has no padding: the model's own code is as good
            check_past(arguments)
            return self._by_own_code(original, arguments)
        prepared = given if isinstance(given, PackedCall) else self.weft_prepare(arguments)
        extras = Extras([] if prepared.wants_states else None, None if prepared.cache is None else [])
        hidden = self.weft_engine()(prepared.inputs, extras)

        def place(states: Tensor) -> Tensor:
            if isinstance(given, PackedCall):
                return states[None]
            return states if isinstance(given, PackedBatch) else prepared.batch.with_values(states).to_padded()

        fields: dict[str, Any] = {"last_hidden_state": place(hidden)}
        pooler = getattr(self, "pooler", None)
        if pooler is not None and not (self.weft_is_unpooled and reads_padding(prepared.batch)):
            fields["pooler_output"] = self._pooled(pooler, prepared.batch.with_values(hidden))
        if extras.states is not None:
            fields["hidden_states"] = (*map(place, extras.states), fields["last_hidden_state"])
        if extras.keys_values is not None:
            fields["past_key_values"] = fill_cache(prepared.cache, prepared.batch, extras.keys_values)
        return as_output(self._weft[0].output, fields, self.config, arguments)  # type: ignore[attr-defined]

    def _by_own_code(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        config: Any = self.config  # type: ignore[attr-defined]
        asked = [value for name, value in arguments.items() if name.startswith("output_")]
        if not any(asked) and not config.output_hidden_states and not config.output_attentions:
            return original(self, **arguments)
        self.weft_share_recorders()
        try:
            return original(self, **arguments)
        finally:
            self.weft_share_recorders()

    @staticmethod
    def _pooled(pooler: nn.Module, batch: PackedBatch) -> Tensor:
        """[rows, width]; zeros for a row without tokens, as everywhere at padding."""
        pooled: Tensor = pooler(first_tokens(batch, "the pooler")[:, None])
        is_filled = batch.real().any(1)
        return pooled if bool(is_filled.all()) else pooled * is_filled[:, None]


_BY_TOKEN = (HeadKind.TOKENS, HeadKind.NEXT_TOKEN)


class PackedHead(AnyForm):
    """Mixed into the class of a model with a head. `_weft_head` is its kind, `_weft_base` the name of the base."""

    _weft_head: HeadKind
    _weft_base: str

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the model: padded for padded inputs, packed logits [T, ...] for a `PackedBatch`."""
        self.weft_check()
        base_of(self, PackedBase, "not packed; pack the whole model again")
        if goes_on(arguments):
            return original(self, **arguments)
        keep = arguments.get("logits_to_keep")
        if isinstance(keep, int) and keep == 0:
            arguments = {k: v for k, v in arguments.items() if k != "logits_to_keep"}
        if self._weft_head in _BY_TOKEN and "logits_to_keep" not in arguments and self._mixing() is None:
            return self._token_by_token(original, arguments)
        return self._on_padded_states(original, arguments)

    def _mixing(self) -> str | None:
        """The name of a module of the head that may look at more than one token, for all that is known of it."""
        model: Any = self
        home = home_of(model)
        for name, child in model.named_children():
            if name != self._weft_base:
                for below, module in child.named_modules(prefix=name):
                    if not _is_by_token(type(module), home) or "forward" in module.__dict__:
                        return f"{below} ({type(module).__name__})"
        return None

    def _on_padded_states(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        name, kind = type(self).__name__, self._weft_head
        if isinstance(arguments.get("input_ids"), PackedBatch):
            if kind not in (HeadKind.FIRST, HeadKind.LAST):
                raise Unsupported(f"{name} needs padded input_ids and an attention_mask here, not a PackedBatch")
            arguments = padded_arguments(arguments, getattr(self.config, "pad_token_id", None))  # type: ignore[attr-defined]
        batch, padded_ids = getattr(self, self._weft_base).weft_pack(arguments)
        is_padded = batch.tokens < batch.padded_shape[0] * batch.padded_shape[1]
        if is_padded and kind is not HeadKind.FIRST and (mixing := self._mixing()) is not None:
            raise Unsupported(
                f"{name}.{mixing} is not known to work token by token, and some tokens here are padding, which is "
                f"never computed; pass sequences of one length, or put the original module back"
            )
        self._check_reads(batch, padded_ids, arguments)
        if kind is not HeadKind.SPANS:
            return original(self, **arguments)
        if is_padded and arguments.get("start_positions") is not None:
            raise Unsupported(
                f"start_positions: the loss of {name} counts the logits of padding, which is never computed; "
                f"compute the loss from start_logits and end_logits, or pass sequences of one length"
            )
        output = original(self, **{**arguments, "return_dict": True})
        if is_padded:
            real = batch.real()
            for key in ("start_logits", "end_logits"):  # no answer starts or ends in padding
                logits: Tensor = output[key]
                output[key] = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
        return returned(output, self.config, arguments)  # type: ignore[attr-defined]

    def _check_reads(self, batch: PackedBatch, padded_ids: Tensor | None, arguments: dict[str, Any]) -> None:
        """Raises where the head would read the state of padding."""
        name, config = type(self).__name__, self.config  # type: ignore[attr-defined]
        if self._weft_head in (HeadKind.FIRST, HeadKind.LAST) and batch.is_flattened:
            raise Unsupported(
                f"{name} gives one result a row, but rows hold several texts here; pass them row by row, or as a "
                f"PackedBatch"
            )
        if self._weft_head is HeadKind.FIRST and getattr(config, "classifier_pooling", "cls") != "mean":
            first_tokens(batch.with_values(batch.positions[:, None].float()), name)
            check_columns(batch, torch.zeros(batch.padded_shape[0], dtype=torch.int64), name)
        if self._weft_head is HeadKind.LAST:
            check_columns(batch, last_tokens(batch, padded_ids, config.get_text_config().pad_token_id), name)
        if "logits_to_keep" in arguments and not ends_in_last_column(batch):
            raise Unsupported(
                f"logits_to_keep: {name} keeps the last column, which is padding in some sequences here; "
                f"pad on the left, as generation needs it"
            )
        if self._weft_head in _BY_TOKEN and arguments.get("labels") is not None:
            packed_labels(batch, arguments["labels"], self._weft_head, flat=False)

    def _token_by_token(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if getattr(self, "sparse_prediction", False):
            raise Unsupported("sparse_prediction = True is not supported; expected False")
        base = getattr(self, self._weft_base)
        prepared = base.weft_prepare({k: v for k, v in arguments.items() if k not in HEAD_ARGUMENTS})
        rest = {k: v for k, v in arguments.items() if k in HEAD_ARGUMENTS and v is not None}
        if "labels" in rest:
            labels, flat = rest["labels"], is_flat(arguments)
            rest["labels"] = packed_labels(prepared.batch, labels, self._weft_head, flat=flat)[None]
        output = original(self, **{**rest, "input_ids": prepared, "return_dict": True})

        def place(states: Tensor) -> Tensor:
            packed: PackedBatch = prepared.batch.with_values(states[0])
            return packed.values if isinstance(arguments.get("input_ids"), PackedBatch) else packed.to_padded()

        output["logits"] = place(output.logits)
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(map(place, output.hidden_states))
        return returned(output, self.config, arguments)  # type: ignore[attr-defined]


class PackedDecoder(PackedHead):
    """Mixed into a language model that `weft.generate` takes. `_weft_vocabulary` reads its head."""

    _weft_vocabulary: Callable[[Any], VocabularyHead]

    def weft_engine(self) -> DecoderEngine:
        module: Any = self

        def stack() -> tuple[nn.Module, PackedEngine]:
            base: Any = base_of(module, PackedBase, "not packed; pack the whole model again")
            base.weft_check()
            return base, base.weft_engine()

        return self.weft_kept("_weft_engine", lambda: DecoderEngine(module, self._weft_vocabulary, stack))

    def weft_program(self, asked: str = "inference") -> RankProgram:
        """What `weft.generate` runs on; made again when weights have changed."""
        return self.weft_engine().program()

    @contextmanager
    def weft_alone(self) -> Iterator[DecoderEngine]:
        """The engine. Threads may call a packed model at any time; they take turns where they must."""
        self.weft_check()
        yield self.weft_engine()


def base_of(model: Any, kind: type[_BaseT], otherwise: str) -> _BaseT:
    """The base model inside of one with a head. Raises where somebody has put another one there, and says `otherwise`
    what that is."""
    base = getattr(model, model._weft_base)
    if not isinstance(base, kind):
        raise Unsupported(f"{type(model).__name__}.{model._weft_base} is a {type(base).__name__} that is {otherwise}")
    return base


def _is_by_token(kind: type, home: str) -> bool:
    """Whether a module of this class computes each token of its input by itself."""
    return is_known_leaf(kind) or is_of(kind, home) or kind in (nn.Sequential, nn.CrossEntropyLoss)
