"""Stages as users have them: results are those of one process, or an error says what is wrong, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import LONG, WIDTH, Layer, gradients, is_same, loss_fn, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from weft.errors import WeftError
from weft.pipeline import Edge, Schedule, StageGraph, schedule
from weft.pipeline.run.api import Pipeline
from weft.reference import step_reference

COUNT = 4


def make_pipe(modules: Sequence[nn.Module], name: str = "1f1b", **options: Any) -> Pipeline:
    made = schedule(name, stages=len(modules), microbatches=COUNT)
    return pipe_of(modules, made, **options)


def pipe_of(modules: Sequence[nn.Module], made: Schedule, **options: Any) -> Pipeline:
    meshes = [made.rank_of(stage) for stage in range(made.stages)]
    return Pipeline(modules, meshes, made, **{"loss_fn": loss_fn, "timeout": LONG, **options})


def compare(make: Callable[[], list[nn.Module]], name: str = "1f1b", *, exact: bool = True, **options: Any) -> None:
    """Some steps with an optimiser, in the pipeline and in one process: the same losses, gradients and buffers."""
    mine, alone = make(), make()
    with make_pipe(mine, name, **options) as pipe:
        none = nn.Parameter(torch.zeros(1))  # optimisers want one at least
        optimizers = [torch.optim.SGD([*ps, none], lr=0.1) for ps in (pipe.parameters(), parameters(alone))]
        for step in range(2):
            batch = make_batch(COUNT, seed=step)
            losses = pipe.step(*batch)
            expected = step_reference(
                alone,
                *batch,
                microbatches=COUNT,
                loss_fn=loss_fn,
                graph=options.get("edges"),
                seed=options.get("seed"),
                step=step,
            )
            if pipe.has_last_stage:
                assert is_same({"": losses}, {"": expected}, exact=exact), (name, step, losses, expected)
            for stage in pipe.stages:
                assert is_same(gradients(mine[stage]), gradients(alone[stage]), exact=exact), (name, step, stage)
                assert is_same(dict(mine[stage].named_buffers()), dict(alone[stage].named_buffers())), (name, stage)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def fails(modules: list[nn.Module], match: str, call: str = "step", name: str = "1f1b", **options: Any) -> None:
    """One call that ends with an error on all ranks, which says `match`."""
    with make_pipe(modules, name, **options) as pipe:
        with pytest.raises((ValueError, WeftError)) as caught:
            getattr(pipe, call)(*make_batch(COUNT))
        assert match in str(caught.value), str(caught.value)


class Function(nn.Module):
    """A layer, and then any function of its output."""

    def __init__(self, function: Callable[[Tensor], Any], *, layer: bool = True) -> None:
        super().__init__()
        self.layer, self.function = Layer() if layer else nn.Identity(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def seeded(*make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    def modules() -> list[nn.Module]:
        torch.manual_seed(3)
        return [each() for each in make]

    return modules


# What a module keeps ------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Masked(nn.Module):
    """Dropout that remembers its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.masks = nn.Parameter(torch.rand(WIDTH)), []

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.rand(x.shape) > 0.5).to(x.dtype)
        self.masks.append(mask)
        return x * self.weight * mask


def keep_things() -> None:
    for name in ("1f1b", "zero-bubble"):
        compare(seeded(Normed, Normed), name)
    fails(seeded(Normed, Layer)(), "stage 0 writes to its buffer 'norm.", checkpoint=True)
    # A checkpointed stage draws again what it drew, also without a seed.
    modules = seeded(Masked, Masked)()
    with make_pipe(modules, checkpoint=True) as pipe:
        pipe.step(*make_batch(COUNT))
        for stage in pipe.stages:
            masks = modules[stage].masks
            assert len(masks) == 2 * COUNT
            assert {m.numpy().tobytes() for m in masks[:COUNT]} <= {m.numpy().tobytes() for m in masks}
            assert len({m.numpy().tobytes() for m in masks}) == COUNT
    sharded = seeded(Layer, Layer)()
    fully_shard(sharded[dist.get_rank()], mesh=[DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])][dist.get_rank()])
    with pytest.raises(ValueError, match="has modules of FSDP, and schedule zero-bubble runs its backward pass in two"):
        make_pipe(sharded, "zero-bubble")
    replicas, groups = seeded(Layer, Layer)(), [dist.new_group([rank]) for rank in range(2)]
    replicas[dist.get_rank()].up = DistributedDataParallel(
        replicas[dist.get_rank()].up, process_group=groups[dist.get_rank()]
    )
    with pytest.raises(ValueError, match=r"DistributedDataParallel, .*average the gradients over the replicas"):
        make_pipe(replicas)
    # A weight that two stages of a rank share.
    shared = seeded(Layer, Layer, Layer, Layer)

    def tied() -> list[nn.Module]:
        modules = shared()
        modules[2].up.weight, modules[3].scale = modules[0].up.weight, modules[1].scale
        return modules

    compare(tied, "interleaved-1f1b", exact=False)  # in another order
    compare(seeded(lambda: Function(lambda y: y).eval(), Layer))
    frozen = seeded(lambda: Layer().requires_grad_(False), Layer)
    compare(frozen, "zero-bubble")


def test_what_modules_keep() -> None:
    run_ranks(keep_things, 2)


# What comes out of a stage ------------------------------------------------------------------------------------


def return_things() -> None:
    makers: dict[str, Callable[[], nn.Module]] = {
        "identity": lambda: Function(lambda y: y, layer=False),
        "view": lambda: Function(lambda y: y[..., :WIDTH]),
        "transposed": lambda: Function(lambda y: y.mT.contiguous().mT),
        "expanded": lambda: Function(lambda y: y.mean(1, keepdim=True).expand(-1, 3, -1)),
        "flipped": lambda: Function(lambda y: y.flip(0)),
    }
    for i, (which, make) in enumerate(makers.items()):
        # What lies in memory otherwise may be summed in another order.
        compare(seeded(make, Layer), ("zero-bubble", "1f1b")[i % 2], exact=which in ("identity", "flipped"))
        if which != "identity":
            compare(seeded(Layer, make), ("1f1b", "zero-bubble")[i % 2], exact=which == "flipped")
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]  # made by all ranks
    whole = Function(lambda y: DTensor.from_local(y, meshes[0], [Replicate()]))
    fails([whole, Layer()], "stage 0 returned a DTensor of shape (2, 3, 8) as 'x', expected a plain tensor; give x.to")
    fails([Function(lambda y: {"x": None}), Layer()], "stage 0 returned a NoneType as 'x', expected a plain tensor")
    fails([Function(lambda y: y.to_sparse()), Layer()], "torch.sparse_coo on cpu, as 'x', expected a dense tensor")
    fails([Layer(), Function(lambda y: y.detach())], "the loss depends on no parameter")
    fails(
        [Layer(), Layer()], "loss_fn returned torch.complex64", loss_fn=lambda y, t: (y - t).sum().to(torch.complex64)
    )
    fails([Layer(), Layer()], "loss_fn returned a float", loss_fn=lambda y, t: loss_fn(y, t).item())
    # A conjugate is only a flag on the memory of its tensor.
    conjugate = lambda: Function(lambda y: torch.view_as_complex(y.unflatten(-1, (-1, 2))).conj())  # noqa: E731
    compare(seeded(conjugate, Real))


class Real(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()).flatten(-2) * self.weight


def test_what_stages_return() -> None:
    run_ranks(return_things, 2, timeout=120.0)


# Tensors that somebody writes to ------------------------------------------------------------------------------


class Reusing(nn.Module):
    """Returns the same memory for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = Layer(), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.memory.numel() == 0:
            self.memory = torch.empty_like(x)
        self.memory.detach_().copy_(self.layer(x))
        return self.memory


class Writing(nn.Module):
    """Writes to its input where nothing is recorded."""

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2.0)
        return x * 1.0 + sum(others.values())


class Two(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x * 1.0, "skip": x * 3.0}


class Sum(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


def write_things() -> None:
    for call in ("step", "eval_step"):
        fails([Reusing(), Layer()], "was written to while other stages were to read it", call, "gpipe")
    # Four stages on two ranks: stage 1 writes to what comes once for it and for stage 3.
    graph = StageGraph(4, (Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(0, 1, "skip"), Edge(0, 3, "skip")))

    class Skips(nn.Module):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            skip.mul_(2.0)
            return x + skip

    modules = [Two(), Skips(), Layer(), Sum()]
    fails(modules, "'skip' of stage 0 was written to", "eval_step", "interleaved-1f1b", edges=graph)
    x, target = make_batch(COUNT)
    with make_pipe([Layer(), Writing()]) as pipe:
        found = pipe.eval_step(x, target)
        assert len(found.outputs) == (COUNT if pipe.has_last_stage else 0)


def test_tensors_that_are_written_to() -> None:
    run_ranks(write_things, 2, timeout=120.0)


class Keeping(nn.Module):
    """Keeps all that it is given, in every way in which memory can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = Layer(), []

    def forward(self, x: Tensor) -> Tensor:
        way = len(self.kept) % 4
        seen = (x.untyped_storage(), x.detach()[1:], x.detach().numpy(), x.detach().__dlpack__())[way]
        self.kept.append((seen, x.detach().clone(), way))
        return self.layer(x)


def keep_inputs() -> None:
    """What a stage was given is there as it was, steps later; so are outputs."""
    for name in ("1f1b", "gpipe"):
        torch.manual_seed(0)
        modules = [Keeping(), Keeping()]
        outputs: list[tuple[Tensor, Tensor]] = []
        with make_pipe(modules, name) as pipe:
            for step in range(4):
                x, target = make_batch(COUNT, seed=step)
                pipe.step(x, target)
                outputs += [(y, y.clone()) for y in pipe.eval_step(x, target).outputs]
        assert all(torch.equal(y, was) for y, was in outputs)
        (stage,) = pipe.stages
        for seen, was, way in modules[stage].kept:
            if way == 0:
                now = torch.empty(0).set_(seen)[: was.numel()]
                assert stage == 0 or torch.equal(now.reshape(was.shape), was)
            elif way == 1:
                assert torch.equal(seen, was[1:])
            else:
                now = torch.from_numpy(seen) if way == 2 else torch.from_dlpack(seen)
                assert torch.equal(now, was), way


def test_inputs_and_outputs_that_are_kept() -> None:
    run_ranks(keep_inputs, 2)
