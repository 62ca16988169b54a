"""A whole step on a declared cluster: layers, edges, pipeline, gradients and memory put together.

Layers take the seconds of their matmuls (`ops`), edges those of a reshard plan on the declared cards:

    sharded       forward                                      dgrad, then wgrad
    qkv, up       all_gather_matmul      [t, h] x [n, h]^T     matmul_reduce_scatter, which wgrad follows
    out, down     matmul_reduce_scatter  [t, k] x [h, k]^T     all_gather_matmul
    replicated: a plain matmul instead of a gathering one, matmul_all_reduce instead of matmul_reduce_scatter

Without overlap the reduction of a dgrad runs behind the wgrad, as in Megatron-LM; all else is in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

import torch

from weft.layout import DeclaredCluster, Layout, Mesh, Replicate, Shard
from weft.overlap.plan import Op
from weft.pipeline import Costs, Edge, Schedule, Simulation, Transfers, chain
from weft.pipeline.schedules.lower import decide
from weft.reshard.planner import plan_reshard
from weft.scale.gpus import ATTENTION_BACKWARD, ATTENTION_FORWARD, ITEM_BYTES, copy_seconds, matmul_seconds
from weft.scale.job import ALL_PROMISES, Activations, Batch, Mode, Promise, ScaleJob
from weft.scale.ops import predict_op
from weft.timeline import Event, Timeline

ALL = "all four"
NONE = "none of them"
# A message between hosts: one step of NCCL's plain protocol over a network.
_NETWORK_LATENCY = 9.6e-6


@dataclass(frozen=True)
class Step:
    """What a step is predicted to do.

    seconds:  until the last replica has its weights; of inference, until the last micro-batch is through
    exposed:  seconds that would not be there if communication took no time
    bubble:   the part of the pipeline's time in which a rank does not compute
    memory:   bytes on the fullest GPU;  fits: whether it has them
    mfu:      flops that the real tokens need, of what all GPUs could do by their data sheet
    tokens_per_second: real tokens of all replicas; in decoding, new ones
    """

    job: ScaleJob
    promises: frozenset[Promise]
    seconds: float
    exposed: float
    bubble: float
    memory: float
    fits: bool
    mfu: float
    tokens_per_second: float
    pipeline: Simulation = field(repr=False, compare=False)

    @property
    def timeline(self) -> Timeline:
        """The pipeline's lanes, and the replicas' gradients after them."""
        ran, end = self.pipeline, self.pipeline.seconds
        events = list(ran.timeline.events)
        if self.seconds > end:
            lanes = (f"rank {rank}/out" for rank in range(len(ran.schedule.ranks)))
            events += [Event(lane, "send", "gradients of the replicas", end, self.seconds) for lane in lanes]
        return Timeline(events, name=f"{self.job.model.name}, {ran.schedule.name}, predicted")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        names = ("seconds", "exposed", "bubble", "memory", "fits", "mfu", "tokens_per_second")
        return {"promises": sorted(p.value for p in self.promises), **{name: getattr(self, name) for name in names}}


def simulate_step(job: ScaleJob, promises: frozenset[Promise] = ALL_PROMISES) -> Step:
    """The step with these promises kept.

    >>> from weft.scale import find_gpu, find_model
    >>> job = ScaleJob(find_model("gpt3-13b"), find_gpu("A100"), hosts=2, devices=8, tp=8, pp=2, dp=1, microbatches=4)
    >>> simulate_step(job).seconds < simulate_step(job, frozenset()).seconds
    True
    """
    if Promise.PIPELINE not in promises:
        job = replace(job, schedule="1f1b")
    transfers = Transfers.OVERLAPPED if Promise.PIPELINE in promises else Transfers.SYNCHRONOUS
    wires = LayerWires.OVERLAPPED if Promise.OVERLAP in promises else LayerWires.SEQUENTIAL
    schedule, batch, cards = job.made_schedule(), job.batch(promises), cards_of(job)
    edges = edge_seconds(job, batch.tokens, promises)
    ran = _run(_Paper(schedule, _stages(job, batch, wires), tuple(edges.items()), cards), transfers)
    free = _seconds(
        _Paper(schedule, _stages(job, batch, LayerWires.FREE), tuple(dict.fromkeys(edges, 0.0).items()), cards)
    )
    sync = _sync_seconds(job, schedule)
    seconds = ran.seconds + sync
    memory = max(peak_bytes(job, schedule, batch, promises))
    return Step(
        job=job,
        promises=promises,
        seconds=seconds,
        exposed=max(0.0, seconds - free),
        bubble=ran.bubble,
        memory=memory,
        fits=memory <= job.gpu.memory,
        mfu=job.model_flops / (seconds * job.size * job.gpu.peak_of(job.dtype)),
        tokens_per_second=job.real.tokens * job.microbatches * job.dp / seconds,
        pipeline=ran,
    )


def compare(job: ScaleJob) -> dict[str, Step]:
    """The step with all promises, without each of them, and with none."""
    cases = {ALL: ALL_PROMISES}
    cases |= {f"without {promise.value}": ALL_PROMISES - {promise} for promise in Promise}
    return {name: simulate_step(job, promises) for name, promises in (cases | {NONE: frozenset()}).items()}


def ideal_seconds(job: ScaleJob) -> float:
    """The flops of the real tokens at the peak of all GPUs."""
    return job.model_flops / (job.size * job.gpu.peak_of(job.dtype))


def _stages(job: ScaleJob, batch: Batch, wires: LayerWires) -> tuple[Seconds, ...]:
    return tuple(stage_seconds(job, stage, batch, wires) for stage in range(job.stages))


@dataclass(frozen=True)
class _Paper:
    """All that a simulation needs, as a value that can be looked up: a promise may change nothing."""

    schedule: Schedule
    stages: tuple[Seconds, ...]
    edges: tuple[tuple[Edge, float], ...]
    cards: tuple[tuple[int, ...], ...]

    @property
    def costs(self) -> Costs:
        return Costs(
            tuple(s.forward for s in self.stages),
            tuple(s.backward for s in self.stages),
            tuple(s.input_gradient for s in self.stages),
            tuple(s.weight_gradient for s in self.stages),
            dict(self.edges),
            cards=self.cards,
        )


@lru_cache(maxsize=32)
def _run(paper: _Paper, transfers: Transfers) -> Simulation:
    return paper.schedule.simulate(paper.costs, transfers=transfers)


@lru_cache(maxsize=32)
def _seconds(paper: _Paper) -> float:
    """The same with transfers beside computing, but only its length: nothing is lowered."""
    run = decide(paper.schedule, chain(paper.schedule.stages), paper.costs).run
    return max(end for _, end in run.actions.values())


def _sync_seconds(job: ScaleJob, schedule: Schedule) -> float:
    """The replicas' gradients, after the last backward; nobody hides them here."""
    if not schedule.has_backward:
        return 0.0
    ranks = range(len(schedule.ranks))
    return max(gradient_sync_seconds(job, sum(stage_parameters(job, s) for s in schedule.stages_of(r))) for r in ranks)


class LayerWires(Enum):
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


def stage_seconds(job: ScaleJob, stage: int, batch: Batch, wires: LayerWires) -> Seconds:
    """One micro-batch on one stage; the last one also has the logits."""
    found = layer_seconds(job, batch, wires).times(job.layers[stage])
    if stage == job.stages - 1:
        found += _column(job, job.predicted_tokens(batch), job.model.vocabulary, wires)
    return found


def layer_seconds(job: ScaleJob, batch: Batch, wires: LayerWires) -> Seconds:
    """One micro-batch through one layer, on each of its GPUs."""
    model, t = job.model, batch.tokens
    return (
        _column(job, t, job.tp * job.most.together * model.head_width, wires)
        + _attention(job, batch)
        + _row(job, t, job.tp * job.most.queries * model.head_width, wires)
        + _column(job, t, model.up, wires)
        + _row(job, t, model.ffn, wires)
        + _between(job, t)
        + _realigned(job)
    )


def _layer_seconds(job: ScaleJob, op: Op, wires: LayerWires, m: int, n: int, k: int, tail: float = 0.0) -> float:
    found = predict_op(job.gpu, op, m, n, k, tp=job.tp, dtype=job.dtype, tail=tail)
    by_wires = {
        LayerWires.OVERLAPPED: found.overlapped,
        LayerWires.SEQUENTIAL: found.sequential,
        LayerWires.FREE: found.matmul,
    }
    return by_wires[wires]


def _plain(job: ScaleJob, m: int, n: int, k: int) -> float:
    return matmul_seconds(job.gpu, m, n, k, dtype=job.dtype)


def _column(job: ScaleJob, t: int, n: int, wires: LayerWires) -> Seconds:
    """A weight [n, h] whose rows are cut: the input is gathered, and the input's gradient summed."""
    h, own = job.model.hidden, -(-n // job.tp)
    sharded = job.activations is Activations.SHARDED
    forward = _layer_seconds(job, Op.ALL_GATHER, wires, t, n, h) if sharded else _plain(job, t, own, h)
    op = Op.REDUCE_SCATTER if sharded else Op.ALL_REDUCE
    weight = _plain(job, own, h, t)
    both = _layer_seconds(job, op, wires, t, h, n, tail=weight)
    return Seconds(forward, both, _layer_seconds(job, op, wires, t, h, n), weight)


def _row(job: ScaleJob, t: int, k: int, wires: LayerWires) -> Seconds:
    """A weight [h, k] whose columns are cut: the output is summed, and its gradient gathered."""
    h, own = job.model.hidden, -(-k // job.tp)
    sharded = job.activations is Activations.SHARDED
    forward = _layer_seconds(job, Op.REDUCE_SCATTER if sharded else Op.ALL_REDUCE, wires, t, h, k)
    gradient = _layer_seconds(job, Op.ALL_GATHER, wires, t, k, h) if sharded else _plain(job, t, own, h)
    weight = _plain(job, h, own, t)
    return Seconds(forward, gradient + weight, gradient, weight)


def _attention(job: ScaleJob, batch: Batch) -> Seconds:
    """Scores and their products with the values, of this GPU's heads; decoding reads the caches."""
    flops = job.model.attention_flops(batch.pairs) * job.most.queries / job.model.heads
    peak = job.gpu.peak_of(job.dtype)
    forward = flops / (peak * ATTENTION_FORWARD)
    if job.mode is Mode.DECODE:
        cached = batch.pairs * 2 * job.most.keys * job.model.head_width * ITEM_BYTES[job.dtype]
        forward = max(forward, copy_seconds(job.gpu, cached))
    # Two matmuls forward, five backward: scores are computed again.
    backward = 2.5 * flops / (peak * ATTENTION_BACKWARD)
    return Seconds(forward, backward, backward, 0.0)


def _realigned(job: ScaleJob) -> Seconds:
    """Training stores shards: where GPUs do not divide the key heads, weights that are computed with come from others,
    and their gradients go back. Inference has packed them once."""
    model, most = job.model, job.most
    if job.mode is not Mode.TRAIN or model.kv_heads % job.tp == 0:
        return Seconds(0.0, 0.0, 0.0, 0.0)
    queries = 0 if most.queries * job.tp == model.heads else 2 * most.queries  # and the columns of `out` that follow
    rows = (queries + 2 * most.keys) * model.head_width
    moved = rows * model.hidden * ITEM_BYTES[job.dtype] / job.gpu.link
    return Seconds(moved, moved, 0.0, moved)


def _between(job: ScaleJob, t: int) -> Seconds:
    """Two norms with their residuals, four passes each over this GPU's rows, and the activation."""
    model, item = job.model, ITEM_BYTES[job.dtype]
    rows = -(-t // job.tp) if job.activations is Activations.SHARDED else t
    norms = 8 * rows * model.hidden * item
    activation = t * (model.up + model.ffn) / job.tp * item
    forward = copy_seconds(job.gpu, norms) + copy_seconds(job.gpu, activation)
    return Seconds(forward, 2 * forward, 2 * forward, 0.0)


def edge_seconds(job: ScaleJob, tokens: int, promises: frozenset[Promise]) -> dict[Edge, float]:
    """Seconds of each edge's activations for one micro-batch of all replicas that share a host.

    Without the promise of reshard every GPU gets its box for itself, from one sender.
    """
    strategy = "optimal" if Promise.RESHARD in promises else "send_recv"
    sharded = job.activations is Activations.SHARDED
    across = 0.0
    if any(job.host_of(e.source) != job.host_of(e.target) for e in chain(job.stages).edges):
        shape = (tokens * job.neighbours, job.model.hidden)
        across = _plan_seconds(shape, job.dtype, job.neighbours, job.tp, sharded, job.host_gbps, strategy)
    inside = tokens * job.model.hidden * ITEM_BYTES[job.dtype] / (job.tp if sharded else 1) / job.gpu.link
    return {
        edge: inside if job.host_of(edge.source) == job.host_of(edge.target) else across
        for edge in chain(job.stages).edges
    }


@lru_cache(maxsize=256)
def _plan_seconds(
    shape: tuple[int, int], dtype: str, replicas: int, tp: int, sharded: bool, gbps: float, strategy: str
) -> float:
    """One stage's mesh to the next one's, on the next host. All such edges are alike."""
    size = replicas * tp
    placements = (Shard(0), Shard(0) if sharded else Replicate())

    def layout(host: int) -> Layout:
        ranks = [[host * size + replica * tp + rank for rank in range(tp)] for replica in range(replicas)]
        return Layout(Mesh.of(ranks, hosts=[[host] * tp] * replicas, axes=("dp", "tp")), placements)

    cluster = DeclaredCluster.uniform(2, gbps=gbps, latency=_NETWORK_LATENCY)
    kind = getattr(torch, dtype)
    return plan_reshard(shape, kind, src=layout(0), dst=layout(1), cluster=cluster, strategy=strategy).seconds


def cards_of(job: ScaleJob) -> tuple[tuple[int, ...], ...]:
    """The host of each stage, whose cards it sends through."""
    return tuple((job.host_of(stage),) for stage in range(job.stages))


def gradient_sync_seconds(job: ScaleJob, parameters: float) -> float:
    """A ring over the replicas: gradients summed as float32, each updates its share, weights gathered again."""
    if job.dp == 1:
        return 0.0
    nbytes = parameters * (4 + ITEM_BYTES[job.dtype]) * (job.dp - 1) / job.dp
    inside = job.dp * job.tp <= job.devices
    rate = job.gpu.link if inside else min(job.gpu.link, job.host_gbps * 1e9 / 8 / job.devices)
    return nbytes / rate + 2 * (job.dp - 1) * _NETWORK_LATENCY


def stage_parameters(job: ScaleJob, stage: int) -> float:
    """Weights of a stage on one of its GPUs; the first and the last also have a share of the vocabulary's."""
    ends = (stage == 0) + (stage == job.stages - 1 and job.stages > 1)
    model, most = job.model, job.most
    attention = (most.together + most.queries) * model.head_width * model.hidden
    layer = attention + model.hidden * (model.up + model.ffn) / job.tp
    return job.layers[stage] * layer + ends * model.vocabulary * model.hidden / job.tp


def weight_bytes(job: ScaleJob, parameters: float) -> float:
    """With float32 gradients and Adam's three float32 values, which the replicas share, in training."""
    item = ITEM_BYTES[job.dtype]
    return parameters * (item + 4 + 12 / job.dp) if job.mode is Mode.TRAIN else parameters * item


def layer_activations(job: ScaleJob, tokens: int) -> float:
    """What a layer keeps of a micro-batch for its backward; inputs of gathering matmuls are kept gathered."""
    model = job.model
    share = 1 / job.tp if job.activations is Activations.SHARDED else 1.0
    cut = (job.most.together + job.most.queries) * model.head_width + (model.up + model.ffn) / job.tp
    return tokens * ITEM_BYTES[job.dtype] * (2 * model.hidden * (1 + share) + cut)


def peak_bytes(job: ScaleJob, schedule: Schedule, batch: Batch, promises: frozenset[Promise]) -> tuple[float, ...]:
    """The most that lies on a GPU of each pipeline rank."""
    return tuple(_rank_bytes(job, schedule, rank, batch, promises) for rank in range(len(schedule.ranks)))


def _rank_bytes(job: ScaleJob, schedule: Schedule, rank: int, batch: Batch, promises: frozenset[Promise]) -> float:
    stages, item = schedule.stages_of(rank), ITEM_BYTES[job.dtype]
    total = weight_bytes(job, sum(stage_parameters(job, stage) for stage in stages))
    layers = max(job.layers[stage] for stage in stages)
    if job.mode is Mode.TRAIN:
        return total + schedule.peak_by_rank[rank] * layers * layer_activations(job, batch.tokens)
    held = sum(job.layers[stage] for stage in stages) * job.context(promises) * job.microbatches
    caches = held * 2 * job.most.keys * job.model.head_width * item
    return total + caches + layer_activations(job, batch.tokens)
