"""Seconds of a stage's layers on one GPU, from the predictions of their matmuls.

    sharded       forward                                      dgrad, then wgrad
    qkv, up       all_gather_matmul      [t, h] x [n, h]^T     matmul_reduce_scatter, which wgrad follows
    out, down     matmul_reduce_scatter  [t, k] x [h, k]^T     all_gather_matmul
    replicated: a plain matmul instead of a gathering one, matmul_all_reduce instead of matmul_reduce_scatter

Without overlap the reduction of a dgrad runs behind the wgrad, as in Megatron-LM; all else is in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weft.overlap.plan import Op
from weft.scale.gpus import ATTENTION_BACKWARD, ATTENTION_FORWARD, ITEM_BYTES
from weft.scale.job import Activations, Batch, Job, Mode
from weft.scale.ops import predict_op
from weft.scale.roofline import copy_seconds, matmul_seconds


class Wires(Enum):
    """How communication inside a layer counts: behind the matmuls, after them, or not at all."""

    OVERLAPPED = "overlapped"
    SEQUENTIAL = "sequential"
    FREE = "free"


@dataclass(frozen=True)
class Seconds:
    """Of a forward, a backward, and its parts where the schedule splits it."""

    forward: float = 0.0
    backward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def times(self, count: int) -> Seconds:
        """The same, one after the other."""
        return Seconds(
            self.forward * count, self.backward * count, self.input_gradient * count, self.weight_gradient * count
        )


def stage_seconds(job: Job, stage: int, batch: Batch, wires: Wires) -> Seconds:
    """One micro-batch on one stage; the last one also has the logits."""
    found = layer_seconds(job, batch, wires).times(job.layers[stage])
    if stage == job.stages - 1:
        found += _column(job, job.predicted_tokens(batch), job.model.vocabulary, wires)
    return found


def layer_seconds(job: Job, batch: Batch, wires: Wires) -> Seconds:
    """One micro-batch through one layer, on each of its GPUs."""
    model, t = job.model, batch.tokens
    return (
        _column(job, t, model.qkv, wires)
        + _attention(job, batch)
        + _row(job, t, model.hidden, wires)
        + _column(job, t, model.up, wires)
        + _row(job, t, model.ffn, wires)
        + _between(job, t)
    )


def _predicted(job: Job, op: Op, wires: Wires, m: int, n: int, k: int, tail: float = 0.0) -> float:
    found = predict_op(job.gpu, op, m, n, k, tp=job.tp, dtype=job.dtype, tail=tail)
    by_wires = {Wires.OVERLAPPED: found.overlapped, Wires.SEQUENTIAL: found.sequential, Wires.FREE: found.matmul}
    return by_wires[wires]


def _plain(job: Job, m: int, n: int, k: int) -> float:
    return matmul_seconds(job.gpu, m, n, k, dtype=job.dtype)


def _column(job: Job, t: int, n: int, wires: Wires) -> Seconds:
    """A weight [n, h] whose rows are cut: the input is gathered, and the input's gradient summed."""
    h, own = job.model.hidden, -(-n // job.tp)
    sharded = job.activations is Activations.SHARDED
    forward = _predicted(job, Op.ALL_GATHER, wires, t, n, h) if sharded else _plain(job, t, own, h)
    op = Op.REDUCE_SCATTER if sharded else Op.ALL_REDUCE
    weight = _plain(job, own, h, t)
    both = _predicted(job, op, wires, t, h, n, tail=weight)
    return Seconds(forward, both, _predicted(job, op, wires, t, h, n), weight)


def _row(job: Job, t: int, k: int, wires: Wires) -> Seconds:
    """A weight [h, k] whose columns are cut: the output is summed, and its gradient gathered."""
    h, own = job.model.hidden, -(-k // job.tp)
    sharded = job.activations is Activations.SHARDED
    forward = _predicted(job, Op.REDUCE_SCATTER if sharded else Op.ALL_REDUCE, wires, t, h, k)
    gradient = _predicted(job, Op.ALL_GATHER, wires, t, k, h) if sharded else _plain(job, t, own, h)
    weight = _plain(job, h, own, t)
    return Seconds(forward, gradient + weight, gradient, weight)


def _attention(job: Job, batch: Batch) -> Seconds:
    """Scores and their products with the values, of this GPU's heads; decoding reads the caches."""
    flops = job.model.attention_flops(batch.pairs) / job.tp
    peak = job.gpu.peak_of(job.dtype)
    forward = flops / (peak * ATTENTION_FORWARD)
    if job.mode is Mode.DECODE:
        cached = batch.pairs * 2 * job.model.kv_heads * job.model.head_width * ITEM_BYTES[job.dtype] / job.tp
        forward = max(forward, copy_seconds(job.gpu, cached))
    # Two matmuls forward, five backward: scores are computed again.
    backward = 2.5 * flops / (peak * ATTENTION_BACKWARD)
    return Seconds(forward, backward, backward, 0.0)


def _between(job: Job, t: int) -> Seconds:
    """Two norms with their residuals, four passes each over this GPU's rows, and the activation."""
    model, item = job.model, ITEM_BYTES[job.dtype]
    rows = -(-t // job.tp) if job.activations is Activations.SHARDED else t
    norms = 8 * rows * model.hidden * item
    activation = t * (model.up + model.ffn) / job.tp * item
    forward = copy_seconds(job.gpu, norms) + copy_seconds(job.gpu, activation)
    return Seconds(forward, 2 * forward, 2 * forward, 0.0)
