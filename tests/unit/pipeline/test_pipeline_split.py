"""The backward pass in two parts, against one: the same bits, and no matmul twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from weft.pipeline.run.split import SplitBackward

WIDTH = 8


class Tied(nn.Module):
    """A weight that is used directly twice, one through transposes, and an output that does not depend on x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.linear(x) * self.scale) @ self.linear.weight.t()
        return y * self.scale, self.scale * 2, x


class Scaled(nn.Module):
    """A weight that is computed from others (weight norm), and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g, self.table = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, 1)), None
        self.table = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return (F.linear(F.linear(x, weight), weight) + self.table(torch.arange(3)),)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + self.attention(x, x, x, need_weights=False)[0]
        return (y + self.mlp(self.norm(y)),)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.second(F.relu(self.norm(self.first(x)))),)


def both(make: type[nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    one = make()
    other = make()
    other.load_state_dict(one.state_dict())
    return one, other, torch.randn(2, 3, WIDTH)


@pytest.mark.parametrize("make", [Tied, Scaled, Plain, Conv])
def test_two_parts_are_as_good_as_one(make: type[nn.Module]) -> None:
    one, other, data = both(make)
    for _ in range(2):  # gradients add up
        x, same_x = data.clone().requires_grad_(), data.clone().requires_grad_()
        outputs, others = one(x), other(same_x)
        grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(outputs)]
        torch.autograd.backward(outputs, grads)
        split = SplitBackward([get_gradient_edge(y) for y in others], grads, [same_x])
        del others
        (found,) = split.input_gradients()
        split.weight_gradients()
        assert torch.equal(found, x.grad)
        assert same_x.grad is None
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


def test_weights_come_with_the_second_part_only() -> None:
    one, _, data = both(Plain)
    x = data.requires_grad_()
    split = SplitBackward([get_gradient_edge(y) for y in one(x)], [torch.ones(2, 3, WIDTH)], [x])
    split.input_gradients()
    assert all(p.grad is None for p in one.parameters())
    split.weight_gradients()
    assert all(p.grad is not None for p in one.parameters())


def test_hooks_of_weights_run_once() -> None:
    one, _, data = both(Plain)
    seen = []
    one.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = data.requires_grad_()
    split = SplitBackward([get_gradient_edge(y) for y in one(x)], [torch.ones(2, 3, WIDTH)], [x])
    split.input_gradients()
    split.weight_gradients()
    assert len(seen) == 1


def test_no_flop_twice() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    one = 2 * 32 * 64 * 64

    def flops(work) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops()

    split = SplitBackward([get_gradient_edge(layer(x))], [torch.ones(32, 64)], [x])
    assert flops(split.input_gradients) == 2 * one
    assert flops(split.weight_gradients) == 2 * one


def test_without_inputs_all_is_done_in_the_second_part() -> None:
    table = nn.Embedding(3, 4)
    split = SplitBackward([get_gradient_edge(table(torch.arange(3)))], [torch.ones(3, 4)], [])
    assert split.input_gradients() == []
    assert table.weight.grad is None
    split.weight_gradients()
    assert torch.equal(table.weight.grad, torch.ones(3, 4))


def test_an_input_that_is_not_used() -> None:
    layer = nn.Linear(4, 4)
    x, unused = torch.ones(1, 4, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    split = SplitBackward([get_gradient_edge(layer(x))], [torch.ones(1, 4)], [unused, x])
    found = split.input_gradients()
    assert found[0] is None
    assert found[1].shape == (1, 4)


class Saved(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_deep_graph() -> None:
    """Deeper than Python's stack."""
    x = torch.ones(2, requires_grad=True)
    weight = nn.Parameter(torch.ones(2))
    y = x * weight
    for _ in range(3000):
        y = y + 1
    split = SplitBackward([get_gradient_edge(y)], [torch.ones(2)], [x])
    with Saved() as saved:
        split.input_gradients()
        first = saved.count
        split.weight_gradients()
    assert saved.count - first < 10 < first + 10
    assert torch.equal(weight.grad, torch.ones(2))
