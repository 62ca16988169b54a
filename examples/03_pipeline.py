"""A GPT in stages, tensor-parallel inside, trained on Python's own source with the losses of one process.

    python examples/03_pipeline.py                              2 stages x 2 ranks, eager-1F1B, cards of 1 Gbit/s
    python examples/03_pipeline.py --stages 4 --tensor 1 --schedule zero-bubble
    python examples/03_pipeline.py --loopback                   without network namespaces
    python examples/03_pipeline.py --checkpoint DIR             saves half-way, and resumes there to the same losses
    python examples/03_pipeline.py --size 2.6b --stages 8       a size of the paper, for machines that have the memory

Each stage is on a host of the lab. Between stages and inside them activations are cut along the sequence. The
trace of the last step is drawn under the simulation's.
"""

from __future__ import annotations

import argparse
import pydoc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Shard

import weft
from weft.lab import Cluster, Rank
from weft.pipeline import Costs
from weft.pipeline.models import GPTConfig, gpt_stage, loss_of_tokens, parallelize_gpt
from weft.reference import step_reference
from weft.report.drawing import curve_svg, curve_text
from weft.timeline import Timeline


@dataclass(frozen=True)
class Job:
    size: str
    stages: int
    tensor: int
    schedule: str
    microbatches: int
    steps: int
    first_step: int = 0
    save_after: int = 0
    directory: str = ""


def batch_of(config: GPTConfig, job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's pydoc module, two sequences for each micro-batch, the same on every rank."""
    text = torch.frombuffer(bytearray(Path(pydoc.__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - config.context - 1, (2 * job.microbatches,), generator=generator)
    rows = torch.stack([text[start : start + config.context + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def losses_of_one_process(job: Job) -> list[float]:
    config = GPTConfig.named(job.size)
    stages = [gpt_stage(config, i, job.stages) for i in range(job.stages)]
    optimiser = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-3)
    losses = []
    for step in range(job.steps):
        optimiser.zero_grad()
        batch = batch_of(config, job, step)
        found = step_reference(stages, *batch, microbatches=job.microbatches, loss_fn=loss_of_tokens)
        optimiser.step()
        losses.append(found.mean().item())
    return losses


def train(rank: Rank, job: Job) -> tuple[list[float], Timeline]:
    """What every rank runs: its own stage, and the whole of the pipeline's schedule."""
    config = GPTConfig.named(job.size)
    meshes = torch.arange(job.stages * job.tensor).reshape(job.stages, job.tensor)
    stage = rank.rank // job.tensor
    tensor_mesh = dist.init_device_mesh("cpu", (job.stages, job.tensor), mesh_dim_names=("stage", "tensor"))["tensor"]
    module = gpt_stage(config, stage, job.stages)
    layouts: dict[int, Any] = {}
    if job.tensor > 1:
        parallelize_gpt(module, tensor_mesh)
        layouts = {i: [Shard(1)] for i in range(job.stages)}
    schedule = weft.schedule(job.schedule, stages=job.stages, microbatches=job.microbatches)
    pipe = weft.Pipeline(
        {stage: module},
        meshes.tolist(),
        schedule,
        input_layouts={i: p for i, p in layouts.items() if i > 0},
        output_layouts={i: p for i, p in layouts.items() if i < job.stages - 1},
        loss_fn=loss_of_tokens,
        timeout=60.0,
    )
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if job.first_step:
        load(job, module, optimiser, pipe)
    losses = []
    for step in range(job.first_step, job.steps):
        optimiser.zero_grad()
        with weft.trace() as trace:
            found = pipe.step(*batch_of(config, job, step))
        optimiser.step()
        losses.append(found.mean().item() if pipe.has_last_stage else 0.0)
        if step + 1 == job.save_after:
            save(job, module, optimiser, pipe)
    timeline = trace.gather(group=rank.group)
    pipe.close()
    return losses, timeline


def state_of(module: torch.nn.Module, optimiser: torch.optim.Optimizer, pipe: weft.Pipeline) -> dict[str, Any]:
    # Flat: the optimiser's entries are then named by parameter as well, so that those of the stages differ.
    weights, moments = get_state_dict(module, optimiser, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": weights, "optimiser": moments, "pipeline": pipe.state_dict()}


def save(job: Job, module: torch.nn.Module, optimiser: torch.optim.Optimizer, pipe: weft.Pipeline) -> None:
    """torch's own checkpoint: every rank writes what it has; names of parameters are those of the whole model."""
    dcp.save(state_of(module, optimiser, pipe), checkpoint_id=job.directory)


def load(job: Job, module: torch.nn.Module, optimiser: torch.optim.Optimizer, pipe: weft.Pipeline) -> None:
    state = state_of(module, optimiser, pipe)
    dcp.load(state, checkpoint_id=job.directory)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = state["model"], state["optimiser"]
    set_state_dict(module, optimiser, model_state_dict=weights, optim_state_dict=moments, options=flat)
    pipe.load_state_dict(state["pipeline"])


def measured_costs(timeline: Timeline, stages: int, tensor: int) -> Costs:
    """What the simulation needs, from a trace: how long the actions took in the middle."""
    import statistics

    def seconds(stage: int, kinds: str) -> float:
        found = [
            e.seconds
            for e in timeline.events
            if e.lane == f"rank {stage * tensor}/compute" and e.kind == "compute" and e.name[len(str(stage))] in kinds
        ]
        return statistics.median(found) if found else 1e-6

    forward = tuple(seconds(s, "F") for s in range(stages))
    first, second = (tuple(seconds(s, kind) for s in range(stages)) for kind in ("I", "W"))
    backward = tuple(seconds(s, "B") for s in range(stages))
    moves = [e.seconds for e in timeline.events if e.kind == "send" and "->" in e.name]
    return Costs(forward, backward, first, second, statistics.median(moves) if moves else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help="tiny, small, 1.3b or 2.6b")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2, help="ranks of each stage")
    parser.add_argument("--schedule", default="eager-1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--loopback", action="store_true", help="no namespaces and no limit on the cards")
    parser.add_argument("--checkpoint", default="", metavar="DIR")
    parser.add_argument("--plot", default="", metavar="FILE.svg")
    given = parser.parse_args()
    job = Job(given.size, given.stages, given.tensor, given.schedule, given.microbatches, given.steps)
    if given.checkpoint:
        job = Job(**{**vars(job), "save_after": job.steps // 2, "directory": given.checkpoint})

    alone = losses_of_one_process(job)
    with Cluster(hosts=job.stages, devices=job.tensor, gbps=None if given.loopback else given.gbps) as cluster:
        print(cluster)
        results = cluster.run(train, job, timeout=1800.0)
        if given.checkpoint:
            again = cluster.run(
                train, Job(**{**vars(job), "first_step": job.save_after, "save_after": 0}), timeout=1800.0
            )
    together, timeline = results[-1]
    print("step  one process  pipeline")
    for step in sorted({0, 1, job.steps // 2, job.steps - 1}):
        print(f"{step:4d}  {alone[step]:11.6f}  {together[step]:8.6f}")
    print(curve_text(together))
    schedule = weft.schedule(job.schedule, stages=job.stages, microbatches=job.microbatches)
    simulation = schedule.simulate(measured_costs(timeline, job.stages, job.tensor))
    print(f"\n{simulation}\n{simulation.timeline.text(width=100)}\n\nmeasured\n{timeline.text(width=100)}")
    if given.plot:
        Path(given.plot).write_text(curve_svg({"pipeline": together, "one process": alone}, title="GPT: loss"))
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=1e-3), "the losses are the same"
    if given.checkpoint:
        resumed = again[-1][0]
        assert resumed == together[job.save_after :], "resumed to the same losses, bit by bit"
        print(f"resumed after step {job.save_after} to the same losses")


if __name__ == "__main__":
    main()
