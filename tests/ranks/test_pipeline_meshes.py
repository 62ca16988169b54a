"""Stages of several ranks: tensor parallelism inside, another one in each stage, and every layout between."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import LONG, WIDTH, loss_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from weft.layout import Layout, Mesh, ShardSizes
from weft.overlap import ColwiseOverlap, RowwiseOverlap
from weft.pipeline import Edge, StageGraph, schedule
from weft.pipeline.run.api import Pipeline
from weft.reference import shard, step_reference

HIDDEN = 24


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_mlps() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mlp(), Mlp()]


def data(microbatches: int, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(2 * microbatches, length, WIDTH, generator=generator) for _ in range(2))
    return x, target


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def train_tensor_parallel(kind: str, sizes: tuple[int, int], name: str, checkpoint: bool) -> None:
    """Two stages of `sizes` ranks; with "overlap" activations are cut along the sequence, also between the stages."""
    me, microbatches = dist.get_rank(), 3
    ranks = [list(range(sizes[0])), list(range(sizes[0], sum(sizes)))]
    meshes = [DeviceMesh("cpu", each) for each in ranks]  # made by all ranks
    place = 0 if me < sizes[0] else 1
    modules, alone = make_mlps(), make_mlps()
    if sizes[place] > 1:
        styles: dict[str, object] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if kind == "overlap":
            norm = SequenceParallel(use_local_output=True)
            styles = {"norm": norm, "up": ColwiseOverlap(), "down": RowwiseOverlap()}
        parallelize_module(modules[place], meshes[place], styles)
    cut = kind == "overlap"
    layouts = {stage: [Shard(1)] for stage in (0, 1) if cut and sizes[stage] > 1}
    x, target = data(microbatches)
    sharded = cut and sizes[place] > 1
    mine = [t.chunk(sizes[place], dim=1)[ranks[place].index(me)] if sharded else t for t in (x, target)]
    share = sizes[1] if sharded else 1  # the loss is a mean over all ranks' rows: a sum of their shares
    made = schedule(name, stages=2, microbatches=microbatches)
    with Pipeline(
        modules,
        ranks,
        made,
        input_layouts={stage: p for stage, p in layouts.items() if stage == 1},
        output_layouts={stage: p for stage, p in layouts.items() if stage == 0},
        loss_fn=lambda output, goal: loss_fn(output, goal) / share,
        timeout=LONG,
        checkpoint=checkpoint,
    ) as pipe:
        for _ in range(2):  # gradients add up
            losses = pipe.step(mine[0], mine[1])
            expected = step_reference(alone, x, target, microbatches=microbatches, loss_fn=loss_fn)
        if pipe.has_last_stage and sharded:
            dist.all_reduce(losses, group=meshes[1].get_group())
        if pipe.has_last_stage:
            assert torch.allclose(losses, expected, rtol=1e-5), (losses, expected)
    for (key, p), (_, q) in zip(modules[place].named_parameters(), alone[place].named_parameters(), strict=True):
        assert torch.allclose(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6), (kind, sizes, name, key)


def train_everything() -> None:
    train_tensor_parallel("overlap", (2, 2), "eager-1f1b", False)
    train_tensor_parallel("overlap", (2, 2), "1f1b", True)
    train_tensor_parallel("torch", (2, 2), "eager-1f1b+delay", False)
    train_tensor_parallel("overlap", (2, 2), "zero-bubble", False)
    train_tensor_parallel("torch", (1, 3), "eager-1f1b", False)
    train_tensor_parallel("overlap", (1, 3), "1f1b", False)
    train_tensor_parallel("overlap", (3, 1), "eager-1f1b", False)


def test_tensor_parallel_stages() -> None:
    run_ranks(train_everything, 4, timeout=120.0)


# Layouts ------------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    """Element by element, so that it does the same to any shard."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.factor


class Divided(nn.Module):
    """Gives its result as terms of a sum over `size` ranks."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner, self.size = inner, size

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / self.size


def move(sizes: tuple[int, int], before: object, after: object, rows: int, hosts: list[int] | None) -> None:
    """A stage on some ranks, one on others, and `rows` rows between; losses and gradients as in one process."""
    me, microbatches = dist.get_rank(), 2
    ranks = [list(range(sizes[0])), list(range(sizes[0], sum(sizes)))]
    meshes = [Mesh.of(each, hosts=[0 if hosts is None else hosts[r] for r in each]) for each in ranks]
    made = schedule("eager-1f1b", stages=2, microbatches=microbatches)
    alone: list[nn.Module] = [Affine(0.5), Affine(2.0)]
    modules: list[nn.Module] = [Affine(0.5), Affine(2.0)]
    if isinstance(before, Partial):
        modules[0] = Divided(modules[0], sizes[0])
    batch = [torch.randn(rows, 5, generator=torch.Generator().manual_seed(i)) for i in range(microbatches)]
    targets = [torch.ones(rows, 5) for _ in range(microbatches)]
    layouts = [Layout(meshes[0], [before]), Layout(meshes[1], [after])]  # type: ignore[list-item]
    mine = [shard(x, layouts[0]).get(me, x) for x in batch]
    goals = [shard(x, layouts[1]).get(me, x) for x in targets]
    used = Pipeline(
        modules,
        meshes,
        made,
        output_layouts={0: [before]},  # type: ignore[list-item]
        input_layouts={1: [after]},  # type: ignore[list-item]
        loss_fn=lambda output, goal: ((output - goal) ** 2).sum(),
        timeout=LONG,
    )
    with used as pipe:
        pipe.step(mine, goals)
        losses = pipe.step(mine, goals)  # in the same channels
        expected = step_reference(
            alone, batch, targets, microbatches=2, loss_fn=lambda output, goal: ((output - goal) ** 2).sum()
        )
        step_reference(alone, batch, targets, microbatches=2, loss_fn=lambda y, goal: ((y - goal) ** 2).sum())
    place = 0 if me < sizes[0] else 1
    grad = next(modules[place].parameters()).grad
    is_cut = [isinstance(layout.placements[0], Shard | ShardSizes) for layout in layouts]
    gathered: list[tuple[Tensor, Tensor]] = [None] * sum(sizes)  # type: ignore[list-item]
    dist.all_gather_object(gathered, (losses, grad), group=dist.new_group(range(sum(sizes))))
    for stage in (0, 1):
        grads = [gathered[rank][1] for rank in ranks[stage]]
        terms = is_cut[stage] or (stage == 0 and isinstance(before, Partial))
        total = sum(grads) if terms else grads[0]
        assert terms or all(torch.equal(each, grads[0]) for each in grads)
        assert torch.allclose(total, alone[stage].factor.grad, rtol=1e-4), (sizes, before, after, stage)
    losses = [gathered[rank][0] for rank in ranks[1]]
    assert torch.allclose(sum(losses) if is_cut[1] else losses[0], expected, rtol=1e-4)


def move_everything() -> None:
    here = [0, 0, 0, 0]
    apart = [0, 1, 2, 3]
    pairs = [0, 0, 1, 1]
    for hosts in (here, apart, pairs):
        move((2, 2), Replicate(), Replicate(), 5, hosts)
        move((2, 2), Shard(0), Shard(1), 5, hosts)
    move((1, 3), Replicate(), Shard(0), 7, here)
    move((3, 1), Shard(0), Replicate(), 7, pairs)
    move((3, 1), Shard(0), Replicate(), 2, here)  # one rank has nothing
    move((2, 2), ShardSizes(0, (1, 4)), ShardSizes(1, (2, 3)), 5, pairs)
    move((2, 2), Partial(), Replicate(), 5, here)
    move((3, 1), Partial(), Replicate(), 4, apart)


def test_layouts_between_stages() -> None:
    run_ranks(move_everything, 4, timeout=120.0)


# A skip over meshes of several ranks --------------------------------------------------------------------------


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> object:
        y = self.linear(x) if skip is None else self.linear(x) + skip
        return {"x": y, "skip": y * 2}


def skip_over_meshes() -> None:
    """A large tensor (several chunks) and a skip over a stage of two ranks, which may pass it on."""
    graph = StageGraph(3, (Edge(0, 1), Edge(1, 2), Edge(0, 1, "skip"), Edge(0, 2, "skip")))
    torch.manual_seed(0)
    made = schedule("eager-1f1b", stages=3, microbatches=8)
    modules, alone = ([Skipping() for _ in range(3)] for _ in range(2))
    for module, other in zip(modules, alone, strict=True):
        other.load_state_dict(module.state_dict())
    x = torch.randn(8, 20000, WIDTH, generator=torch.Generator().manual_seed(0))
    target = torch.zeros_like(x)
    mesh_of = [[0], [1, 2], [3]]
    measure = lambda output, goal: loss_fn(output["x"], goal)  # noqa: E731
    with Pipeline(modules, mesh_of, made, edges=graph, loss_fn=measure, timeout=LONG) as pipe:
        used = []
        for _ in range(3):
            losses = pipe.step(x, target)
            used.append(pipe.buffer_bytes)
            expected = step_reference(alone, x, target, microbatches=8, loss_fn=measure, graph=graph)
        if pipe.has_last_stage:
            assert torch.equal(losses, expected)
        for stage in pipe.stages:
            for p, q in zip(modules[stage].parameters(), alone[stage].parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), stage
        # Memory for received tensors: as many as the schedule keeps and has on the way, not as many as came.
        incoming = {0: 3, 1: 3, 2: 2}[min(pipe.stages)]  # gradients, or tensors and a gradient
        keeps = made.peak_activations[0]
        assert max(used) <= 2 * keeps * incoming * 1.13 * x[0].nbytes, used


def test_a_skip_over_meshes() -> None:
    run_ranks(skip_over_meshes, 4)
