"""Lean collectives with real processes: same bits as a sum in rank order, in pieces, over epochs, and when it fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from weft.comm.host_collectives import HostGroup
from weft.errors import PeerMismatch, PeerTimeout, WeftError
from weft.kernels import PackedWeight, linear
from weft.kernels.matmul import fused_matmul_all_reduce


def _group(bank_bytes: int = 4096, timeout: float = 30.0) -> HostGroup:
    return HostGroup(dist.distributed_c10d._get_default_group(), bank_bytes=bank_bytes, timeout=timeout)


def _part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (1000 * torch.randn(shape, generator=generator)).to(dtype)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def _all_reduces() -> None:
    lean = _group()
    # One row, one bank exactly, one more than a bank, many banks, an odd end, nothing.
    for seed, shape in enumerate([(1, 8), (4, 256), (1025,), (7, 3000), (0, 5), (3, 1, 77)]):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = [_part(rank, shape, dtype, seed) for rank in range(lean.size)]
            kept = parts[lean.rank].clone()
            total = lean.all_reduce(parts[lean.rank])
            assert torch.equal(total, _sum(parts)), (shape, dtype)
            assert torch.equal(parts[lean.rank], kept)
    strided = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(lean.all_reduce(strided), strided * lean.size)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_reduce_adds_in_rank_order(world: int) -> None:
    run_ranks(_all_reduces, world)


def _all_gathers() -> None:
    lean = _group(bank_bytes=1024)
    for shape, dim in [
        ((3, 5), 0),
        ((3, 5), 1),
        ((3, 5), -1),
        ((2, 700), 1),
        ((300, 2), 1),
        ((2, 3, 4), 1),
        ((0, 3), 1),
    ]:
        shards = [_part(rank, shape, torch.float32) for rank in range(lean.size)]
        assert torch.equal(lean.all_gather(shards[lean.rank], dim=dim), torch.cat(shards, dim)), (shape, dim)


@pytest.mark.parametrize("world", [2, 3])
def test_all_gather_is_a_concatenation(world: int) -> None:
    run_ranks(_all_gathers, world)


def _fused() -> None:
    lean = _group(bank_bytes=256 * 1024)
    for m, n, k in [(1, 64, 48), (16, 100, 33), (700, 300, 64), (5, 70_000, 8)]:
        xs = [_part(rank, (m, k), torch.float32, seed=1) for rank in range(lean.size)]
        weights = [PackedWeight.from_dense(_part(rank, (n, k), torch.float32, seed=2)) for rank in range(lean.size)]
        bias = _part(0, (n,), torch.float32, seed=3)
        biases = [bias] + [None] * (lean.size - 1)
        expected = _sum([linear(x, w, bias=b) for x, w, b in zip(xs, weights, biases, strict=True)])
        for mode in (False, True):  # a bank that was made in one mode is written to in the other
            with torch.inference_mode(mode):
                y = fused_matmul_all_reduce(lean, xs[lean.rank], weights[lean.rank], bias=biases[lean.rank])
                assert torch.equal(y, expected), (m, n, k)


def test_fused_matmul_has_the_bits_of_matmul_and_sum() -> None:
    run_ranks(_fused, 2)


def _uneven_pace() -> None:
    lean = _group(bank_bytes=64)
    lean._banks._turn = 2**32 - 51  # as after so many turns: the count ends on the way
    lean._banks.window.counters(lean.rank).tensor[0] = -51
    dist.barrier()
    for turn in range(100):
        if turn % 7 == lean.rank:
            time.sleep(0.002)  # ranks run ahead and fall behind
        part = torch.full((40,), float(turn + lean.rank))  # three pieces
        assert torch.equal(lean.all_reduce(part), torch.full((40,), 3.0 * turn + 3.0))


def test_ranks_of_uneven_pace_across_the_end_of_the_count() -> None:
    run_ranks(_uneven_pace, 3)


def _different_sizes() -> None:
    lean = _group()
    with pytest.raises(PeerMismatch, match=rf"rank {lean.rank} is at all_reduce with {4 * (5 + lean.rank)} bytes"):
        lean.all_reduce(torch.ones(5 + lean.rank))
    with pytest.raises(WeftError, match="earlier call on this group failed"):
        lean.all_reduce(torch.ones(5))


def test_different_sizes_are_found_out_on_all_ranks() -> None:
    run_ranks(_different_sizes, 2)


def _late() -> str:
    lean = _group(timeout=2.0)
    lean.all_reduce(torch.ones(3))
    if lean.rank == 1:
        return "never came"
    with pytest.raises(PeerTimeout, match="rank 1 at the embedding") as caught:
        lean.all_reduce(torch.ones(3), what="the embedding")
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    assert run_ranks(_late, 2) == ["waited 2 s for rank 1 at the embedding with 12 bytes", "never came"]


def _killed() -> None:
    lean = _group(timeout=2.0)
    lean.all_reduce(torch.ones(3))
    if lean.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeout, match="rank 1"):
        lean.all_reduce(torch.ones(3))


def test_a_rank_that_was_killed_ends_the_others() -> None:
    assert run_ranks(_killed, 2, killed=[1]) == [None, signal.SIGKILL]


def _refusals() -> None:
    pg = dist.distributed_c10d._get_default_group()
    with pytest.raises(ValueError, match="bank_bytes is 3"):
        HostGroup(pg, bank_bytes=3, timeout=5.0)
    with pytest.raises(ValueError, match="timeout is 0"):
        HostGroup(pg, bank_bytes=64, timeout=0)
    lean = HostGroup(pg, bank_bytes=64, timeout=5.0)
    with pytest.raises(ValueError, match=r"does not fit into a bank of 64 bytes"):
        lean.bank((17,), torch.float32)


def test_what_cannot_be_is_refused() -> None:
    run_ranks(_refusals, 1)
