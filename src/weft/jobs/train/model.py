"""The model of a run on its ranks: one `weft.parallelize`, or a stage of a `weft.Pipeline`, and copies around both.

Copies share parameters and moments over the data-parallel axis by torch's FSDP2, whose messages show in a trace; or
each has all of them, so that the others can go on without it (`replicas`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from weft.errors import PeerLost
from weft.jobs.train.job import MicroBatch, TrainJob
from weft.parallel import parallelize
from weft.parallel.files.load import load_sharded
from weft.parallel.stages import model_stage, stage_layouts
from weft.pipeline import Pipeline
from weft.pipeline.schedules.generators import schedule
from weft.timeline import record

AXES = ("pp", "dp", "tp")


class TrainModel(Protocol):
    """This rank's part of the model, as a context: leaving it ends threads and connections, on all ranks."""

    module: nn.Module

    def step(self, micros: Sequence[MicroBatch], total: int) -> float:
        """Gradients of the mean loss over the `total` targets of all copies; this copy's part of that mean.

        0 on ranks without the last stage.
        """

    def __enter__(self) -> TrainModel: ...

    def __exit__(self, *error: Any) -> None: ...


def build(job: TrainJob, mesh: DeviceMesh) -> TrainModel:
    """The model of a run; `mesh` has the axes pp, dp and tp. Collective."""
    return StageModel(job, mesh) if job.pp > 1 else WholeModel(job, mesh)


def make_mesh(shape: tuple[int, int, int], *, timeout: float) -> DeviceMesh:
    """All ranks as stages x copies x ranks of a layer; neighbours share a layer, as they talk the most. Collective.

    `init_device_mesh` would give the groups of its axes the default group's timeout, half an hour by default.
    """
    ranks = torch.arange(dist.get_world_size()).reshape(shape)
    own: list[Any] = []
    for axis, size in enumerate(shape):
        for row in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = dist.new_group(row, timeout=timedelta(seconds=timeout))
            if dist.get_rank() in row:
                own.append(group)
    return DeviceMesh.from_group(own, "cpu", mesh=ranks, mesh_dim_names=AXES)


class WholeModel:
    """A model that is not cut into stages."""

    def __init__(self, job: TrainJob, mesh: DeviceMesh) -> None:
        self.module: nn.Module = parallelize(_llama(job), mesh["tp"], overlap=job.overlap)
        # FSDP divides gradients by the number of copies; where it is not used, they are summed.
        self._copies = 1 if job.on_failure == "shrink" else job.copies
        _start(self.module, job, mesh)

    def step(self, micros: Sequence[MicroBatch], total: int) -> float:
        found = 0.0
        for i, micro in enumerate(micros):
            sync_gradients(self.module, i == len(micros) - 1)
            items = torch.tensor(total / self._copies)
            loss: Tensor = self.module(micro.batch, labels=micro.labels, num_items_in_batch=items).loss
            loss.backward()  # type: ignore[no-untyped-call]
            found += loss.item()
        return found / self._copies

    def __enter__(self) -> WholeModel:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing to end."""


class StageModel:
    """A stage of a model, and the pipeline of its copy."""

    def __init__(self, job: TrainJob, mesh: DeviceMesh) -> None:
        index, copy, _ = mesh.get_coordinate() or (0, 0, 0)
        count = job.microbatches // job.copies
        self.module: nn.Module = model_stage(_llama(job), index, job.pp, mesh["tp"])
        self._copies = job.copies
        _start(self.module, job, mesh)
        if job.copies > 1:
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
        items = total / self._copies / len(micros)  # the pipeline takes the mean over micro-batches
        losses = self._pipe.step(
            [micro.batch.values for micro in micros],
            [items] * len(micros),
            cu_seqlens=[micro.batch.cu_seqlens for micro in micros],
            next_ids=[micro.targets for micro in micros],
        )
        return losses.mean().item() / self._copies if losses.numel() else 0.0

    def __enter__(self) -> StageModel:
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the pipeline's threads and connections: when all ranks are here, or on all where one failed."""
        self._pipe.__exit__(*error)


def _llama(job: TrainJob) -> Any:
    import transformers

    kind: Any = transformers.LlamaForCausalLM
    if job.init:
        with torch.device("meta"):
            return kind(job.config())
    torch.manual_seed(job.seed)  # the same weights on all ranks, however the model is cut
    return kind(job.config())


def _start(module: nn.Module, job: TrainJob, mesh: DeviceMesh) -> None:
    """Weights from files where the job says so, then the copies."""
    module.train()
    if job.init:
        load_sharded(module, job.init, timeout=job.timeout)
    if job.copies > 1 and job.on_failure != "shrink":
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


def copy_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shares parameters and moments among the ranks of `mesh`; gradients become means over them. In place.

    Parameters may be DTensors on another axis of the same mesh. They are whole from the first forward pass of a step
    to its last backward pass: a pipeline has several micro-batches under way, and they must find what they left.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    # By what they do, not by descent: FSDP's own classes are private.
    module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_Scatter())  # type: ignore[arg-type]


def sync_gradients(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass exchanges gradients; the others of a step only add theirs up."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
        module.set_is_last_backward(wanted)
        module.set_reshard_after_backward(wanted)


def sync_in_last(module: nn.Module, backwards: int) -> None:
    """Exchanges gradients in the last of every `backwards` backward passes: for a stage that a pipeline runs."""
    done = 0

    def begins(_: Tensor) -> None:
        nonlocal done
        done += 1
        sync_gradients(module, done % backwards == 0)

    def watch(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begins)  # type: ignore[no-untyped-call]

    module.register_forward_hook(watch)


@contextmanager
def _named(what: str, group: dist.ProcessGroup, nbytes: int) -> Iterator[None]:
    """Shows a message in the trace; an error says which ranks it was with, which gloo's own does not."""
    try:
        with record.span("recv", f"fsdp: {what}", lane="comm", bytes=nbytes):
            yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        raise PeerLost(
            f"{what} of the copies on ranks {', '.join(map(str, ranks))} (FSDP): the connection failed: {reason}. A "
            "rank died, or it gave up and its own error says why"
        ) from error


class _Comm:
    """What FSDP asks of a collective of its own: memory, which is torch's here as it is without one."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with _named("parameters", group, output_tensor.nbytes):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with _named("gradients", group, input_tensor.nbytes):
            return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
