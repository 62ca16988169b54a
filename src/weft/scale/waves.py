"""The work of one op in waves of tiles, and the best way to cut it into groups, by the predictor of the CPU's planner.

Tiles of a wave end together, so that nothing finer than a wave can be sent earlier. A collective holds some
multiprocessors from its launch to its end. The predictor counts that for the bytes; what it costs to start is added
here, for partitions of finer and of coarser units, and so decides between many groups and few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.predict import Work, best_groups, predict
from weft.overlap.tiles import cut_points
from weft.scale.gpus import ITEM_BYTES, Gpu
from weft.scale.roofline import Matmul, tilings
from weft.scale.wires import declared_curves, wire_bytes

_MOST_UNITS = 96  # the search is quadratic; waves of a matmul with more of them go together
_COARSER = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)


@dataclass(frozen=True)
class Case:
    """An op [m, k] x [n, k]^T on each of `tp` GPUs, where n and k are what one of them computes with.

    matmul: its tiles and waves
    tail:   seconds of computing that follows and does not need the op's result
    """

    gpu: Gpu
    op: Op
    m: int
    n: int
    k: int
    tp: int
    dtype: str
    matmul: Matmul
    tail: float = 0.0

    @classmethod
    def each(cls, gpu: Gpu, op: Op, m: int, n: int, k: int, tp: int, dtype: str, tail: float = 0.0) -> tuple[Case, ...]:
        """The op with each of the tilings, the fastest matmul first."""
        return tuple(cls(gpu, op, m, n, k, tp, dtype, t, tail) for t in tilings(gpu, m, n, k, dtype=dtype))

    @property
    def ahead(self) -> int:
        """Waves of the rows that are there from the start, as far as they fill whole ones."""
        return self.matmul.waves // self.tp if self.op.gathers else 0

    @property
    def waves(self) -> int:
        """Waves whose tiles travel, or wait for what does."""
        return self.matmul.waves - self.ahead

    def curves(self, transport: Transport) -> Curves:
        return declared_curves(self.gpu, self.op, self.tp, transport, dtype=self.dtype)

    def plan(self, transport: Transport, groups: tuple[int, ...] = ()) -> OverlapPlan:
        """Groups count waves, which are relative sizes of what is sent."""
        found, hosts = self.matmul, (0,) * self.tp
        plan = OverlapPlan(self.op, self.m, self.n, self.k, self.dtype, hosts, transport, groups=groups)
        return replace(plan, tile_m=found.tile_m, tile_n=found.tile_n)

    def cuts(self, units: int) -> tuple[int, ...]:
        """Where each of so many units begins, in waves, and the end."""
        return cut_points(self.waves, [1] * min(self.waves, units))

    def work(self, transport: Transport, units: int = _MOST_UNITS) -> Work:
        """The waves in so many units."""
        item, found, cuts = ITEM_BYTES[self.dtype], self.matmul, self.cuts(units)
        nbytes = wire_bytes(self.op, m=self.m, n=self.n, k=self.k, item=item, size=self.tp)
        wave = found.seconds / found.waves
        seconds = tuple(wave * (b - a) for a, b in pairwise(cuts))
        if self.op.gathers:
            shares = tuple(nbytes * (b - a) / self.waves for a, b in pairwise(cuts))
            return Work(seconds, shares, before=wave * self.ahead, backwards=True)
        # The last wave has only the tiles that are left over.
        done = [min(self.gpu.processors * cut, found.tiles) for cut in cuts]
        shares = tuple(nbytes * (b - a) / found.tiles for a, b in pairwise(done))
        # Through windows each adds up its share of the rows: it reads the parts of all, and writes the sum.
        summed = transport is Transport.WINDOWS and self.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE)
        added = -(-self.m // self.tp) * self.n * item * (self.tp + 1) / self.gpu.copy_rate if summed else 0.0
        return Work(seconds, shares, after=added + self.tail, last=added / len(seconds))


def best_partition(case: Case, transport: Transport) -> tuple[float, tuple[int, ...]]:
    """The fewest seconds, and the groups in waves that take them.

    >>> from weft.scale.gpus import find_gpu
    >>> case, _ = Case.each(find_gpu("A100"), Op.REDUCE_SCATTER, 4096, 12288, 6144, 8, "bfloat16")
    >>> [len(best_partition(case, transport)[1]) for transport in Transport]
    [26, 12]
    """
    curves, found = case.curves(transport), []
    coarser = [units for units in _COARSER if units < case.waves] if transport is Transport.MESSAGES else []
    for units in (_MOST_UNITS, *coarser):
        work, cuts = case.work(transport, units), case.cuts(units)
        groups = best_groups(work, curves)
        held = held_seconds(case, transport, work, groups, curves)
        ends = [cuts[unit] for unit in (0, *accumulate(groups))]
        sizes = tuple(b - a for a, b in pairwise(ends))
        found.append((predict(replace(work, after=work.after + held), groups, curves), sizes))
    return min(found)


def held_seconds(case: Case, transport: Transport, work: Work, groups: Sequence[int], curves: Curves) -> float:
    """Seconds of the matmul that collectives cost beyond those that the predictor counts for their bytes."""
    if transport is Transport.WINDOWS:
        return 0.0
    ends = (0, *accumulate(groups))
    sizes = [sum(work.nbytes[a:b]) for a, b in pairwise(ends)]
    during = sizes if work.backwards else sizes[:-1]  # the last group goes when all is computed
    share = case.gpu.channels / case.gpu.processors
    return sum(share * curves.wire(size) - curves.cpu_per_byte * size for size in during)
