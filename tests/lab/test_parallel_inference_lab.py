"""Generation by ranks of several hosts: the unsharded model's tokens, prefill split and overlapped, decoding whole."""

from __future__ import annotations

import sys
from pathlib import Path

import weft
from weft.lab import Cluster, Rank
from weft.transformer.network import NetworkWire

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from parallel_cases import both
from test_parallel_inference import NEW, greedy_of, prompts


def generates(rank: Rank) -> bool:
    alone, shared = both("Llama", heads=10, kv_heads=5)
    alone.eval(), shared.eval()
    got = weft.generate(shared, prompts(), max_new_tokens=NEW, eos=())
    assert isinstance(shared.weft_program().wire, NetworkWire)
    return got == [greedy_of(alone, p) for p in prompts()]


def test_tokens_across_hosts(namespaces: None) -> None:
    with Cluster(hosts=2, devices=2, gbps=1.0) as lab:
        assert lab.run(generates, timeout=150.0) == [True] * 4
