"""The styles in parallelize_module, against the same modules unsharded; and the tuner on a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from weft import overlap
from weft.overlap import ColwiseOverlap, Op, RowwiseOverlap, Shape, tune, tuning, use_tuned
from weft.overlap.executor.context import context_of

WIDTH, HEADS, STEPS = 32, 4, 20


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96, bias=bias), nn.Linear(96, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.mlp = heads, nn.LayerNorm(WIDTH), Mlp()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (p(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.mlp(x + self.out(mixed))


def styles(kind: str) -> dict:
    norm = SequenceParallel(use_local_output=True)
    mlp = {"norm": norm, "up": ColwiseOverlap(), "down": RowwiseOverlap()}
    if kind == "mlp":
        return mlp
    return {
        **{f"mlp.{name}": style for name, style in mlp.items()},
        "norm1": norm,
        **dict.fromkeys("qkv", ColwiseOverlap()),
        "out": RowwiseOverlap(),
    }


def train(module: nn.Module, x, target, share: float) -> list[float]:
    """Losses of STEPS steps; `share` is this rank's part of the mean."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = F.mse_loss(module(x), target) * share
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def make(kind: str, ranks: int) -> nn.Module:
    torch.manual_seed(0)
    return Mlp() if kind == "mlp" else Block(HEADS // ranks)


def train_both(kind: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(3, 16, WIDTH, generator=generator) for _ in range(2))
    alone = make(kind, 1)
    want = train(alone, x, target, 1.0)
    sharded = parallelize_module(make(kind, size), init_device_mesh("cpu", (size,)), styles(kind))
    mine = [t.chunk(size, dim=1)[rank] for t in (x, target)]
    shares = torch.tensor(train(sharded, *mine, 1.0 / size))
    dist.all_reduce(shares)
    torch.testing.assert_close(shares, torch.tensor(want), rtol=1e-4, atol=1e-5)
    assert want[-1] < 0.8 * want[0], "it learns"
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), alone.get_parameter(name), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["mlp", "block"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_steps_have_the_losses_of_one_process(kind: str, ranks: int) -> None:
    run_ranks(train_both, ranks, kind, timeout=120.0)


def layouts_and_modes() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = Mlp(bias=False)
    x = torch.randn(10, WIDTH)
    want = alone.down(F.gelu(alone.up(x)))
    plan = {"up": ColwiseOverlap(input_layouts=Shard(0)), "down": RowwiseOverlap(output_layouts=Replicate())}
    torch.manual_seed(0)
    sharded = parallelize_module(Mlp(bias=False), mesh, plan)
    got = sharded.down(F.gelu(sharded.up(x.chunk(2)[rank])))
    torch.testing.assert_close(got, want)
    uneven = distribute_tensor(x[:9], mesh, [Shard(0)])  # 5 and 4 rows
    torch.testing.assert_close(sharded.up(uneven), alone.up(x[:9]).chunk(2, dim=1)[rank])
    torch.manual_seed(0)
    whole = parallelize_module(
        Mlp(bias=False), mesh, {"down": RowwiseOverlap(output_layouts=Shard(0), use_local_output=False)}
    )
    wide = distribute_tensor(F.gelu(alone.up(x)).detach(), mesh, [Replicate()])
    scattered = whole.down(wide)
    assert scattered.placements == (Shard(0),)
    torch.testing.assert_close(scattered.full_tensor(), want)
    compiled = torch.compile(sharded.up, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            sharded.up.weight.mul_(2.0)
        torch.testing.assert_close(compiled(x.chunk(2)[rank]), sharded.up(x.chunk(2)[rank]))
    assert all(isinstance(t, DTensor) for name, t in sharded.state_dict().items() if "norm" not in name)


def test_layouts_and_compiled_layers() -> None:
    run_ranks(layouts_and_modes, 2, timeout=120.0)


def replicated_input() -> None:
    """As users of ColwiseParallel have it: every rank holds x, and its gradient is the sum over ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    alone = Mlp()
    target = torch.randn(3, 7, WIDTH)
    x = torch.randn(3, 7, WIDTH)
    made = []
    for styles_of in (
        {"up": ColwiseOverlap(input_layouts=Replicate()), "down": RowwiseOverlap(output_layouts=Replicate())},
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    ):
        torch.manual_seed(0)
        made.append(parallelize_module(Mlp(), mesh, styles_of))
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    for module, each in zip((alone, *made), inputs, strict=True):
        F.mse_loss(module(each), target).backward()
    for module, each in zip(made, inputs[1:], strict=True):
        torch.testing.assert_close(each.grad, inputs[0].grad)
        for name, parameter in module.named_parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad, alone.get_parameter(name).grad)
    losses = train(made[0], x, target, 1.0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(alone, x, target, 1.0)), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        whole = distribute_tensor(x, mesh, [Replicate()])
        torch.testing.assert_close(made[0].up(whole), alone.up(x).chunk(size, dim=2)[rank], rtol=1e-2, atol=1e-3)
        compiled = torch.compile(made[0].up, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), made[0].up(x))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_replicated_input(ranks: int) -> None:
    run_ranks(replicated_input, ranks, timeout=120.0)


def uneven(colwise: bool, sequence: int, width: int, sharded: bool) -> None:
    """DTensors in and out, of sizes that ranks do not divide: what torch's own styles give, with gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = Shard(1) if sharded else Replicate()
    torch.manual_seed(0)
    x = torch.randn(1, sequence, width)
    found = []
    for style in (ColwiseOverlap, ColwiseParallel) if colwise else (RowwiseOverlap, RowwiseParallel):
        torch.manual_seed(0)
        options = {"input_layouts" if colwise else "output_layouts": layout}
        layer = parallelize_module(nn.Linear(width, 5), mesh, style(**options, use_local_output=False))
        given = distribute_tensor(x, mesh, [layout if colwise else Shard(2)]).requires_grad_()
        y = layer(given)
        whole = y.full_tensor()
        whole.square().sum().backward()
        shard = (y.shape, y.placements, y.to_local().shape)
        found.append((shard, whole, given.grad.full_tensor(), *(p.grad.full_tensor() for p in layer.parameters())))
    (ours, *values), (theirs, *wanted) = found
    assert ours == theirs
    for got, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("colwise", [False, True])
def test_dtensors_of_uneven_sizes_are_those_of_torch(colwise: bool, sharded: bool, ranks: int) -> None:
    for sequence, width in ((5, 5), (1, 6)) if ranks == 2 else ((5, 7),):
        run_ranks(uneven, ranks, colwise, sequence, width, sharded)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def given_forward() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 2 * x
    return layer


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"is for nn\.Linear, got LayerNorm"):
        parallelize_module(nn.LayerNorm(4), mesh, ColwiseOverlap())
    for style, name in ((ColwiseOverlap(), "Colwise"), (RowwiseOverlap(), "Rowwise")):
        for module, text in (
            (Scaled(4, 4), "got Scaled, a subclass whose code would not run; use torch's {}Parallel"),
            (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "got ParametrizedLinear, .*torch's {}Parallel"),
            (given_forward(), "brings a forward of its own, .*torch's {}Parallel"),
            (nn.utils.prune.identity(nn.Linear(4, 4), "weight"), "{}Overlap is for parameters .*got bias, weight_orig"),
        ):
            before = type(module)
            with pytest.raises(ValueError, match=text.format(name)):
                parallelize_module(module, mesh, style)
            assert type(module) is before
            assert not any(isinstance(p, DTensor) for p in module.parameters())
    rowwise = parallelize_module(nn.Linear(4, 4), mesh, RowwiseOverlap())
    with pytest.raises(ValueError, match="a sequence of 5 in a batch of 3 does not divide by 2 ranks"):
        rowwise(torch.randn(3, 5, 2))
    with pytest.raises(ValueError, match="the input is a list, expected a tensor"):
        rowwise([1.0])
    for layer in (rowwise, parallelize_module(nn.Linear(2, 4), mesh, ColwiseOverlap())):
        with pytest.raises(ValueError, match=r"the input has shape \[2\], expected a tensor \[\.\.\., sequence, K\]"):
            layer(torch.randn(2))
        with pytest.raises(ValueError, match=r"shape \[4, 2\], and Shard\(1\) is no dim of a sequence.*: 0 to 0"):
            layer(torch.randn(4, 2))
    layer = parallelize_module(nn.Linear(2, 4), mesh, ColwiseOverlap(input_layouts=Replicate()))
    assert layer(torch.randn(2)).shape == (2,)
    with pytest.raises(ValueError, match=r"the input has shape \[\], expected a tensor \[\.\.\., K\]"):
        layer(torch.tensor(1.0))


def hooks() -> None:
    """Hooks that a layer had before are called as before."""
    torch.manual_seed(0)
    layer, seen = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    layer.register_forward_hook(lambda module, given, y: seen.append(y.shape))
    x = torch.randn(3, 4)
    mesh = init_device_mesh("cpu", (2,))
    want = layer(x).chunk(2, -1)[dist.get_rank()]
    parallelize_module(layer, mesh, ColwiseOverlap(input_layouts=Replicate()))
    torch.testing.assert_close(layer(x), want)
    assert seen[-1] == (3, 2)


def test_hooks_stay() -> None:
    run_ranks(hooks, 2)


def test_refusals() -> None:
    run_ranks(refusals, 2)


# The tuner --------------------------------------------------------------------------------------------------


def tune_here(path: str) -> str:
    group = dist.group.WORLD
    found = [tune(Shape(op, 48, 64, 16), group=group, candidates=2, rounds=2) for op in Op if not op.gathers]
    assert all("measured" in t.plan.reason for t in found)
    if group.rank() == 0:
        tuning.save(path, found)
    dist.barrier()
    fresh = dist.new_group([0, 1])
    notes = use_tuned(path, group=fresh)
    for t in found:
        assert context_of(fresh).planner.known(t.plan.op, 48, 64, 16, "float32") == t.plan
    overlap.matmul_all_reduce(torch.ones(48, 16), torch.ones(64, 16), group=fresh)
    assert use_tuned(path + ".none", group=fresh)[0].endswith("`weft tune` writes it")
    return notes[-1]


def test_tuned_plans_are_the_same_on_all_ranks_and_used(tmp_path) -> None:
    notes = run_ranks(tune_here, 2, str(tmp_path / "plans.json"))
    assert notes == ["3 of 3 plans are for hosts (0, 0)"] * 2
