"""What goes between stages, and between replicas: seconds, from the reshard planner and the declared cards."""

from __future__ import annotations

from functools import lru_cache

import torch

from weft.cluster import Cluster
from weft.layout import Layout, Mesh, Replicate, Shard
from weft.pipeline import Edge
from weft.pipeline.graph import chain
from weft.reshard.planner import plan_reshard
from weft.scale.gpus import ITEM_BYTES
from weft.scale.job import Activations, Job, Promise

# A message between hosts: one step of NCCL's plain protocol over a network.
_NETWORK_LATENCY = 9.6e-6


def edge_seconds(job: Job, tokens: int, promises: frozenset[Promise]) -> dict[Edge, float]:
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

    cluster = Cluster.uniform(2, gbps=gbps, latency=_NETWORK_LATENCY)
    kind = getattr(torch, dtype)
    return plan_reshard(shape, kind, src=layout(0), dst=layout(1), cluster=cluster, strategy=strategy).seconds


def cards_of(job: Job) -> tuple[tuple[int, ...], ...]:
    """The host of each stage, whose cards it sends through."""
    return tuple((job.host_of(stage),) for stage in range(job.stages))


def gradient_sync_seconds(job: Job, parameters: float) -> float:
    """A ring over the replicas: gradients summed as float32, each updates its share, weights gathered again."""
    if job.dp == 1:
        return 0.0
    nbytes = parameters * (4 + ITEM_BYTES[job.dtype]) * (job.dp - 1) / job.dp
    inside = job.dp * job.tp <= job.devices
    rate = job.gpu.link if inside else min(job.gpu.link, job.host_gbps * 1e9 / 8 / job.devices)
    return nbytes / rate + 2 * (job.dp - 1) * _NETWORK_LATENCY
