"""Stamps: every way in which people change weights is noticed, and nothing else is."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import weft
from weft.kernels import PackedWeight, linear
from weft.kernels.freshness import Stamp, written

SIZES = [(64, 48), (3, 5), (1000, 1000)]


def parameter(size: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(size).to(dtype))


def stepped(p: nn.Parameter, **options: bool) -> None:
    p.grad = torch.randn_like(p)
    torch.optim.AdamW([p], lr=1e-3, **options).step()


def filled(p: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(p), torch.no_grad():
        p.copy_(torch.randn_like(p))


CHANGES = {
    "in place": lambda p: p.detach().mul_(2),
    "adamw": stepped,
    "adamw foreach": lambda p: stepped(p, foreach=True),
    "adamw fused": lambda p: stepped(p, fused=True),
    "data": lambda p: p.data.mul_(2),
    "data replaced": lambda p: setattr(p, "data", torch.randn_like(p)),
    "behind the counter, as FSDP does": filled,
    "numpy": lambda p: p.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, size: tuple[int, int]) -> None:
    p, other = parameter(size), parameter(size)
    stamp, both = Stamp.of([p]), Stamp.of([other, p])
    assert stamp.holds([p])
    assert both.holds([other, p])
    CHANGES[change](p)
    assert not stamp.holds([p])
    assert not both.holds([other, p])
    assert Stamp.of([p]).holds([p])


def test_a_step_that_rounds_to_almost_nothing_is_noticed() -> None:
    p = parameter((512, 512), torch.bfloat16)
    stamp = Stamp.of([p])
    p.grad = torch.zeros_like(p)
    p.grad[0, 0] = 1.0
    torch.optim.SGD([p], lr=1e-3, fused=True).step()
    assert not stamp.holds([p])


def test_a_step_of_another_model_changes_nothing() -> None:
    p, other = parameter((64, 64)), parameter((64, 64))
    stamp = Stamp.of([p])
    stepped(other, fused=True)
    assert stamp.holds([p])


def test_strided_views_and_tensors_of_inference_mode() -> None:
    base = torch.randn(100, 100)
    view = base.t()[10:20, 5:50]
    stamp = Stamp.of([view])
    assert stamp.holds([base.t()[10:20, 5:50]])
    view.data.add_(1)
    assert not stamp.holds([view])
    with torch.inference_mode():
        inside = torch.randn(100, 100)
    stamp = Stamp.of([inside])
    assert stamp.holds([inside])
    with torch.inference_mode():
        inside.mul_(2)
    assert not stamp.holds([inside])


def test_memory_that_was_freed_is_not_read() -> None:
    w = torch.randn(64, 64)
    stamp = Stamp.of([w])
    w.untyped_storage().resize_(0)
    assert not stamp.holds([w])
    assert Stamp.of([w]).holds([w])
    w.untyped_storage().resize_(64 * 64 * 4)
    w.normal_()
    assert not stamp.holds([w])


def test_other_tensors_and_another_number_of_them() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    stamp = Stamp.of([a])
    assert not stamp.holds([b])
    assert not stamp.holds([a, b])
    assert not stamp.holds([])
    assert Stamp.of([]).holds([])


def test_refresh_and_written_reach_views_of_the_same_memory() -> None:
    model = nn.Linear(300, 300)
    stamp, part = Stamp.of([model.weight]), Stamp.of([model.weight.detach()[10:20]])
    bias = Stamp.of([model.bias])
    written([model.weight])
    assert not stamp.holds([model.weight])
    assert not part.holds([model.weight.detach()[10:20]])
    assert bias.holds([model.bias])
    weft.refresh(model)
    assert not bias.holds([model.bias])


def test_stamps_keep_no_tensor_alive() -> None:
    w = torch.randn(64, 64)
    stamp = Stamp.of([w])
    weak = torch.multiprocessing.reductions.StorageWeakRef(w.untyped_storage())
    del w
    gc.collect()
    assert weak.expired()
    del stamp


@pytest.mark.parametrize("change", CHANGES)
def test_a_packed_weight_whose_source_changed_is_refused(change: str) -> None:
    p, x = parameter((64, 48)), torch.randn(5, 48)
    packed = PackedWeight.from_dense(p)
    linear(x, packed)
    CHANGES[change](p)
    with pytest.raises(ValueError, match="changed after"):
        linear(x, packed)
