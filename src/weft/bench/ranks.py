"""`measure` on the ranks of a lab: all make the same calls, the slowest counts, and the result can travel."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from weft import tracing
from weft.bench import noise
from weft.bench.harness import Agree, Case, Measurement, System, measure
from weft.lab import Rank
from weft.timeline import Timeline

# Seconds in which the last rank hears when all begin.
_GATHERING = 0.03


class _Still:
    """A meter that reads nothing: one rank meters for all."""

    def sample(self) -> noise.Sample:
        return noise.Sample(time.perf_counter(), 0.0, 0.0)


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def start_together() -> None:
    """Returns on all ranks at the same moment: the lab's hosts are on one machine, and read one clock.

    A barrier alone lets 16 ranks go over some 15 ms, one after the other.
    """
    begin = slowest(tracing.now()) + _GATHERING
    time.sleep(max(0.0, begin - tracing.now()))


def measure_ranks(case: Case, rank: Rank, rounds: int, *, agree: Agree = slowest, warmup: int = 1) -> Measurement:
    """`measure` on every rank of a lab, with half as many retries as rounds; systems come back as names only."""
    # The ranks are children of the lab's process: its descendants are our own, not noise.
    meter = noise.Meter(root=os.getppid()) if rank.rank == 0 else _Still()
    found = measure(
        case, rounds=rounds, meter=meter, agree=agree, start=start_together, warmup=warmup, max_retries=rounds // 2
    )
    return replace(found, case=replace(case, systems=dict.fromkeys(case.systems, _nothing)))


def traced(call: System, rank: Rank) -> Timeline:
    """One call on all ranks, on one clock."""
    start_together()
    with tracing.trace() as trace:
        call()
    return Timeline(trace.gather(group=rank.group).events, name="measured")


def _nothing() -> None:
    """Stands for a system whose function has stayed on its rank."""
