"""Bytes on each GPU: weights and what training keeps beside them, activations, caches."""

from __future__ import annotations

from weft.pipeline import Schedule
from weft.scale.gpus import ITEM_BYTES
from weft.scale.job import Activations, Batch, Job, Mode, Promise


def stage_parameters(job: Job, stage: int) -> float:
    """Weights of a stage on one of its GPUs; the first and the last also have a share of the vocabulary's."""
    ends = (stage == 0) + (stage == job.stages - 1 and job.stages > 1)
    return (job.layers[stage] * job.model.layer_parameters + ends * job.model.vocabulary * job.model.hidden) / job.tp


def weight_bytes(job: Job, parameters: float) -> float:
    """With float32 gradients and Adam's three float32 values, which the replicas share, in training."""
    item = ITEM_BYTES[job.dtype]
    return parameters * (item + 4 + 12 / job.dp) if job.mode is Mode.TRAIN else parameters * item


def layer_activations(job: Job, tokens: int) -> float:
    """What a layer keeps of a micro-batch for its backward; inputs of gathering matmuls are kept gathered."""
    model = job.model
    share = 1 / job.tp if job.activations is Activations.SHARDED else 1.0
    cut = (model.qkv + model.hidden + model.up + model.ffn) / job.tp
    return tokens * ITEM_BYTES[job.dtype] * (2 * model.hidden * (1 + share) + cut)


def peak_bytes(job: Job, schedule: Schedule, batch: Batch, promises: frozenset[Promise]) -> tuple[float, ...]:
    """The most that lies on a GPU of each pipeline rank."""
    return tuple(_rank_bytes(job, schedule, rank, batch, promises) for rank in range(len(schedule.ranks)))


def _rank_bytes(job: Job, schedule: Schedule, rank: int, batch: Batch, promises: frozenset[Promise]) -> float:
    stages, item = schedule.stages_of(rank), ITEM_BYTES[job.dtype]
    total = weight_bytes(job, sum(stage_parameters(job, stage) for stage in stages))
    layers = max(job.layers[stage] for stage in stages)
    if job.mode is Mode.TRAIN:
        return total + schedule.peak_by_rank[rank] * layers * layer_activations(job, batch.tokens)
    held = sum(job.layers[stage] for stage in stages) * job.context(promises) * job.microbatches
    caches = held * 2 * job.model.kv_heads * job.model.head_width * item / job.tp
    return total + caches + layer_activations(job, batch.tokens)
