"""What resharding and the pipeline bring to a training step of two stages, each of the two switched off in turn.

A stage is a host of two ranks, and what goes from stage to stage is replicated over them, as between tensor-parallel
stages. Stages sleep for the time of their compute beside a small real matmul, as four ranks do not find a core each;
tensors travel for real.

weft              eager-1F1B, transfers beside computing, each tensor once over the wire and on inside the host
weft_no_reshard   the same schedule; each rank is sent a part, and an all-gather inside the host makes it whole
weft_no_pipeline  1F1B, which waits for every transfer where it is due
neither           1F1B that waits, and every rank is sent all: what a loop of send and recv does
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from weft.bench.harness import Case, Measurement
from weft.bench.pipeline_cases import PipelineCase
from weft.bench.pipeline_lab import System, emulated_sizes
from weft.bench.pipeline_models import Model, build
from weft.bench.ranks import measure_ranks
from weft.cluster import Cluster as Wires
from weft.lab import Cluster, Rank
from weft.layout import Mesh
from weft.pipeline import Pipeline, Transfers, schedule

SYSTEMS = {
    "weft": System("eager-1f1b"),
    "weft_no_reshard": System("eager-1f1b", "all_gather"),
    "weft_no_pipeline": System("1f1b", transfers=Transfers.SYNCHRONOUS),
    "neither": System("1f1b", "send_recv", Transfers.SYNCHRONOUS),
}
CASE = PipelineCase("gpt", stages=2, devices=2, share=0.5, microbatches=8, emulated=True)
_TIMEOUT = 120.0
_RUN_TIMEOUT = 900.0
Step = Callable[[], Tensor]


def promise_row(rounds: int, case: PipelineCase = CASE) -> dict[str, object]:
    """The row of the report, measured in a lab of its own."""
    sizes = emulated_sizes(case)
    gbps = sizes.edge_bytes * 8e-9 / (case.share * sizes.forward)
    with Cluster(case.stages, case.devices, gbps) as lab:
        measured = lab.run(_measure, case, gbps, rounds, timeout=_RUN_TIMEOUT)[0]
    found = {f"without_{name.removeprefix('weft_no_')}": measured.ratio(name, "weft") for name in list(SYSTEMS)[1:-1]}
    return {
        **measured.row(), "kind": "promises", "hosts": case.stages, "devices": case.devices, "gbps": gbps,
        "padded_ms": measured.median("neither") * 1e3, "vs_padded": measured.ratio("neither", "weft"), **found,
    }  # fmt: skip


def _measure(rank: Rank, case: PipelineCase, gbps: float, rounds: int) -> Measurement:
    model = build(case)
    with ExitStack() as stack:
        steps: dict[str, Step] = {}
        for name, system in SYSTEMS.items():
            pipe = stack.enter_context(_pipeline(case, model, system, rank, gbps))
            steps[name] = _step(pipe, model, rank)
        losses = {name: step() for name, step in steps.items()}
        for name, found in losses.items():
            if not torch.allclose(found, losses["neither"], rtol=1e-4):
                raise AssertionError(f"losses of {name} are {found.tolist()}, of 1F1B {losses['neither'].tolist()}")
        what = f"pipeline of {case.stages} stages x {case.devices}, emulated, transfers {case.share:g} of a forward"
        return measure_ranks(Case(what, steps), rank, rounds, warmup=0)


def _pipeline(case: PipelineCase, model: Model, system: System, rank: Rank, gbps: float) -> Pipeline:
    meshes = [Mesh.grid(1, case.devices, first_rank=s * case.devices, first_host=s) for s in range(case.stages)]
    return Pipeline(
        {rank.host: model.stages[rank.host]}, meshes,
        schedule(system.schedule, stages=case.stages, microbatches=case.microbatches), edges=case.graph,
        loss_fn=model.loss_fn, group=rank.group, timeout=_TIMEOUT, transfers=system.transfers,
        strategy=system.strategy, cluster=Wires.uniform(case.stages, gbps=gbps),
    )  # fmt: skip


def _step(pipe: Pipeline, model: Model, rank: Rank) -> Step:
    def step() -> Tensor:
        model.stages[rank.host].zero_grad(set_to_none=True)
        return pipe.step(model.batch, model.targets)

    return step
