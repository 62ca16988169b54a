"""Parallel models across hosts: the losses and gradients of one process, the same bits with and without overlap."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import weft
from weft.lab import Cluster, Rank

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from parallel_cases import batch, build, check_gradients, mesh


def trains(rank: Rank) -> list[str]:
    ids, mask, labels = batch([60, 17, 44, 33])
    kinds: set[str] = set()
    for family in ("Llama", "GPT2"):
        alone = build(family, heads=10, kv_heads=5)
        want = alone(input_ids=ids, attention_mask=mask, labels=labels).loss
        want.backward()
        seen = []
        for overlap in ("on", "off"):
            shared = weft.parallelize(build(family, heads=10, kv_heads=5), mesh(), overlap=overlap)
            with weft.trace() as trace:
                loss = shared(input_ids=ids, attention_mask=mask, labels=labels).loss
                loss.backward()
            torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
            check_gradients(alone, shared)
            seen.append([loss.detach(), *(p.grad.to_local() for p in shared.parameters())])
            kinds |= {event.kind for event in trace.timeline.events}
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    return sorted(kinds)


def test_losses_and_gradients_across_hosts(cluster: Cluster) -> None:
    for kinds in cluster.run(trains, timeout=200.0):
        assert {"compute", "recv", "send"} <= set(kinds)
