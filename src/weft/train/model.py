"""The model of a run on its ranks: one weft.parallelize, or stages in a weft.Pipeline; copies by FSDP2 around both."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.parallel import parallelize
from weft.parallel.files.load import load_sharded
from weft.parallel.stages import llama_stage, stage_layouts
from weft.pipeline import Pipeline
from weft.pipeline.schedules import schedule
from weft.train.copies import copy_over, sync_gradients, sync_in_last
from weft.train.job import Job
from weft.train.text import MicroBatch


class Whole:
    """A model that is not cut into stages."""

    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        self.module: nn.Module = parallelize(_llama(job), mesh["tp"], overlap=job.overlap)
        self._copies = job.dp
        _start(self.module, job, mesh)

    def step(self, micros: Sequence[MicroBatch], total: int) -> float:
        """Gradients of the mean loss over the `total` targets of all copies; this copy's part of that mean."""
        found = 0.0
        for i, micro in enumerate(micros):
            sync_gradients(self.module, i == len(micros) - 1)
            # FSDP divides by the number of copies.
            items = torch.tensor(total / self._copies)
            loss: Tensor = self.module(micro.batch, labels=micro.labels, num_items_in_batch=items).loss
            loss.backward()  # type: ignore[no-untyped-call]
            found += loss.item()
        return found / self._copies

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


class Staged:
    """A stage of a model, and the pipeline of its copy."""

    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        index, copy, _ = mesh.get_coordinate() or (0, 0, 0)
        count = job.microbatches // job.dp
        self.module: nn.Module = llama_stage(_llama(job), index, job.pp, mesh["tp"])
        self._copies = job.dp
        _start(self.module, job, mesh)
        if job.dp > 1:
            sync_in_last(self.module, count)
        self._pipe = Pipeline(
            {index: self.module},
            mesh.mesh[:, copy].tolist(),
            schedule(job.schedule, stages=job.pp, microbatches=count),
            loss_fn=lambda summed, items: summed / items,
            group=_group_of_copy(mesh, copy, job.timeout),
            timeout=job.timeout,
            **stage_layouts(job.pp),
        )

    def step(self, micros: Sequence[MicroBatch], total: int) -> float:
        """As `Whole.step`; 0 on ranks without the last stage."""
        items = total / self._copies / len(micros)  # the pipeline takes the mean over micro-batches
        losses = self._pipe.step(
            [micro.batch.values for micro in micros],
            [items] * len(micros),
            cu_seqlens=[micro.batch.cu_seqlens for micro in micros],
            next_ids=[micro.targets for micro in micros],
        )
        return losses.mean().item() / self._copies if losses.numel() else 0.0

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the pipeline's threads and connections: when all ranks are here, or on all where one failed."""
        self._pipe.__exit__(*error)


def build(job: Job, mesh: DeviceMesh) -> Whole | Staged:
    """The model of a run; `mesh` has the axes pp, dp and tp. Collective."""
    return Staged(job, mesh) if job.pp > 1 else Whole(job, mesh)


def _llama(job: Job) -> Any:
    import transformers

    kind: Any = transformers.LlamaForCausalLM
    if job.init:
        with torch.device("meta"):
            return kind(job.config())
    torch.manual_seed(job.seed)  # the same weights on all ranks, however the model is cut
    return kind(job.config())


def _start(module: nn.Module, job: Job, mesh: DeviceMesh) -> None:
    """Weights from files where the job says so, then the copies."""
    module.train()
    if job.init:
        load_sharded(module, job.init, timeout=job.timeout)
    if job.dp > 1:
        copy_over(module, mesh["dp"])


def _group_of_copy(mesh: DeviceMesh, copy: int, timeout: float) -> dist.ProcessGroup | None:
    """The ranks of all stages of one copy."""
    if mesh.shape[1] == 1:
        return None
    ranks = sorted(mesh.mesh[:, copy].reshape(-1).tolist())
    group: dist.ProcessGroup | None = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True
    )
    return group
