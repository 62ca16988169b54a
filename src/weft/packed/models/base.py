"""The base model of a Hugging Face family: the same call, on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.call import Inputs, Kept
from weft.packed.engine import AttentionDropout, Engine
from weft.packed.models.cache import cache_to_fill, fill, goes_on
from weft.packed.models.common import Unsupported
from weft.packed.models.inputs import (
    HeadKind,
    checked_index,
    first_tokens,
    pack_inputs,
    packed_like,
    reject,
)
from weft.packed.spec import Transformer


@dataclass(frozen=True)
class Family:
    """How one family of models is packed. `positions(model, batch, padded ids)` gives [T]; `has_cache`: a decoder."""

    base: str
    describe: Callable[[Any], Transformer]
    positions: Callable[[Any, PackedBatch, Tensor | None], Tensor]
    output: str
    heads: dict[str, HeadKind]
    has_cache: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """Checked inputs on their way through a head to the base model, and what the output must hold."""

    batch: PackedBatch
    inputs: Inputs
    wants_states: bool
    cache: Any  # to be filled, or None


_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "output_hidden_states", "return_dict"}
_CACHE = {"use_cache", "past_key_values", "cache_position"}


class PackedBase:
    """Mixed into the class of a base model. `_weft` is (family, whether attention weights are dropped)."""

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
        family, _ = self._weft
        model = self.weft_engine().model
        assert model.embedding is not None
        reject(arguments, _INPUTS | set(model.embedding.names) | (_CACHE if family.has_cache else set()), self)
        batch, padded = pack_inputs(arguments)
        self._check_holes(batch, model)
        positions = self._positions(batch, padded, arguments.get("position_ids"))
        vectors = batch.values.contiguous() if batch.values.is_floating_point() else None
        given = {"input_ids": batch.values, "position_ids": positions}
        indices = []
        for name, table in zip(model.embedding.names, model.embedding.tables, strict=True):
            index = given[name] if name in given else packed_like(batch, arguments.get(name), name)
            is_vectors = name == "input_ids" and vectors is not None
            indices.append(index if is_vectors else checked_index(index, name, table.shape[0]))
        if vectors is not None and vectors.shape[1:] != (model.width,):
            raise ValueError(
                f"inputs_embeds must have shape [batch, length, {model.width}], got {list(vectors.shape[1:])} a token"
            )
        farthest = int(positions.max()) if batch.tokens else 0
        inputs = Inputs(batch.cu_seqlens, batch.tokens, tuple(indices), vectors, positions.contiguous(), farthest)
        cache = (
            cache_to_fill(self, arguments, self.weft_engine().is_differentiable(inputs)) if family.has_cache else None
        )
        wants = arguments.get("output_hidden_states")
        config: Any = self.config  # type: ignore[attr-defined]
        return Prepared(batch, inputs, bool(config.output_hidden_states if wants is None else wants), cache)

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

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the base model: padded for padded inputs, packed [T, width] for a `PackedBatch`."""
        given = arguments.get("input_ids")
        if goes_on(arguments):  # one new token for each sequence has no padding: the model's own code is as good
            return original(self, **arguments)
        prepared = given if isinstance(given, Prepared) else self.weft_prepare(arguments)
        kept = Kept([] if prepared.wants_states else None, None if prepared.cache is None else [])
        hidden = self.weft_engine()(prepared.inputs, kept)

        def place(states: Tensor) -> Tensor:
            if isinstance(given, Prepared):
                return states[None]
            return states if isinstance(given, PackedBatch) else prepared.batch.with_values(states).to_padded()

        fields: dict[str, Any] = {"last_hidden_state": place(hidden)}
        pooler = getattr(self, "pooler", None)
        if pooler is not None:
            fields["pooler_output"] = pooler(first_tokens(prepared.batch.with_values(hidden), "the pooler")[:, None])
        if kept.states is not None:
            fields["hidden_states"] = (*map(place, kept.states), fields["last_hidden_state"])
        if kept.keys_values is not None:
            fields["past_key_values"] = fill(prepared.cache, prepared.batch, kept.keys_values)
        return self._output(fields, arguments.get("return_dict"))

    def _output(self, fields: dict[str, Any], return_dict: bool | None) -> Any:
        from transformers import modeling_outputs

        output = getattr(modeling_outputs, self._weft[0].output)(**fields)
        wants_dict = self.config.return_dict if return_dict is None else return_dict  # type: ignore[attr-defined]
        return output if wants_dict else output.to_tuple()
