"""The forms in which the texts of a call may come, made one: nested tensors become a `PackedBatch`, and what the call
returns of each token becomes nested again.

    padded       ids [B, S], a mask         states [B, S, ...], zeros at padding
    flattened    ids [1, T], boundaries     states [1, T, ...]
    packed       a `PackedBatch`            states [T, ...]
    nested       a nested tensor [B, *]     nested states [B, *, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft._torch import is_dtensor
from weft.models.family import HeadKind
from weft.models.twin import Twin
from weft.packed.batch import PackedBatch
from weft.packed.boundaries import MARKS, Restarts, check_offsets, check_positions
from weft.packed.inputs import IGNORED_LABEL, pack_inputs, packed_labels, packed_like, returned

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

    def weft_prompts(self, arguments: Mapping[str, Any]) -> PackedBatch:
        """The prompts that a tokenizer or a collator has made, in any form, one after the other."""
        model: Any = self
        base: Any = getattr(model, model._weft_base) if hasattr(model, "_weft_base") else model
        known = {"input_ids", "attention_mask", "position_ids", "labels"} | MARKS  # a collator always adds labels
        if odd := sorted(name for name, value in arguments.items() if value is not None and name not in known):
            raise ValueError(f"prompts came with {', '.join(odd)}, expected some of {', '.join(sorted(known))}")
        given = {name: value for name, value in arguments.items() if name != "labels"}
        texts = texts_of(given)
        given = given if texts is None else with_texts(given, texts)
        batch: PackedBatch = base.weft_pack(given)[0]
        base.weft_check_holes(batch, base.weft_engine().model)
        positions = given.get("position_ids")
        if positions is not None:
            flat = isinstance(given["input_ids"], PackedBatch)
            positions = positions if flat else positions.expand(*batch.padded_shape)
            if not torch.equal(packed_like(batch, positions, "position_ids", flat=flat), batch.positions):
                raise ValueError("position_ids of prompts must count the tokens of each from 0; leave them out")
        return batch


def texts_of(arguments: dict[str, Any]) -> Any:
    """The nested tensor or the `PackedBatch` that a call brings as ids or as embeddings; None if it brings neither.

    Raises where one argument is nested or packed, and the ids are not.
    """
    found = {name: value for name, value in arguments.items() if _is_text(value)}
    texts = [(name, found[name]) for name in ("input_ids", "inputs_embeds") if name in found]
    if texts and arguments.get("input_ids") is not None and arguments.get("inputs_embeds") is not None:
        raise ValueError("got both input_ids and inputs_embeds, expected one of them")
    if found and not texts:
        name, value = next(iter(found.items()))
        raise ValueError(
            f"{name} came as a {_form(value)}, and input_ids as a {_form(arguments.get('input_ids'))}; give both in "
            f"one form"
        )
    return texts[0][1] if texts else None


def with_texts(arguments: dict[str, Any], texts: Any) -> dict[str, Any]:
    """The arguments of a call with a `PackedBatch` as input_ids, and flat [T] what else came nested or packed."""
    batch = PackedBatch.from_nested(texts) if _is_nested(texts) else texts
    opened = {name: value for name, value in arguments.items() if name != "inputs_embeds"}
    for name, value in arguments.items():
        if name in ("input_ids", "inputs_embeds", "attention_mask") or not _is_text(value):
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
    if is_dtensor(values):  # torch has no DTensor that is nested
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


# Stages of a decoder, each of which is told where texts end ---------------------------------------------------


_TOLD = MARKS | {"attention_mask", "position_ids", "labels"}


@dataclass(frozen=True, eq=False)
class StageTexts:
    """The texts of a micro-batch, as a stage computes them: ids [T] (None: not told here), offsets, positions [T], and
    what each token must predict [T]."""

    batch: PackedBatch
    form: Any  # nested, a `PackedBatch`, or None where the texts lie in rows [B, S]
    ids: Tensor | None
    positions: Tensor
    next_ids: Tensor | None

    @classmethod
    def of(cls, x: Any, cu_seqlens: Tensor | None, said: dict[str, Any]) -> StageTexts:
        """`x` are ids in any form, or rows of another stage; `said` are arguments as Hugging Face names them."""
        if odd := sorted(set(said) - _TOLD):
            raise ValueError(
                f"a stage was told {', '.join(odd)}, expected some of cu_seqlens, {', '.join(sorted(_TOLD))}"
            )
        said = {name: value for name, value in said.items() if value is not None}
        form = (
            texts_of({"input_ids": x}) if _is_text(x) else said.get("labels") if _is_text(said.get("labels")) else None
        )
        if form is not None or cu_seqlens is not None:
            batch = _told_batch(form, cu_seqlens, said)
            said = with_texts({**said, "input_ids": batch}, batch)
        else:
            carrier = torch.zeros(_rows_of(x, said), dtype=torch.int64)
            batch, _ = pack_inputs({**said, "input_ids": carrier}, Restarts(every_step=True))
        form = batch if form is None and cu_seqlens is not None else form
        given, positions = said.get("position_ids"), batch.positions
        if given is not None:
            given = given.expand(batch.padded_shape[0], -1) if given.dim() == 2 and given.shape[0] == 1 else given
            positions = packed_like(batch, given, "position_ids", flat=form is not None)
            check_positions(batch.cu_seqlens, positions)
        elif form is None and not batch.is_flattened:
            positions = batch.columns
        return cls(batch, form, _told_ids(x, batch), positions, _told_labels(batch, said.get("labels"), form))

    def placed(self, logits: Tensor) -> Tensor:
        """[T, V] in the form in which the texts came."""
        if _is_nested(self.form):
            return nested_like(logits, self.batch, self.form)
        return logits if self.form is not None else self.batch.with_values(logits).to_padded()


def _told_batch(form: Any, cu_seqlens: Tensor | None, said: dict[str, Any]) -> PackedBatch:
    for name in sorted(said.keys() - {"position_ids", "labels"}):
        by = "cu_seqlens" if form is None else f"a {_form(form)}"
        raise ValueError(f"got {by}, and {name}: one of them says where texts end; leave the other out")
    if form is None:
        assert cu_seqlens is not None
        cu = cu_seqlens.to(torch.int32).contiguous()
        tokens = int(cu[-1]) if cu.numel() else 0
        check_offsets(cu, tokens)
        return PackedBatch.from_values(torch.zeros(tokens, dtype=torch.int64), cu.diff())
    batch = PackedBatch.from_nested(form) if _is_nested(form) else form.one_a_row()
    if cu_seqlens is not None and cu_seqlens.tolist() != batch.cu_seqlens.tolist():
        raise ValueError(
            f"cu_seqlens and the {_form(form)} say different things about where texts end: lengths "
            f"{_some(cu_seqlens.diff())} and {_some(batch.lengths)}"
        )
    return batch


def _rows_of(x: Any, said: dict[str, Any]) -> tuple[int, int]:
    """The shape [B, S] of rows of texts, whatever shows it."""
    shapes = [value.shape for name in ("attention_mask", "seq_idx", "labels", "position_ids")
              if isinstance(value := said.get(name), Tensor)]  # fmt: skip
    ids = [x.shape] if isinstance(x, Tensor) and not x.is_floating_point() else []
    for shape in (*ids, *shapes):
        if len(shape) == 2:
            return int(shape[0]), int(shape[1])
    offsets = said.get("cu_seq_lens_q")
    if isinstance(offsets, Tensor) and offsets.numel():
        return 1, int(offsets[-1])
    raise ValueError(
        "a stage was not told where texts end; give it cu_seqlens, or attention_mask, position_ids, seq_idx or "
        "cu_seq_lens_q and cu_seq_lens_k, as Hugging Face's model takes them"
    )


def _told_ids(x: Any, batch: PackedBatch) -> Tensor | None:
    if _is_text(x):
        return batch.values
    if not isinstance(x, Tensor) or x.is_floating_point():
        return None
    return batch.gather(x) if x.dim() == 2 else x


def _told_labels(batch: PackedBatch, labels: Tensor | None, form: Any) -> Tensor | None:
    if labels is None:
        return None
    packed = packed_labels(batch, labels, HeadKind.NEXT_TOKEN, flat=form is not None)
    return torch.cat([packed[1:], packed.new_full((min(1, batch.tokens),), IGNORED_LABEL)])


def _is_text(value: Any) -> bool:
    return _is_nested(value) or isinstance(value, PackedBatch)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.is_nested)


def _form(value: Any) -> str:
    if _is_nested(value):
        return "nested tensor"
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _some(lengths: Tensor) -> str:
    shown: Iterable[int] = lengths[:8].tolist()
    return f"[{', '.join(map(str, shown))}{', ...' if lengths.numel() > 8 else ''}]"
