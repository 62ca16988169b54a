"""The forms in which the texts of a call may come, made one: nested tensors become a `PackedBatch`, and what the call
returns of each token becomes nested again.

    padded       ids [B, S], a mask         states [B, S, ...], zeros at padding
    flattened    ids [1, T], boundaries     states [1, T, ...]
    packed       a `PackedBatch`            states [T, ...]
    nested       a nested tensor [B, *]     nested states [B, *, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.models.twin import Twin
from weft.packed.batch import PackedBatch
from weft.packed.inputs import returned

_BY_TOKEN = ("last_hidden_state", "logits", "start_logits", "end_logits")


class AnyForm(Twin):
    """Mixed into models that take texts in all these forms."""

    def weft_answer(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        texts = texts_of(arguments)
        if texts is None:
            return self.weft_forward(original, arguments)
        opened = with_texts(arguments, texts)
        if not _is_nested(texts):
            return self.weft_forward(original, opened)
        batch = opened["input_ids"]
        output = self.weft_forward(original, {**opened, "return_dict": True})
        for name in _BY_TOKEN:
            if isinstance(output.get(name), Tensor):
                output[name] = nested_like(output[name], batch, texts, arguments.get("logits_to_keep"))
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(nested_like(t, batch, texts) for t in output["hidden_states"])
        return returned(output, self.config, arguments)  # type: ignore[attr-defined]


def texts_of(arguments: dict[str, Any]) -> Any:
    """The nested tensor or the `PackedBatch` that a call brings as ids or as embeddings; None if it brings neither.

    Raises where one argument is nested or packed, and the ids are not.
    """
    found = {name: value for name, value in arguments.items() if _is_nested(value) or isinstance(value, PackedBatch)}
    texts = [(name, found[name]) for name in ("input_ids", "inputs_embeds") if name in found]
    if texts and arguments.get("input_ids") is not None and arguments.get("inputs_embeds") is not None:
        raise ValueError("got both input_ids and inputs_embeds, expected one of them")
    if found and not texts:
        name, value = next(iter(found.items()))
        raise ValueError(
            f"{name} came as a {_form(value)}, and input_ids as a {_form(arguments.get('input_ids'))}; give both in one "
            f"form"
        )
    return texts[0][1] if texts else None


def with_texts(arguments: dict[str, Any], texts: Any) -> dict[str, Any]:
    """The arguments of a call with a `PackedBatch` as input_ids, and flat [T] what else came nested or packed."""
    batch = PackedBatch.from_nested(texts) if _is_nested(texts) else texts
    opened = {name: value for name, value in arguments.items() if name != "inputs_embeds"}
    for name, value in arguments.items():
        if name in ("input_ids", "inputs_embeds", "attention_mask") or not (
            _is_nested(value) or isinstance(value, PackedBatch)
        ):
            continue
        other = PackedBatch.from_nested(value) if _is_nested(value) else value
        if not torch.equal(other.cu_seqlens, batch.cu_seqlens):
            raise ValueError(
                f"{name} and input_ids say different things about where texts end: lengths {_some(other.lengths)} and "
                f"{_some(batch.lengths)}"
            )
        opened[name] = other.values
    opened["input_ids"] = batch
    return opened


def nested_like(values: Tensor, batch: PackedBatch, texts: Tensor, keep: object = None) -> Tensor:
    """Values [T, ...] as a nested tensor of the form of `texts`; as they are where there is no such form of them.

    `keep`: values are of so many of the last tokens of each text only.
    """
    if isinstance(values, DTensor):  # torch has no DTensor that is nested
        return values
    if values.shape[0] != batch.tokens or keep:
        if not isinstance(keep, int) or values.shape[0] != int(batch.lengths.clamp(max=keep).sum()):
            return values
        return PackedBatch.from_values(values, batch.lengths.clamp(max=keep)).to_nested()
    jagged: Any = texts  # whose methods torch does not declare
    if texts.layout != torch.jagged:
        return torch.nested.as_nested_tensor(batch.with_values(values).to_list())
    if jagged.lengths() is not None:
        return batch.with_values(values).to_nested()
    # The same offsets, not equal ones: by these torch knows that two nested tensors fit each other.
    return torch.nested.nested_tensor_from_jagged(values, offsets=jagged.offsets())


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.is_nested)


def _form(value: Any) -> str:
    if _is_nested(value):
        return "nested tensor"
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _some(lengths: Tensor) -> str:
    shown: Iterable[int] = lengths[:8].tolist()
    return f"[{', '.join(map(str, shown))}{', ...' if lengths.numel() > 8 else ''}]"
