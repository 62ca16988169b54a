"""The counters of windows go round: transfers go on when one has passed 2^31, and when it has passed 2^32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from weft.comm import Group
from weft.layout import Layout, Mesh, Replicate
from weft.pipeline import schedule
from weft.pipeline.run.api import Pipeline
from weft.reference import shard, step_reference
from weft.reshard import Executor, TensorSpec, plan_tensors
from weft.reshard.executor.staging import Rings

LONG = 60.0


def signed(count: int) -> int:
    """What a counter of 32 bits holds after so many."""
    return (count + 2**31) % 2**32 - 2**31


class _Since(dict[Any, int]):
    """Counts that began at `start`, not at 0."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def get(self, key: Any, default: Any = None) -> int:
        return super().get(key, self._start)


def preset(rings: Rings, start: int) -> None:
    """As after so many runs that every counter of the rings is at `start`."""
    if rings._counters:
        rings._counters[rings._rank].tensor[1:] = signed(start)  # ready of both rings, done of all takers
    rings._published, rings._taken = _Since(start), _Since(start)


def move_past(start: int) -> None:
    """Ranks 0 and 1 share a host: rank 0 publishes all that it has for rank 1, in more chunks than slots."""
    group, me = Group(dist.group.WORLD, timeout=LONG), dist.get_rank()
    mesh = Mesh.of([0, 1], hosts=[0, 0])
    one = Mesh.of([0], hosts=[0])
    src, dst = Layout(one, [Replicate()]), Layout(mesh, [Replicate()])
    spec = TensorSpec("x", (300, 64), torch.float32, src, dst, torch.float32)
    with Executor(plan_tensors([spec], chunk_bytes=4096), group) as executor:
        preset(executor.rings, start)
        dist.barrier()
        for seed in range(4):
            whole = torch.randn(300, 64, generator=torch.Generator().manual_seed(seed))
            out = torch.zeros(300, 64)
            executor.run({0: shard(whole, src)[me].clone()} if me == 0 else {}, {0: out})
            assert torch.equal(out, whole), seed


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
def test_an_executor_goes_on(start: int) -> None:
    run_ranks(move_past, 2, start)


def train_past(start: int) -> None:
    """A stage on rank 0 gives its output to two ranks of one host, of which one receives for both."""
    original = Rings.__init__

    def late(self: Rings, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        preset(self, start)

    Rings.__init__ = late  # type: ignore[method-assign]
    torch.manual_seed(0)
    modules, alone = ([nn.Linear(8, 8), nn.Linear(8, 8)] for _ in range(2))
    for module, twin in zip(modules, alone, strict=True):
        twin.load_state_dict(module.state_dict())
    made = schedule("1f1b", stages=2, microbatches=4)
    me = dist.get_rank()
    with Pipeline(modules, [[0], [1, 2]], made, loss_fn=nn.functional.mse_loss, timeout=LONG) as pipe:
        dist.barrier()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x, target = (torch.randn(8, 8, generator=generator) for _ in range(2))
            losses = pipe.step(x if me == 0 else None, target if me else None)
            expected = step_reference(alone, x, target, microbatches=4, loss_fn=nn.functional.mse_loss)
            assert me == 0 or torch.allclose(losses, expected), step
            for module, twin in zip(modules[min(me, 1) :][:1], alone[min(me, 1) :], strict=False):
                for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
                    assert torch.allclose(mine.grad, other.grad), step


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
def test_a_pipeline_goes_on(start: int) -> None:
    run_ranks(train_past, 3, start)


def meet_past(start: int) -> None:
    """Barriers among the peers of a stream executor, one rank always late: nobody passes without it."""
    from weft.overlap.streams.device import WindowPeers

    me, size = dist.get_rank(), dist.get_world_size()
    peers = WindowPeers(dist.group.WORLD, 64, timeout=LONG)
    peers._passed = start // size
    peers._window.counters(me).tensor[size] = signed(peers._passed * size)
    dist.barrier()
    for turn in range(1, 5):
        if me == turn % size:  # the last one: all others have said that they are there
            there = peers._passed * size + size - 1
            peers._window.counters(me).wait(size, there, timeout=LONG, what="the other ranks")
        peers.memory(me).fill_(turn)
        peers.barrier()
        assert [int(peers.memory(rank)[0]) for rank in range(size)] == [turn] * size
        peers.barrier()


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
def test_peers_of_streams_meet_on(start: int) -> None:
    pytest.importorskip("triton", reason="the executor of streams needs Triton")
    run_ranks(meet_past, 3, start)
