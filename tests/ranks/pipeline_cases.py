"""Small models in stages, and what tests compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from weft.pipeline import Edge, Schedule, StageGraph
from weft.pipeline.run.api import Pipeline
from weft.reference import step_reference

WIDTH = 8
LONG = 60.0
"""A deadline that only a hang reaches."""


class Layer(nn.Module):
    """A stage with weights of every kind: linear, norm, a plain one that is used twice, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.dropout = nn.Parameter(torch.rand(WIDTH)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.up(self.norm(x) * self.scale)))
        return x + self.down(hidden) * self.scale


class Node(nn.Module):
    """A stage of a graph: mixes all that comes in, and gives each of `names` something else."""

    def __init__(self, names: Sequence[str], inputs: int) -> None:
        super().__init__()
        self.names, self.mix = list(names), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(inputs))
        self.layer = Layer()

    def forward(self, *args: Tensor, **tensors: Tensor) -> Any:
        floats = [x for x in (*args, *(tensors[name] for name in sorted(tensors))) if x.is_floating_point()]
        x = self.layer(sum(mix(part) for mix, part in zip(self.mix, floats, strict=True)))
        found = {name: x if name == "x" else x * (i + 2) for i, name in enumerate(self.names)}
        if "mask" in found:
            found["mask"] = x > 0
        if "mask" in tensors and x.shape == tensors["mask"].shape:
            found = {name: y * tensors["mask"] if y.is_floating_point() else y for name, y in found.items()}
        return found if self.names else x


def make_nodes(graph: StageGraph, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = []
    for stage in range(graph.stages):
        inputs = sum(edge.tensor != "mask" for edge in graph.into(stage)) or 1
        made.append(Node(sorted({edge.tensor for edge in graph.out_of(stage)}), inputs))
    return made


# Four stages with long skips, one tensor for two users, an integer tensor, and several tensors on one edge.
UNET = StageGraph(
    4,
    (
        Edge(0, 1),
        Edge(1, 2),
        Edge(2, 3),
        Edge(0, 3, "skip0"),
        Edge(0, 2, "skip0"),
        Edge(1, 3, "skip1"),
        Edge(0, 1, "mask", gradient=False),
        Edge(0, 3, "mask", gradient=False),
    ),
)


def make_layers(count: int, *, dropout: float = 0.0, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Layer(dropout) for _ in range(count)]


def make_batch(microbatches: int, *, rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(rows * microbatches, 3, WIDTH, generator=generator) for _ in range(2))
    return x, target


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def is_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, exact: bool = True) -> bool:
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[k], b[k]) if exact else torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-6) for k in a)


def check_step(
    schedule: Schedule,
    mine: list[nn.Module],
    alone: list[nn.Module],
    batch: Any,
    targets: Any,
    *,
    graph: StageGraph | None = None,
    exact: bool = True,
    steps: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Some steps in the pipeline and in one process, on this rank: losses, gradients, peak and evaluation agree.

    Ranks that the schedule does not need have no stage, and take part in making the pipeline only.
    """
    count, place = schedule.microbatches, dist.get_rank()
    meshes = options.pop("meshes", [schedule.rank_of(stage) for stage in range(schedule.stages)])
    seed = options.get("seed")
    with Pipeline(mine, meshes, schedule, edges=graph, loss_fn=loss_fn, timeout=LONG, **options) as pipe:
        for step in range(steps):
            losses = pipe.step(batch, targets)
            expected = step_reference(
                alone, batch, targets, microbatches=count, loss_fn=loss_fn, graph=graph, seed=seed, step=step
            )
            if pipe.has_last_stage:
                agree = torch.equal(losses, expected) if exact else torch.allclose(losses, expected, rtol=1e-4)
                assert agree, (schedule.name, losses, expected)
            for stage in pipe.stages:
                found = (gradients(mine[stage]), gradients(alone[stage]))
                assert is_same(*found, exact=exact), (schedule.name, place, stage, step)
            for stage, peak in pipe.peak_activations.items():
                assert peak == schedule.peak_activations[stage], (schedule.name, stage)
        evaluation = pipe.eval_step(batch, targets)
        if pipe.has_last_stage:
            assert len(evaluation.outputs) == count
            if seed is None and exact:
                assert torch.equal(evaluation.losses, expected), schedule.name
        return {"buffer_bytes": pipe.buffer_bytes, "stages": sorted(pipe.stages)}
