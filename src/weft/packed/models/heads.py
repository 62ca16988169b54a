"""Models with a head: the head's own code on what the packed base model computes.

Heads that work token by token (masked LM, token classification, causal LM) see packed rows as a batch of one, and their
logits are padded again at the end; heads that look at one token of each sequence get padded states. Where a head has
been given modules that may look at more than one token, it gets padded states, too, and only if nothing is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.packed.batch import PackedBatch
from weft.packed.models.base import PackedBase
from weft.packed.models.cache import goes_on
from weft.packed.models.common import Unsupported, is_known_leaf
from weft.packed.models.inputs import (
    HeadKind,
    check_columns,
    ends_in_last_column,
    first_tokens,
    last_tokens,
    packed_labels,
)
from weft.packed.models.twin import Twin
from weft.packed.watch import is_of

_BY_TOKEN = (HeadKind.TOKENS, HeadKind.NEXT_TOKEN)
# What goes to the head itself, not to its base model.
_OF_HEAD = {"labels", "return_dict", "num_items_in_batch"}


class PackedHead(Twin):
    """Mixed into the class of a model with a head. `_weft_head` is its kind, `_weft_base` the name of the base."""

    _weft_head: HeadKind
    _weft_base: str

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the model: padded for padded inputs, packed logits [T, ...] for a `PackedBatch`."""
        self.weft_check()
        self._check_base()
        if goes_on(arguments):
            return original(self, **arguments)
        keep = arguments.get("logits_to_keep")
        if isinstance(keep, int) and keep == 0:
            arguments = {k: v for k, v in arguments.items() if k != "logits_to_keep"}
        if self._weft_head in _BY_TOKEN and "logits_to_keep" not in arguments and self._mixing() is None:
            return self._token_by_token(original, arguments)
        return self._on_padded_states(original, arguments)

    def _check_base(self) -> None:
        base = getattr(self, self._weft_base)
        if not isinstance(base, PackedBase):
            raise Unsupported(
                f"{type(self).__name__}.{self._weft_base} is a {type(base).__name__} that is not packed; "
                f"pack the whole model again"
            )

    def _mixing(self) -> str | None:
        """The name of a module of the head that may look at more than one token, for all that is known of it."""
        model: Any = self
        home = type(model).__module__
        for name, child in model.named_children():
            if name != self._weft_base:
                for below, module in child.named_modules(prefix=name):
                    if not _is_by_token(type(module), home) or "forward" in module.__dict__:
                        return f"{below} ({type(module).__name__})"
        return None

    def _on_padded_states(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        name, kind = type(self).__name__, self._weft_head
        if isinstance(arguments.get("input_ids"), PackedBatch):
            raise Unsupported(f"{name} needs padded input_ids and an attention_mask, not a PackedBatch")
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
        return self._returned(output, arguments)

    def _check_reads(self, batch: PackedBatch, padded_ids: Tensor | None, arguments: dict[str, Any]) -> None:
        """Raises where the head would read the state of padding."""
        name, config = type(self).__name__, self.config  # type: ignore[attr-defined]
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
            packed_labels(batch, arguments["labels"], self._weft_head)

    def _token_by_token(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if getattr(self.config, "sparse_prediction", False):  # type: ignore[attr-defined]
            raise Unsupported("config.sparse_prediction = True is not supported; expected False")
        base = getattr(self, self._weft_base)
        prepared = base.weft_prepare({k: v for k, v in arguments.items() if k not in _OF_HEAD})
        rest = {k: v for k, v in arguments.items() if k in _OF_HEAD and v is not None}
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


def _is_by_token(kind: type, home: str) -> bool:
    """Whether a module of this class computes each token of its input by itself."""
    return is_known_leaf(kind) or is_of(kind, home) or kind in (nn.Sequential, nn.CrossEntropyLoss)
