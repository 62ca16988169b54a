"""A rank that dies while the others decode: they end within the deadline and say whom they waited for."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from parallel_cases import build
from test_parallel_inference import program_of

from weft.comm.host_collectives import HostWire
from weft.errors import PeerTimeout, WeftError
from weft.transformer.generation import generate

DEADLINE = 1.5
VICTIM = 1


def decode_with_a_victim() -> str:
    group = dist.new_group(timeout=timedelta(seconds=DEADLINE))
    program = program_of(build("Llama").eval(), group=group)
    assert isinstance(program.wire, HostWire)
    assert len(generate(program, [[1, 2, 3]], max_new_tokens=3)[0]) == 3
    if dist.get_rank() == VICTIM:
        real, calls = program.run, iter(range(100))

        def run(*args: object, **options: object) -> torch.Tensor:
            if next(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)  # type: ignore[arg-type]

        program.run = run  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"waited 1.5 s for rank 1 at inference on 2 tokens of 2 sequences") as caught:
        generate(program, [[1, 2, 3], [4]], max_new_tokens=30)
    assert time.monotonic() - start < 20 * DEADLINE
    with pytest.raises(WeftError, match="an earlier call on this group failed"):
        generate(program, [[1]], max_new_tokens=1)
    return str(caught.value)


def test_a_killed_rank_ends_the_others() -> None:
    results = run_ranks(decode_with_a_victim, 3, killed=[VICTIM])
    assert results[VICTIM] == signal.SIGKILL
    assert results[0] == results[2]


def gather_and_sum() -> None:
    """Numbers that go round, messages larger than a bank, more rows than a chunk, fewer words than ranks."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    wire = HostWire(group, 8, torch.float32, timeout=20.0)
    wire._banks._turn = 2**32 - 3
    for block in wire._banks._counters:  # as after four billion exchanges
        block[0] = -3
    dist.barrier()
    wire.begin(7, "a test")
    for n in (0, 1, 5, 700_001):
        parts = [torch.empty(n, dtype=torch.int64) for _ in range(size)]
        wire.gather(torch.arange(n) * 10 + rank, parts)
        assert [p.tolist() for p in parts] == [(torch.arange(n) * 10 + r).tolist() for r in range(size)]
        assert wire.tell([rank, -n]) == [[r, -n] for r in range(size)]
    assert wire._banks._turn < 2**31


def test_exchanges_go_round() -> None:
    run_ranks(gather_and_sum, 3)
