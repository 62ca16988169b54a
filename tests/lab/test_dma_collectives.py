"""Every collective of torch.distributed on DMA cards gives what it gives on gloo, whatever the sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from weft.lab import Cluster, Rank

SIZES = (0, 1, 7, 1000, 9_001, 70_001, 400_003)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (2, 2), (5, 1)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
def lab(request: pytest.FixtureRequest, namespaces: None) -> Iterator[Cluster]:
    hosts, devices = request.param
    with Cluster(hosts=hosts, devices=devices, gbps=10.0, cards="dma") as cluster:
        yield cluster


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which add up exactly in any order, different everywhere."""
    return ((torch.arange(size) * 7 + rank * 3) % 5 + 1).to(dtype)


def reduced(world: int, size: int, dtype: torch.dtype, op: str) -> Tensor:
    all_of_them = torch.stack([numbers(rank, size, torch.float64) for rank in range(world)])
    if op == "avg":
        return all_of_them.mean(0).to(dtype)
    found = {"sum": all_of_them.sum(0), "product": all_of_them.prod(0)}
    return (found[op] if op in found else getattr(all_of_them, op)(0).values).to(dtype)


def reductions(rank: Rank) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for size in SIZES if dtype == torch.float32 else (33, 70_001):
            for op in OPS if dtype == torch.float32 else ("sum", "max"):
                expected = reduced(rank.world, size, dtype, op)
                what = (dtype, size, op)
                x = numbers(rank.rank, size, dtype)
                dist.all_reduce(x, OPS[op])
                torch.testing.assert_close(x, expected, msg=str(what))
                for root in (0, rank.world - 1):
                    x = numbers(rank.rank, size, dtype)
                    dist.reduce(x, root, OPS[op])
                    mine = expected if rank.rank == root else numbers(rank.rank, size, dtype)
                    torch.testing.assert_close(x, mine, msg=str(what))
                parts = [numbers(rank.rank + 11 * part, size, dtype) for part in range(rank.world)]
                out = torch.zeros(size, dtype=dtype)
                dist.reduce_scatter(out, parts, OPS[op])
                wanted = torch.stack([numbers(r + 11 * rank.rank, size, torch.float64) for r in range(rank.world)])
                if op == "sum":
                    torch.testing.assert_close(out, wanted.sum(0).to(dtype), msg=str(what))
                    single = torch.zeros(size, dtype=dtype)
                    dist.reduce_scatter_single(single, torch.cat(parts))
                    assert torch.equal(single, out), what


def movements(rank: Rank) -> None:
    world, me = rank.world, rank.rank
    for size in SIZES:
        own = numbers(me, size, torch.float32)
        everybody = [numbers(r, size, torch.float32) for r in range(world)]
        found = [torch.zeros(size) for _ in range(world)]
        dist.all_gather(found, own)
        assert all(map(torch.equal, found, everybody)), size
        single = torch.zeros(world * size)
        dist.all_gather_single(single, own)
        assert torch.equal(single, torch.cat(everybody)), size
        for root in (0, world - 1):
            x = own.clone()
            dist.broadcast(x, root)
            assert torch.equal(x, everybody[root]), size
            into = [torch.zeros(size) for _ in range(world)] if me == root else None
            dist.gather(own, into, dst=root)
            assert into is None or all(map(torch.equal, into, everybody)), size
            x = torch.zeros(size)
            dist.scatter(x, [e + root for e in everybody] if me == root else None, src=root)
            assert torch.equal(x, own + root), size
        into = [torch.zeros(size) for _ in range(world)]
        dist.all_to_all(into, [own + 100 * r for r in range(world)])
        assert all(torch.equal(got, everybody[r] + 100 * me) for r, got in enumerate(into)), size
    rows = [(me + r) % 3 for r in range(world)]  # for each rank, another number
    sent = torch.arange(sum(rows) * 4.0).reshape(-1, 4) + 1000 * me
    comes = [(r + me) % 3 for r in range(world)]
    got = torch.zeros(sum(comes), 4)
    dist.all_to_all_single(got, sent, comes, rows)
    at = 0
    for r, count in enumerate(comes):
        first = sum((r + s) % 3 for s in range(me))
        expected = torch.arange(4.0 * first, 4.0 * (first + count)).reshape(-1, 4) + 1000 * r
        assert torch.equal(got[at : at + count], expected)
        at += count
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(world)]
    dist.barrier()


def in_flight(rank: Rank) -> None:
    """Many collectives and messages at once, in two groups; the order of waits is not that of the calls."""
    other = dist.new_group()
    xs = [numbers(rank.rank + i, 5_000 * (i % 3) + 1, torch.float32) for i in range(12)]
    works = [dist.all_reduce(x, group=other if i % 2 else None, async_op=True) for i, x in enumerate(xs)]
    left, right = (rank.rank - 1) % rank.world, (rank.rank + 1) % rank.world
    out = [torch.full((50_000,), 1000.0 * tag + rank.rank) for tag in range(4)]
    into = [torch.zeros(50_000) for _ in range(4)]
    sends = [dist.isend(x, right, tag=tag) for tag, x in enumerate(out)]
    receives = [dist.irecv(into[tag], left, tag=tag) for tag in (2, 0, 3, 1)]
    for work in [*reversed(works), *receives, *reversed(sends)]:
        assert work is not None
        work.wait()
    for i, x in enumerate(xs):
        expected = sum(numbers(r + i, len(x), torch.float32) for r in range(rank.world))
        assert torch.equal(x, expected)
    assert all(bool((x == 1000.0 * tag + left).all()) for tag, x in enumerate(into))


def messages(rank: Rank) -> None:
    """From anybody; without a wait; empty; strided; as futures."""
    if rank.rank == 0:
        froms = []
        for _ in range(rank.world - 1):
            x = torch.zeros(3)
            froms.append(dist.recv(x, tag=7))
            assert x.tolist() == [froms[-1]] * 3
        assert sorted(froms) == list(range(1, rank.world))
        x = torch.zeros(300_000)
        dist.recv(x, 1, tag=8)
        assert bool((x == 5).all())
        y = torch.zeros(4, 6).t()
        dist.recv(y, 1, tag=9)
        assert torch.equal(y, torch.arange(24.0).reshape(4, 6).t())
    else:
        dist.send(torch.full((3,), float(rank.rank)), 0, tag=7)
    if rank.rank == 1:
        dist.isend(torch.full((300_000,), 5.0), 0, tag=8)  # nobody waits for it, and nobody holds the tensor
        dist.send(torch.arange(24.0).reshape(4, 6).t(), 0, tag=9)
    with pytest.raises(ValueError, match="without gaps"):
        rank.group.send([torch.zeros(4, 4)[:, :2]], (rank.rank + 1) % rank.world, 0)
    x = numbers(rank.rank, 10, torch.float32)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert torch.equal(work.get_future().wait()[0], reduced(rank.world, 10, torch.float32, "sum"))
    z = torch.tensor([1 + 2j]) * (rank.rank + 1)
    dist.all_reduce(z)
    assert z.tolist() == [(1 + 2j) * sum(range(1, rank.world + 1))]
    dist.barrier()


@pytest.mark.parametrize("program", [reductions, movements, in_flight, messages], ids=lambda f: f.__name__)
def test_what_ranks_get(lab: Cluster, program: object) -> None:
    lab.run(program, timeout=120.0)  # type: ignore[arg-type]


def counted(rank: Rank) -> tuple[int, int]:
    group: object = rank.group
    before = group.carried()  # type: ignore[attr-defined]
    dist.barrier()  # or another rank of this host would send before this one has looked
    dist.all_reduce(torch.ones(1_000_000))
    dist.barrier()
    after = group.carried()  # type: ignore[attr-defined]
    return after[0] - before[0], after[1] - before[1]


def test_a_card_carries_a_byte_once_however_many_ranks_share_it(lab: Cluster) -> None:
    hosts, world = lab.spec.hosts, lab.spec.world
    wire = 2 * (world - 1) * 4_000_000 / world  # the ring crosses each card with that
    for out, into in lab.run(counted):
        assert 0 <= out - wire < 10_000, (hosts, out)
        assert 0 <= into - wire < 10_000, (hosts, into)
