"""The training loop: data, a step, the optimiser, a checkpoint now and then, and figures of every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import tracing
from weft.comm.tell import tell_all
from weft.parallel.files.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from weft.timeline import Timeline
from weft.train.figures import StepFigures, exposed_seconds
from weft.train.job import Job
from weft.train.mesh import make_mesh
from weft.train.model import Staged, Whole, build
from weft.train.text import Text, documents_of

Report = Callable[[StepFigures], None]


@dataclass(frozen=True)
class Trained:
    """The figures of the steps that this call made, and the timeline of all ranks in the last of them."""

    steps: tuple[StepFigures, ...]
    timeline: Timeline

    @property
    def losses(self) -> list[float]:
        return [figures.loss for figures in self.steps]


def train(job: Job, *, report: Report | None = None) -> Trained:
    """Runs a job on all ranks of the default process group; every rank gets the same figures. Collective.

    `report` is called on each rank after each step. Whatever ends one rank ends all, within the timeout; the last
    checkpoint is whole then, and the same job with `resume=True` goes on to the losses that it would have had.
    """
    job.check(dist.get_world_size())
    text = Text.of(documents_of(job.data), context=job.context, tokens=job.tokens, seed=job.seed)
    mesh = make_mesh((job.pp, job.dp, job.tp), timeout=job.timeout)
    model = build(job, mesh)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=job.lr)
    first = _resume(job, model, optimizer)
    found: list[StepFigures] = []
    last = tracing.Trace()
    for step in range(first, job.steps):
        with tracing.trace(name=f"step {step + 1}") as last:  # noqa: F811  # where there is no step, it stays empty
            found.append(_step(job, mesh, text, model, optimizer, step, last))
        if job.checkpoint and ((step + 1) % job.every == 0 or step + 1 == job.steps):
            save_checkpoint(
                job.checkpoint, step + 1, model.module, optimizer, {"data": _data(job)},
                keep=job.keep, timeout=job.timeout,
            )  # fmt: skip
        if report is not None:
            report(found[-1])
    world: Any = dist.group.WORLD
    timeline = last.gather(group=world)
    model.close()
    return Trained(tuple(found), timeline)


def _step(
    job: Job,
    mesh: DeviceMesh,
    text: Text,
    model: Whole | Staged,
    optimizer: torch.optim.Optimizer,
    step: int,
    trace: tracing.Trace,
) -> StepFigures:
    micros = [text.microbatch(step * job.microbatches + i) for i in range(job.microbatches)]
    total = sum(micro.counted for micro in micros)
    stage, copy, place = mesh.get_coordinate() or (0, 0, 0)
    share = job.microbatches // job.dp
    start = time.perf_counter()
    part = model.step(micros[copy * share : (copy + 1) * share], total)
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - start
    tells = stage == job.pp - 1 and place == 0  # the ranks of a stage have the same loss
    mine = [part if tells else 0.0, seconds, exposed_seconds(trace.timeline.events)]
    said = tell_all("training step", mine, group=None, timeout=job.timeout)
    loss, exposed = sum(row[0] for row in said), sum(row[2] for row in said) / len(said)
    return StepFigures(step + 1, loss, job.microbatches * job.tokens, max(row[1] for row in said), exposed)


def _resume(job: Job, model: Whole | Staged, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint if the job says so; after how many steps to go on."""
    if not job.resume or not has_checkpoint(job.checkpoint):
        return 0
    found = load_checkpoint(job.checkpoint, model.module, optimizer, timeout=job.timeout)
    if found.extra.get("data") != _data(job):
        raise ValueError(
            f"{found.path} was trained on {found.extra.get('data')}, this job has {_data(job)}; expected the same, or "
            "the run would see other data than it would have; use another checkpoint directory for another run"
        )
    return found.step


def _data(job: Job) -> dict[str, Any]:
    """What the data of a step follow from."""
    names = ("model", "seed", "tokens", "microbatches", "context")
    return {**{name: getattr(job, name) for name in names}, "data": list(job.data)}
