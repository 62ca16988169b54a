"""The executor with real processes: hundreds of random moves against plain torch, and what failures do."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.comm import Group
from weft.comm.tell import store_of
from weft.errors import PeerMismatch, WeftError
from weft.layout import Layout, Mesh, ShardSizes
from weft.reference import reshard_reference, shard
from weft.reshard import STRATEGIES, Executor, TensorSpec, plan_tensors
from weft.timeline import record

LONG = 60.0
"""A deadline that only a hang reaches."""


def shards_of(spec: TensorSpec, seed: int) -> dict[int, torch.Tensor]:
    """The source's shards of all ranks; each term is another random tensor of whole numbers."""
    found: dict[int, torch.Tensor] = {}
    cells = spec.src.holders(len(spec.shape))
    for term in range(cells.shape[1]):
        generator = torch.Generator().manual_seed(1000 * seed + term)
        whole = torch.randint(-9, 9, spec.shape, generator=generator).to(spec.dtype)
        parts = shard(whole, spec.src)
        found |= {int(rank): parts[int(rank)].clone() for rank in cells[:, term].reshape(-1)}
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# Random moves -----------------------------------------------------------------------------------------------


def random_spec(chance: random.Random, world: int) -> TensorSpec:
    """Any two meshes of the world, any shapes (also empty and scalar), any placements."""
    per_host = chance.choice([1, 2, 4])
    shape = tuple(chance.choice([0, 1, 2, 3, 7, 16, 40]) for _ in range(chance.randint(0, 3)))

    def layout(*, partial: bool) -> Layout:
        axes = chance.choice([(1,), (world,), (2, 1), (1, 2), (2, 2), (world // 2, 2), (1, world)])
        axes = axes if int(np.prod(axes)) <= world else (world,)
        ranks = np.array(chance.sample(range(world), int(np.prod(axes)))).reshape(axes)
        kinds: list[object] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        placements = [chance.choice(kinds + ([Partial()] if partial else [])) for _ in axes]
        if len(axes) == 1 and shape and chance.random() < 0.3:
            cuts = [0, *sorted(chance.randint(0, shape[0]) for _ in range(axes[0] - 1)), shape[0]]
            placements = [ShardSizes(0, tuple(b - a for a, b in pairwise(cuts)))]
        order = chance.sample(range(len(axes)), len(axes))
        return Layout(Mesh.of(ranks, hosts=ranks // per_host), placements, tuple(order))  # type: ignore[arg-type]

    dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64])
    other = torch.float64 if dtype.is_floating_point and chance.random() < 0.3 else dtype
    return TensorSpec("x", shape, dtype, layout(partial=chance.random() < 0.4), layout(partial=False), other)


def move_many(seed: int, count: int) -> int:
    """Each case on all ranks, twice with the same executor; returns how many were moved."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    chance = random.Random(seed)
    for case in range(count):
        spec = random_spec(chance, dist.get_world_size())
        strategy, chunk = chance.choice(sorted(STRATEGIES)), chance.choice([1024, 4096, None])
        plan = plan_tensors([spec], strategy=strategy, chunk_bytes=chunk)
        sources = shards_of(spec, case)
        expected = reshard_reference(spec, sources)
        src = {0: sources[me]} if me in sources else {}
        untouched = {i: tensor.clone() for i, tensor in src.items()}
        with Executor(plan, group) as executor:
            for _ in range(2):
                dst = {0: torch.full_like(expected[me], 77)} if me in expected else {}
                executor.run(src, dst)
                assert all(same_bits(tensor, expected[me]) for tensor in dst.values()), (seed, case, str(plan))
                assert all(same_bits(src[i], tensor) for i, tensor in untouched.items()), "the source was changed"
    return count


@pytest.mark.parametrize(("world", "seed", "count"), [(2, 1, 80), (4, 2, 80), (8, 3, 60)])
def test_random_moves_are_exact(world: int, seed: int, count: int) -> None:
    assert run_ranks(move_many, world, seed, count, timeout=240.0) == [count] * world


def reduce_every_way() -> None:
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    mesh = Mesh.of([0, 1, 2], hosts=[0, 0, 1])
    for op in ("sum", "avg", "max", "min", "product"):
        src, dst = Layout(mesh, [Partial(op)]), Layout(mesh, [Shard(0)])
        spec = TensorSpec("x", (5, 3), torch.float32, src, dst, torch.float32)
        sources = {rank: torch.linspace(-1, 2, 15).reshape(5, 3) * (rank + 0.3) for rank in range(3)}
        out = torch.empty(dst.local_shape((5, 3), me))
        with Executor(plan_tensors([spec]), group) as executor:
            executor.run({0: sources[me]}, {0: out})
        assert same_bits(out, reshard_reference(spec, sources)[me]), op


def test_terms_are_reduced_in_order() -> None:
    run_ranks(reduce_every_way, 3)


def little_staging() -> tuple[int, int]:
    """A move of 4 MB with room for only a few chunks."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    world = Mesh.of([0, 1, 2, 3], hosts=[0, 0, 1, 1])
    spec = TensorSpec(
        "x", (1024, 1024), torch.float32, Layout(world, [Shard(1)]), Layout(world, [Replicate()]), torch.float32
    )
    plan = plan_tensors([spec], chunk_bytes=1 << 14)
    sources = shards_of(spec, 0)
    out = torch.empty(1024, 1024)
    limit = 5 << 14
    with Executor(plan, group, max_staging_bytes=limit) as executor:
        executor.run({0: sources[me]}, {0: out})
        assert same_bits(out, reshard_reference(spec, sources)[me])
        slots = executor.slots
    return (2 * slots.receive + slots.send + slots.share) * slots.size, limit


def test_staging_stays_within_its_limit() -> None:
    assert all(used <= limit for used, limit in run_ranks(little_staging, 4))


def trace_and_overlap() -> tuple[set[str], int, bool]:
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    spec = big_spec()
    sources = shards_of(spec, 0)
    landed: list[int] = []
    with record.trace() as t, Executor(plan_tensors([spec]), group) as executor:
        src = {0: sources[me]} if me in sources else {}
        dst = {0: torch.empty(spec.dst.local_shape(spec.shape, me))} if me in spec.dst.mesh.ranks else {}
        pending = executor.start(src, dst, on_bytes=landed.append)
        torch.ones(64, 64) @ torch.ones(64, 64)  # the caller goes on meanwhile
        pending.wait()
        pending.wait()
    right = all(same_bits(tensor, reshard_reference(spec, sources)[me]) for tensor in dst.values())
    return set(t.timeline.lanes), sum(landed), right


def big_spec() -> TensorSpec:
    """From rank 0 to ranks 1 and 2 on one host and 3 on another."""
    src = Layout(Mesh.of([0], hosts=[0]), [Replicate()])
    dst = Layout(Mesh.of([1, 2, 3], hosts=[1, 1, 2]), [Replicate()])
    return TensorSpec("weight", (1024, 1024), torch.float32, src, dst, torch.float32)


def test_a_handle_overlaps_and_a_trace_records() -> None:
    results = run_ranks(trace_and_overlap, 5)
    assert [lanes for lanes, _, _ in results] == [{"out"}, {"in", "copy"}, {"copy"}, {"in"}, set()]
    assert [landed for _, landed, _ in results] == [0, 1 << 22, 1 << 22, 1 << 22, 0]
    assert all(right for _, _, right in results)


# Refusals ---------------------------------------------------------------------------------------------------


def refuse(kind: str) -> str:
    """Each rank's error, and then a move that works: nothing was broken."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    spec = big_spec()
    try:
        if kind == "plans":
            plan = plan_tensors([spec], strategy="optimal" if me else "broadcast", chunk_bytes=1 << 16)
        elif kind == "ranks":
            far = Layout(Mesh.of([9], hosts=[1]), [Replicate()])
            plan = plan_tensors([TensorSpec("w", (4,), torch.float32, spec.src, far, torch.float32)])
        elif kind == "staging":
            plan = plan_tensors([spec], chunk_bytes=1 << 20)
        Executor(plan, group, max_staging_bytes=(1 << 20) if kind == "staging" else 1 << 28)
    except (ValueError, PeerMismatch) as error:
        with Executor(plan_tensors([spec]), group) as executor:
            src = {0: torch.ones(1024, 1024)} if me == 0 else {}
            dst = {0: torch.zeros(1024, 1024)} if me in (1, 2, 3) else {}
            executor.run(src, dst)
            assert all((tensor == 1).all() for tensor in dst.values())
        return f"{type(error).__name__}: {error}"
    return "no error"


REFUSALS = [
    ("plans", "PeerMismatch: ranks are about to do different things"),
    ("ranks", "ValueError: the meshes have the ranks [9], which are not in the process group"),
    ("staging", "ValueError: max_staging_bytes is 1048576, expected at least"),
]


def refuse_all() -> list[str]:
    return [refuse(kind) for kind, _ in REFUSALS]


def test_refusals_come_before_a_byte_moves() -> None:
    for texts in run_ranks(refuse_all, 4):
        for (_, message), text in zip(REFUSALS, texts, strict=True):
            assert text.startswith(message), text


# Failures ---------------------------------------------------------------------------------------------------


def fail_in_the_middle(victim: int, how: str, timeout: float) -> tuple[str, float, bool]:
    """`victim` kills or stops itself when its first chunk has landed (or left): error, seconds, source intact."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    store = store_of(group.pg)
    spec = big_spec()
    plan = plan_tensors([spec], chunk_bytes=1 << 14)
    source = torch.ones(1024, 1024)
    with Executor(plan, group) as executor:
        group.timeout = timeout
        src = {0: source} if me == 0 else {}
        dst = {0: torch.zeros(1024, 1024)} if me in (1, 2, 3) else {}

        def on_bytes(_: int) -> None:
            if me == victim and not store.check(["pid"]):
                store.set("pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

        start = time.monotonic()
        try:
            executor.start(src, dst, on_bytes=on_bytes).wait()
            text = "no error"
        except WeftError as error:
            text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    others = len(plan.ranks) - 1
    if how == "stop" and me != victim and store.add("gave up", 1) == others:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return text, seconds, bool((source == 1).all())


def check_failure(results: Sequence[object], victim: int) -> None:
    blamed = []
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        text, seconds, intact = result  # type: ignore[misc]
        assert text.startswith(("PeerTimeout: ", "PeerLost: ")), (rank, text)
        assert "chunk " in text
        assert seconds < LONG / 2
        assert intact
        blamed.append(text)
    assert any(f"rank {victim}" in text for text in blamed), blamed
    assert any("unit 0 = 'weight'[0:1024, 0:1024]" in text for text in blamed), blamed


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_ends_the_others(victim: int) -> None:
    results = run_ranks(fail_in_the_middle, 4, victim, "kill", 5.0, killed=[victim])
    check_failure(results, victim)


@pytest.mark.parametrize("victim", [1, 3])
def test_a_stopped_rank_ends_the_others(victim: int) -> None:
    results = run_ranks(fail_in_the_middle, 4, victim, "stop", 5.0)
    check_failure(results, victim)


def strange_tensors() -> None:
    """What an executor is given is checked like what the functions are; a rank that was refused tries again."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    mesh = Mesh.of([0, 1], hosts=[0, 1])
    spec = TensorSpec("w", (4, 4), torch.float32, Layout(mesh, [Shard(0)]), Layout(mesh, [Shard(1)]), torch.float32)
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
    twin = torch.complex(torch.zeros(2, 4), -whole.chunk(2)[me]).conj().imag  # the rows, as negatives of their memory
    assert twin.is_neg()
    memory = torch.zeros(16)
    with Executor(plan_tensors([spec]), group) as executor:
        for source in (whole.chunk(2)[me].clone(), twin):
            out = torch.zeros(4, 2)
            bad = {
                "several elements share memory": (source, torch.zeros(1, 2).expand(4, 2)),
                "conjugate or negative": (source, torch.complex(torch.zeros(4, 2), torch.zeros(4, 2)).conj().imag),
                "same memory": (memory[:8].view(2, 4), memory[4:12].view(4, 2)),
                "meta device": (source.to("meta"), out),
                "is None": (None, out),
            }
            for message, (src, dst) in bad.items():
                for _ in range(2):
                    with pytest.raises(ValueError, match=message):
                        executor.start({} if src is None else {0: src}, {0: dst})
            executor.run({0: source}, {0: out})
            assert same_bits(out, whole.chunk(2, dim=1)[me].contiguous())


def test_strange_tensors_are_refused_before_a_run() -> None:
    run_ranks(strange_tensors, 2)
