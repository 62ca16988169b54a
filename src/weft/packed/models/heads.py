"""Models with a head: the head's own code on what the packed base model computes.

Heads that work token by token (masked LM, token classification, causal LM) see packed rows as a batch of one, and their
logits are padded again at the end; heads that look at one token of each sequence get padded states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.cache import goes_on
from weft.packed.models.common import Unsupported
from weft.packed.models.inputs import HeadKind, ends_in_last_column, first_tokens, pack_inputs, packed_labels


class PackedHead:
    """Mixed into the class of a model with a head. `_weft_head` is its kind, `_weft_base` the name of the base."""

    _weft_head: HeadKind
    _weft_base: str

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the model: padded for padded inputs, packed logits [T, ...] for a `PackedBatch`."""
        kind = self._weft_head
        if goes_on(arguments):
            return original(self, **arguments)
        if isinstance(arguments.get("logits_to_keep"), int) and arguments["logits_to_keep"] == 0:
            arguments = {k: v for k, v in arguments.items() if k != "logits_to_keep"}
        if kind in (HeadKind.FIRST, HeadKind.SPANS, HeadKind.PADDED) or "logits_to_keep" in arguments:
            return self._on_padded_states(original, arguments)
        return self._token_by_token(original, arguments)

    def _on_padded_states(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        name, kind = type(self).__name__, self._weft_head
        if isinstance(arguments.get("input_ids"), PackedBatch):
            raise Unsupported(f"{name} needs padded input_ids and an attention_mask, not a PackedBatch")
        batch, _ = pack_inputs(arguments)
        if kind is HeadKind.FIRST:
            first_tokens(batch.with_values(batch.positions[:, None].float()), name)
        keep = arguments.get("logits_to_keep")
        if isinstance(keep, int) and keep == 1 and not ends_in_last_column(batch):
            raise Unsupported(
                f"logits_to_keep: {name} keeps the last column, which is padding in some sequences here; "
                f"pad on the left, as generation needs it"
            )
        if kind is not HeadKind.SPANS:
            return original(self, **arguments)
        is_padded = batch.tokens < batch.padded_shape[0] * batch.padded_shape[1]
        if is_padded and arguments.get("start_positions") is not None:
            raise Unsupported(
                f"start_positions: the loss of {name} counts the logits of padding, which is never computed; "
                f"compute the loss from start_logits and end_logits, or pass sequences of one length"
            )
        output = original(self, **{**arguments, "return_dict": True})
        if is_padded:
            real = batch.with_values(torch.ones(batch.tokens, dtype=torch.bool)).to_padded()
            for key in ("start_logits", "end_logits"):  # no answer starts or ends in padding
                logits: Tensor = output[key]
                output[key] = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
        return self._returned(output, arguments)

    def _token_by_token(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if getattr(self.config, "sparse_prediction", False):  # type: ignore[attr-defined]
            raise Unsupported("config.sparse_prediction = True is not supported; expected False")
        passed = {"labels", "return_dict", "num_items_in_batch"}
        base = getattr(self, self._weft_base)
        prepared = base.weft_prepare({k: v for k, v in arguments.items() if k not in passed})
        rest = {k: v for k, v in arguments.items() if k in passed and v is not None}
        if "labels" in rest:
            rest["labels"] = packed_labels(prepared.batch, rest["labels"], self._weft_head)[None]
        output = original(self, **{**rest, "input_ids": prepared, "return_dict": True})

        def place(states: Tensor) -> Tensor:
            packed: PackedBatch = prepared.batch.with_values(states[0])
            return packed.values if isinstance(arguments.get("input_ids"), PackedBatch) else packed.to_padded()

        output["logits"] = place(output.logits)
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(map(place, output.hidden_states))
        return self._returned(output, arguments)

    def _returned(self, output: Any, arguments: dict[str, Any]) -> Any:
        wants = arguments.get("return_dict")
        wants_dict = self.config.return_dict if wants is None else wants  # type: ignore[attr-defined]
        return output if wants_dict else output.to_tuple()
