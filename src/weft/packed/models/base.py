"""The base model of a Hugging Face family: the same call, on packed tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.packed.batch import PackedBatch
from weft.packed.boundaries import MARKS, check_positions
from weft.packed.call import Inputs, Kept
from weft.packed.engine import AttentionDropout, Engine
from weft.packed.models.cache import cache_to_fill, fill, goes_on
from weft.packed.models.common import Unsupported, is_known_leaf
from weft.packed.models.inputs import (
    HeadKind,
    checked_index,
    first_tokens,
    pack_inputs,
    packed_like,
    reject,
)
from weft.packed.models.twin import Twin
from weft.packed.spec import Transformer
from weft.packed.watch import check_untouched, is_of


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


class PackedBase(Twin):
    """Mixed into the class of a base model. `_weft` is (family, whether attention weights are dropped).

    `weft_flattens`: it takes rows that hold several texts.
    """

    _weft: tuple[Family, AttentionDropout]
    weft_flattens = False

    def weft_engine(self) -> Engine:
        module: Any = self
        return self.weft_kept("_weft_engine", lambda: Engine(module, self._weft_describe, self._weft[1]))

    def _weft_describe(self, model: Any) -> Transformer:
        check_attention(model.config)
        home = type(model).__module__
        check_untouched(model, lambda kind: is_of(kind, home) or is_known(kind), runs=getattr(model, "pooler", None))
        return self._weft[0].describe(model)

    def weft_prepare(self, arguments: dict[str, Any]) -> Prepared:
        """Packs and checks the inputs of a call."""
        family, _ = self._weft
        self.weft_check()
        model = self.weft_engine().model
        assert model.embedding is not None
        supported = _INPUTS | set(model.embedding.names) | (_CACHE if family.has_cache else set())
        reject(arguments, supported | (MARKS if self.weft_flattens else set()), self)
        batch, padded = self.weft_pack(arguments)
        self._check_holes(batch, model)
        positions = self._positions(batch, padded, arguments)
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
        inputs = Inputs(
            batch.cu_seqlens, batch.tokens, tuple(indices), vectors, positions.contiguous(), farthest, model
        )
        cache = (
            cache_to_fill(self, arguments, batch, self.weft_engine().is_differentiable(inputs))
            if family.has_cache
            else None
        )
        return Prepared(batch, inputs, self._wants_states(arguments), cache)

    def weft_pack(self, arguments: dict[str, Any]) -> tuple[PackedBatch, Tensor | None]:
        """The tokens of a call, and the padded ids where there are some."""
        return pack_inputs(arguments, positions_split=self.weft_flattens and self._weft[0].has_cache)

    def _wants_states(self, arguments: dict[str, Any]) -> bool:
        config: Any = self.config  # type: ignore[attr-defined]
        given = arguments.get("output_hidden_states")
        wants = config.output_hidden_states if given is None else given
        if not isinstance(wants, bool):
            raise Unsupported(f"output_hidden_states = {wants!r}: single states cannot be asked for, expected True")
        if wants and getattr(config, "tie_last_hidden_states", None) is False:
            raise Unsupported("config.tie_last_hidden_states = False is not supported; expected True")
        return wants

    def _positions(self, batch: PackedBatch, padded: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        family, given = self._weft[0], arguments.get("position_ids")
        if given is None:
            return family.positions(self, batch, padded).to(torch.int64)
        if given.dim() == 2 and given.shape[0] == 1:
            given = given.expand(batch.padded_shape[0], -1)
        positions = packed_like(batch, given, "position_ids")
        if batch.tokens and int(positions.min()) < 0:
            raise ValueError(f"position_ids must be >= 0, got {int(positions.min())}")
        if not isinstance(arguments.get("input_ids"), PackedBatch):  # which says itself where texts end
            check_positions(batch.cu_seqlens, positions)
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
            fields["pooler_output"] = self._pooled(pooler, prepared.batch.with_values(hidden))
        if kept.states is not None:
            fields["hidden_states"] = (*map(place, kept.states), fields["last_hidden_state"])
        if kept.keys_values is not None:
            fields["past_key_values"] = fill(prepared.cache, prepared.batch, kept.keys_values)
        return self._output(fields, arguments.get("return_dict"))

    @staticmethod
    def _pooled(pooler: nn.Module, batch: PackedBatch) -> Tensor:
        """[rows, width]; zeros for a row without tokens, as everywhere at padding."""
        pooled: Tensor = pooler(first_tokens(batch, "the pooler")[:, None])
        is_filled = batch.real().any(1)
        return pooled if bool(is_filled.all()) else pooled * is_filled[:, None]

    def _output(self, fields: dict[str, Any], return_dict: bool | None) -> Any:
        from transformers import modeling_outputs

        output = getattr(modeling_outputs, self._weft[0].output)(**fields)
        wants_dict = self.config.return_dict if return_dict is None else return_dict  # type: ignore[attr-defined]
        return output if wants_dict else output.to_tuple()


def is_known(kind: type) -> bool:
    """Whether adapters know a class that is not of the family's own file."""
    return is_known_leaf(kind) or (is_of(kind, "transformers.pytorch_utils") and kind.__name__ == "Conv1D")


_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def check_attention(config: Any) -> None:
    """Raises where the model is told to compute attention by something that is not transformers' own."""
    name = getattr(config, "_attn_implementation", None)
    if name is None or name == "eager":
        return
    table: Any = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    function = table.get(name)
    if name not in _ATTENTION or not str(getattr(function, "__module__", "transformers.")).startswith("transformers."):
        raise Unsupported(
            f"the attention implementation {name!r} is not transformers' own, and a packed model would not call it; "
            f'call set_attn_implementation("sdpa") on the model'
        )
