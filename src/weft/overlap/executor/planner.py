"""The plans of a group, the same on all ranks: chosen by rank 0 from speeds that all ranks measure together.

The speeds (`Curves`) are measured once, when first needed: all ranks at once, for a fraction of a second.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from weft.comm import Group
from weft.comm.deadline import PROBE
from weft.comm.tags import Mark
from weft.kernels import linear
from weft.kernels.dispatch import kernels_for
from weft.overlap.blocks import Topology
from weft.overlap.executor.resources import Worker, pack
from weft.overlap.plan import Op, OverlapPlan, shared_dims
from weft.overlap.search import choose_plan, choose_sequential
from weft.overlap.speeds import Curve, Curves, slowest, subadditive

_MOST_FITTED = 1024  # all-to-all has another number of rows in every call
_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_MATMUL = (96, 1024, 2048)  # m, k, n: quick, but with a weight that the fastest caches do not hold, as in use
_ADD = (512, 3072)  # rows and columns of a sum
_REPEATS = 5
_STRETCHES = 3  # in which the matmul is measured, with other probes between: one disturbance does not meet all
# (bytes, messages) that travel beside a matmul: few large ones and many small ones tell a byte's cost from a message's.
_LARGE, _SMALL = (1 << 19, 4), (1 << 14, 32)


class Planner:
    """The plans of one group: given by a tuner, or predicted by rank 0 when first asked for.

    Plans are kept by the dimensions that all ranks share, so that either all ranks find one or none does, and then
    rank 0 tells the others: two ranks cannot choose differently. Where a thread plans while another one calls, a rank
    may hear of a plan a moment before another; then rank 0's counts (see `context`).
    """

    def __init__(self, group: Group, *, why: str = "") -> None:
        """`why` is told with every plan: what there is to say about the group."""
        self._group, self._why = group, why
        self._lock = threading.Lock()
        self._plans: dict[tuple[object, ...], OverlapPlan] = {}
        self._fitted: dict[tuple[object, ...], OverlapPlan] = {}  # making and checking a plan takes 30 us
        self._curves: Curves | None = None
        self.overlaps = True  # or every plan is the best sequential one; to be set on all ranks, before the first call

    def known(self, op: Op, m: int, n: int, k: int, dtype: str) -> OverlapPlan | None:
        """The plan for these shapes, if there is one."""
        fitted = self._fitted.get((op, m, n, k, dtype))
        if fitted is None:
            with self._lock:
                found = self._plans.get(self._key(op, m, n, k, dtype))
                if found is None:
                    return None
                if len(self._fitted) >= _MOST_FITTED:
                    self._fitted.clear()
                fitted = self._fitted[op, m, n, k, dtype] = found.fit(m=m, n=n, k=k)
        return fitted

    def make(self, op: Op, m: int, n: int, k: int, dtype: str, *, group: Group | None = None) -> OverlapPlan:
        """A predicted plan. Collective: rank 0 chooses, and tells it through `group`. The first one measures curves."""
        group = group or self._group
        curves, mine = self.curves(group), ""
        if group.rank == 0:
            choose = choose_plan if self.overlaps else choose_sequential
            chosen = choose(op, m, n, k, dtype=dtype, hosts=group.hosts, curves=curves)
            mine = str(replace(chosen, reason=f"{chosen.reason}; {self._why}") if self._why else chosen)
        told = OverlapPlan.parse(group.tell("a plan", mine)[0])
        self.use(told)
        return told.fit(m=m, n=n, k=k)

    def use(self, plan: OverlapPlan) -> None:
        """Takes a plan from elsewhere, such as a tuner's file; on all ranks alike."""
        with self._lock:
            self._plans[self._key(plan.op, plan.m, plan.n, plan.k, plan.dtype)] = plan
            self._fitted.clear()

    def settle(self, plan: str, op: Op, m: int, n: int, k: int, dtype: str) -> None:
        """Takes what rank 0 follows for these shapes: a plan's text, or "" where it has none yet."""
        if plan:
            self.use(OverlapPlan.parse(plan))
            return
        with self._lock:
            self._plans.pop(self._key(op, m, n, k, dtype), None)
            self._fitted.clear()

    @property
    def known_curves(self) -> Curves | None:
        """The group's curves, if they have been measured."""
        return self._curves

    def curves(self, group: Group | None = None) -> Curves:
        """The group's curves: those that rank 0 has, or they are measured now, through `group`. Collective."""
        group = group or self._group
        mine = self._curves.to_json() if group.rank == 0 and self._curves is not None else ""
        told = group.tell("the group's curves", mine)[0]
        curves = Curves.from_json(told) if told else measure_curves(group)
        self._curves = curves
        return curves

    def _key(self, op: Op, m: int, n: int, k: int, dtype: str) -> tuple[object, ...]:
        return op, dtype, shared_dims(op, m=m, n=n, k=k)


# Measuring --------------------------------------------------------------------------------------------------


def measure_curves(group: Group) -> Curves:
    """The curves of a group, the same on all ranks. Collective."""
    topology = Topology(group.hosts)
    own = torch.Generator()  # the caller's random numbers stay as they are
    x = torch.randn(_MATMUL[0], _MATMUL[1], generator=own)
    w = pack(torch.randn(_MATMUL[2], _MATMUL[1], generator=own))
    group.barrier("probe of the matmul")

    def matmul() -> None:
        linear(x, w)

    matmuls, sums = [], []
    for _ in range(_STRETCHES):
        matmuls += _times(matmul)
        sums += _sums()
    points, apart = _wire(group, topology)
    per_byte, per_message, lost_apart = _taken(group, topology, matmul)
    mine = Curves(
        wire=Curve(points),
        flops=2.0 * _MATMUL[0] * _MATMUL[1] * _MATMUL[2] / min(matmuls),
        add_bytes=2 * 4 * _ADD[0] * _ADD[1] / statistics.median(sums),
        cpu_per_byte=per_byte,
        call_overhead=points[0][1],
        cpu_per_message=per_message,
        handover=_handover(),
        uncertainty=max(_apart(matmuls), apart, lost_apart),
    )
    return slowest([Curves.from_json(text) for text in group.tell("curves", mine.to_json())])


def _times(call: Callable[[], object], *, repeats: int = _REPEATS) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _fastest(call: Callable[[], object], *, repeats: int = _REPEATS) -> float:
    return min(_times(call, repeats=repeats))


def _apart(times: Sequence[float]) -> float:
    """How far apart the middle half of some measurements lies, as a part of their median.

    >>> _apart([1.0, 1.0, 1.0, 1.5, 9.0])
    0.5
    """
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def _sums() -> list[float]:
    """Seconds of sums as calls make them: parts that lie in memory, into an output that is new each time.

    What the system takes to give the output its pages is often longer than the sum itself.
    """
    parts = [torch.ones(_ADD) for _ in range(3)]
    found = []
    for i in range(len(parts)):
        out = kernels_for(parts[0]).empty(*_ADD, dtype=torch.float32, device="cpu")
        start = time.perf_counter()
        torch.add(parts[i - 1], parts[i], out=out)
        found.append(time.perf_counter() - start)
    return found


def _handover() -> float:
    worker = Worker("weft-probe")
    return _fastest(lambda: worker.start(lambda job: job.agreed()).join(seconds=PROBE.seconds))


def _wire(group: Group, topology: Topology) -> tuple[tuple[tuple[float, float], ...], float]:
    """Bytes of a host's card against seconds: one rank of each host sends to the next host and receives.

    And how far apart the measurements of the largest message lie.
    """
    points: list[tuple[float, float]] = []
    apart = 0.0
    for size in _SIZES:
        group.barrier(f"probe of {size} bytes")
        neighbours = _neighbours(group, topology)
        seconds = 1e-6  # never the slowest
        if neighbours is not None:
            times = _times(partial(_swap, group, *neighbours, size), repeats=3 if size >= 1 << 20 else _REPEATS)
            seconds, apart = min(times), _apart(times)
        points.append((float(size), seconds))
    return subadditive(points), apart


def _taken(group: Group, topology: Topology, matmul: Callable[[], None]) -> tuple[float, float, float]:
    """CPU seconds that a byte and a message take from a matmul that runs beside them.

    More than the same messages cost alone: they interrupt the matmul and displace its data from the caches. And how far
    apart the measurements of large messages lie, as a part of the time that these took. Of five the second lowest
    counts: other programs only ever add to it.
    """
    neighbours, worker = _neighbours(group, topology), Worker("weft-probe")
    costs, apart = [], 0.0
    for size, messages in (_LARGE, _SMALL):
        group.barrier(f"probe of {messages} messages of {size} bytes beside a matmul")
        if neighbours is not None:
            swaps = partial(_swap, group, *neighbours, size, messages)
            lost = sorted(_lost(worker, swaps, matmul) for _ in range(_REPEATS))
            costs.append(lost[1][0])
            if (size, messages) == _LARGE:
                apart = (lost[3][0] - lost[1][0]) / statistics.median(elapsed for _, elapsed in lost)
    if not costs:
        return 0.0, 0.0, 0.0
    (large, count), (small, many) = _LARGE, _SMALL
    # costs[0] = count * (message + large * byte), costs[1] = many * (message + small * byte)
    per_byte = max(0.0, (costs[0] / count - costs[1] / many) / (large - small))
    return per_byte, max(0.0, costs[1] / many - small * per_byte), apart


def _lost(worker: Worker, swaps: Callable[[], None], matmul: Callable[[], None]) -> tuple[float, float]:
    """Seconds by which matmuls come later while the worker swaps messages, and the seconds that these take."""
    alone = _fastest(matmul, repeats=3)
    job = worker.start(lambda job: swaps())
    start, done = time.perf_counter(), 0
    while not job.is_finished():
        matmul()
        done += 1
    elapsed = time.perf_counter() - start
    job.join(seconds=PROBE.seconds)
    return max(0.0, elapsed - done * alone), elapsed


def _neighbours(group: Group, topology: Topology) -> tuple[int, int] | None:
    """The ranks that a host's first rank sends to and receives from; None for other ranks, and on one host."""
    host = topology.hosts[group.rank]
    if topology.count == 1 or group.rank != topology.ranks_of(host)[0]:
        return None
    right, left = (host + 1) % topology.count, (host - 1) % topology.count
    return topology.ranks_of(right)[0], topology.ranks_of(left)[0]


def _swap(group: Group, right: int, left: int, size: int, messages: int = 1) -> None:
    out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    tag = group.line.mark(Mark.PROBE)
    for _ in range(messages):
        transfers = [group.recv(into, left, tag=tag), group.send(out, right, tag=tag)]
        for transfer in transfers:
            transfer.wait(what=f"probe of {size} bytes")
