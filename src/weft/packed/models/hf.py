"""Hugging Face models: the base model and its heads with the same call, on packed tokens.

A packed model is a shallow copy of the user's: the same parameters under the same names, the same class, another
`forward`. Heads that work token by token (masked LM, token classification, causal LM) see packed rows as a batch of
one, and their logits are padded again at the end; heads that look at one token of each sequence get padded states.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.packed.batch import PackedBatch
from weft.packed.engine import AttentionDropout, Engine
from weft.packed.forward import Inputs
from weft.packed.models.common import Unsupported
from weft.packed.models.inputs import (
    HeadKind,
    checked_ids,
    checked_index,
    checked_mask,
    first_tokens,
    packed_labels,
    packed_like,
)
from weft.packed.spec import Transformer


@dataclass(frozen=True)
class Family:
    """How one family of models is packed. `positions(model, batch, padded ids)` gives [T]."""

    base: str
    describe: Callable[[Any], Transformer]
    positions: Callable[[Any, PackedBatch, Tensor | None], Tensor]
    output: str
    heads: dict[str, HeadKind]
    causal: bool = False


# Arguments that carry no work: these values change nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {"use_cache": (None, False), "return_dict": (None, True, False)}


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were passed by **kwargs among them."""
    bound = dict(inspect.signature(forward).bind(None, *args, **kwargs).arguments)
    extra = bound.pop("kwargs", {})
    bound.pop("self", None)
    return {**bound, **extra}


def reject(arguments: dict[str, Any], supported: set[str], what: str) -> None:
    """Raises if an argument was given that a packed model would not heed."""
    for name, value in arguments.items():
        if name in supported or value is None or value is False or value in _HARMLESS.get(name, ()):
            continue
        raise Unsupported(f"{what}: the argument {name} is not supported; supported are {', '.join(sorted(supported))}")


@dataclass(frozen=True, eq=False)
class Prepared:
    """Checked inputs on their way through a head to the base model."""

    batch: PackedBatch
    inputs: Inputs


class PackedBase:
    """Mixed into the class of a base model. `_weft` is (family, what to do with attention dropout)."""

    _weft: tuple[Family, AttentionDropout]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_weft_engine"}

    def weft_engine(self) -> Engine:
        engine = self.__dict__.get("_weft_engine")
        if engine is None or engine._module is not self:  # a copy must not use the engine of the original
            family, dropout = self._weft
            engine = self.__dict__["_weft_engine"] = Engine(self, family.describe, dropout)  # type: ignore[arg-type]
        return engine

    def weft_prepare(self, arguments: dict[str, Any]) -> Prepared:
        """Packs and checks the inputs of a call."""
        names = {"input_ids", "attention_mask", "position_ids", "return_dict"}
        model = self.weft_engine().model
        assert model.embedding is not None
        names |= set(model.embedding.names)
        reject(arguments, names, type(self).__name__)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        padded = None
        if isinstance(ids, PackedBatch):
            batch = ids
            if mask is not None:
                raise Unsupported("a PackedBatch needs no attention_mask: it has no padding; leave it out")
        else:
            padded = checked_ids(ids)
            batch = PackedBatch.from_padded(padded, checked_mask(mask))
        self._check_holes(batch, model)
        positions = self._positions(batch, padded, arguments.get("position_ids"))
        indices = []
        for name, table in zip(model.embedding.names, model.embedding.tables, strict=True):
            if name == "input_ids":
                index = batch.values
            elif name == "position_ids":
                index = positions
            else:
                index = packed_like(batch, arguments.get(name), name)
            indices.append(checked_index(index, name, table.shape[0]))
        farthest = int(positions.max()) if batch.tokens else 0
        inputs = Inputs(batch.cu_seqlens, batch.tokens, tuple(indices), None, positions.contiguous(), farthest)
        return Prepared(batch, inputs)

    def _positions(self, batch: PackedBatch, padded: Tensor | None, given: Tensor | None) -> Tensor:
        family, _ = self._weft
        if given is None:
            return family.positions(self, batch, padded).to(torch.int64)
        if given.dim() == 2 and given.shape[0] == 1:
            given = given.expand(batch.padded_shape[0], -1)
        positions = packed_like(batch, given, "position_ids")
        if batch.tokens and int(positions.min()) < 0:
            raise ValueError(f"position_ids must be >= 0, got {int(positions.min())}")
        return positions

    @staticmethod
    def _check_holes(batch: PackedBatch, model: Transformer) -> None:
        windowed = any(layer.attention.left >= 0 or layer.attention.right > 0 for layer in model.layers)
        if windowed and batch.has_holes:
            raise Unsupported(
                "the mask has holes and the model has sliding windows, which count the tokens in the holes; "
                "take the masked tokens out of the sequences, or pad on one side only"
            )

    def weft_forward(self, arguments: dict[str, Any]) -> Any:
        """The output of the base model: padded for padded inputs, packed [T, width] for a `PackedBatch`."""
        given = arguments.get("input_ids")
        prepared = given if isinstance(given, Prepared) else self.weft_prepare(arguments)
        hidden = self.weft_engine()(prepared.inputs)
        batch = prepared.batch.with_values(hidden)
        if isinstance(given, Prepared):
            states = hidden[None]
        elif isinstance(given, PackedBatch):
            states = hidden
        else:
            states = batch.to_padded()
        output = self._output(states, batch)
        return_dict = arguments.get("return_dict")
        wants_dict = self.config.return_dict if return_dict is None else return_dict  # type: ignore[attr-defined]
        return output if wants_dict else output.to_tuple()

    def _output(self, states: Tensor, batch: PackedBatch) -> Any:
        from transformers import modeling_outputs

        fields: dict[str, Any] = {"last_hidden_state": states}
        pooler = getattr(self, "pooler", None)
        if pooler is not None:
            fields["pooler_output"] = pooler(first_tokens(batch, "the pooler")[:, None])
        return getattr(modeling_outputs, self._weft[0].output)(**fields)


class PackedHead:
    """Mixed into the class of a model with a head. `_weft_head` is its kind, `_weft_base` the name of the base."""

    _weft_head: HeadKind
    _weft_base: str

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        base, kind = getattr(self, self._weft_base), self._weft_head
        if isinstance(arguments.get("logits_to_keep"), int) and arguments["logits_to_keep"] == 0:
            arguments = {k: v for k, v in arguments.items() if k != "logits_to_keep"}
        if kind is HeadKind.FIRST and not isinstance(arguments.get("input_ids"), PackedBatch):
            mask = arguments.get("attention_mask")
            ids = checked_ids(arguments.get("input_ids"))
            first_tokens(PackedBatch.from_padded(ids[..., None].float(), checked_mask(mask)), type(self).__name__)
        if kind in (HeadKind.FIRST, HeadKind.PADDED) or "logits_to_keep" in arguments:
            if isinstance(arguments.get("input_ids"), PackedBatch):
                raise Unsupported(
                    f"{type(self).__name__} needs padded input_ids and an attention_mask, not a PackedBatch"
                )
            return original(self, **arguments)
        if getattr(self.config, "sparse_prediction", False):  # type: ignore[attr-defined]
            raise Unsupported("config.sparse_prediction = True is not supported; expected False")
        passed = {"labels", "return_dict", "num_items_in_batch"}
        prepared = base.weft_prepare({k: v for k, v in arguments.items() if k not in passed})
        rest = {k: v for k, v in arguments.items() if k in passed and v is not None}
        if "labels" in rest:
            rest["labels"] = packed_labels(prepared.batch, rest["labels"], kind)[None]
        output = original(self, input_ids=prepared, **rest)
        return self._padded(output, prepared.batch, arguments.get("input_ids"))

    @staticmethod
    def _padded(output: Any, batch: PackedBatch, given: object) -> Any:
        def place(logits: Tensor) -> Tensor:
            packed = batch.with_values(logits[0])
            return packed.values if isinstance(given, PackedBatch) else packed.to_padded()

        if isinstance(output, tuple):  # (loss, logits) or (logits,)
            at = len(output) - 1
            return (*output[:at], place(output[at]))
        output.logits = place(output.logits)
        return output


def subclass(model: nn.Module, mixin: type, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of the model whose class has another forward; its signature and name stay."""
    original = type(model)
    body = {"forward": functools.wraps(original.forward)(forward), "__module__": original.__module__}
    twin = copy.copy(model)
    twin.__class__ = type(original.__name__, (mixin, original), body)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(model.__dict__[name])
    return twin


def pack_base(model: nn.Module, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a base model."""
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.weft_forward(bind(original, args, kwargs))

    twin = subclass(model, PackedBase, forward)
    twin.__dict__["_weft"] = (family, dropout)
    twin.weft_engine().model  # type: ignore[operator]  # noqa: B018  # raises now if the model cannot be packed
    return twin


def pack_head(model: nn.Module, kind: HeadKind, base: str, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a model whose attribute `base` is its base model."""
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.weft_forward(original, bind(original, args, kwargs))

    twin = subclass(model, PackedHead, forward)
    twin._modules[base] = pack_base(getattr(model, base), family, dropout)
    twin.__dict__["_weft_head"], twin.__dict__["_weft_base"] = kind, base
    return twin
