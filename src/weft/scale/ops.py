"""One overlapped matmul on declared GPUs: its work in waves of tiles, and the best way to cut it into groups.

Group sizes are chosen where the CPU's are (`weft.overlap.search`), from work in waves and declared curves. Tiles of a
wave end together, so that nothing finer than a wave can be sent earlier. A collective holds some multiprocessors from
its launch to its end, which decides between many groups and few.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.search import bound, decide, partition, predict_sequential
from weft.overlap.speeds import Curves, Work, wave_cuts, work_in_waves
from weft.scale.gpus import ITEM_BYTES, LAUNCH_SECONDS, Gpu, Matmul, declared_curves, find_gpu, tilings, wire_bytes
from weft.timeline import overlap_efficiency

_MOST_UNITS = 96  # the search is quadratic; waves of a matmul with more of them go together


@dataclass(frozen=True)
class OpPrediction:
    """Seconds of an op on each GPU, and the plan that they belong to.

    matmul:      the matmul alone, launched
    wire:        all bytes in one collective
    sequential:  the matmul, then the collective; or the other way round
    overlapped:  with the best plan, which is the sequential one where no other is worth it
    bound:       all computing, or all bytes at once, whichever takes longer: no plan is faster
    """

    plan: OverlapPlan
    matmul: float
    wire: float
    sequential: float
    overlapped: float
    bound: float

    @property
    def speedup(self) -> float:
        """Sequential over overlapped."""
        return self.sequential / self.overlapped

    @property
    def e_overlap(self) -> float:
        """Flux's measure: the hidden part of the time that the matmul alone does not explain; 0 if there is none."""
        found = overlap_efficiency(self.overlapped, matmul_seconds=self.matmul, sequential_seconds=self.sequential)
        return found or 0.0

    @property
    def of_bound(self) -> float:
        """The bound over the predicted time."""
        return self.bound / self.overlapped

    def later(self, seconds: float) -> OpPrediction:
        """The same, followed by other computing."""
        return replace(
            self,
            matmul=self.matmul + seconds,
            sequential=self.sequential + seconds,
            overlapped=self.overlapped + seconds,
            bound=self.bound + seconds,
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "plan"}
        figures = {"speedup": self.speedup, "e_overlap": self.e_overlap, "of_bound": self.of_bound}
        return {"plan": str(self.plan), **fields, **figures}


def predict_op(
    gpu: Gpu | str,
    op: Op | str,
    m: int,
    n: int,
    k: int,
    *,
    tp: int,
    dtype: str = "bfloat16",
    transport: Transport | None = None,
    tail: float = 0.0,
) -> OpPrediction:
    """The prediction for [m, k] x [n, k]^T of `tp` GPUs together; m counts all rows, for all-to-all those of one GPU.

    n is cut among the GPUs where the input is gathered, k where the product is summed; uneven parts are rounded up.
    transport: windows (tiles go to peers' memory, as in Flux), messages (collectives on groups of tiles, as in
          FlashOverlap), or whichever is faster; the sequential op is always a collective.
    tail: seconds of other computing that follows and does not need the result, such as the weights' gradient; it is
          part of every figure but `wire`. A collective may hide behind it without overlap, too, as in Megatron-LM.

    >>> found = predict_op("H800", "matmul_reduce_scatter", 8192, 12288, 49152, tp=8)
    >>> found.bound < found.overlapped < found.sequential
    True
    """
    gpu, op = find_gpu(gpu) if isinstance(gpu, str) else gpu, Op(op)
    if min(m, n, k) < 1:
        raise ValueError(f"got m={m}, n={n}, k={k}; expected sizes of at least 1")
    if not 1 <= tp <= gpu.devices:
        raise ValueError(f"got tp={tp}; expected 1 to {gpu.devices}, the GPUs of one host of {gpu.name}")
    if transport is Transport.WINDOWS and not gpu.peers:
        raise ValueError(f"got windows on {gpu.name}, whose GPUs cannot map each other's memory; expected messages")
    n = -(-n // tp) if op is Op.ALL_GATHER else n
    k = -(-k // tp) if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) else k
    # Where the input travels, the matmul waits for it and the tail for the matmul; else the tail waits for nothing.
    behind = 0.0 if op.gathers or tp == 1 else tail
    cases = WaveCase.each(gpu, op, m, n, k, tp, dtype, behind)
    if tp == 1:
        return _alone(cases[0]).later(tail)
    usual = tuple(Transport) if gpu.peers else (Transport.MESSAGES,)
    return _predicted(cases, usual if transport is None else (transport,)).later(tail - behind)


def _alone(case: WaveCase) -> OpPrediction:
    seconds = case.matmul.seconds + LAUNCH_SECONDS
    plan = replace(case.plan(Transport.WINDOWS), reason="there is only one GPU")
    return OpPrediction(plan, seconds, 0.0, seconds, seconds, seconds)


@lru_cache(maxsize=4096)
def _predicted(cases: tuple[WaveCase, ...], transports: tuple[Transport, ...]) -> OpPrediction:
    """The best of all tilings and transports, beside the fastest matmul and a collective."""
    case = cases[0]
    plain, work = case.curves(Transport.MESSAGES), case.work(Transport.MESSAGES)
    wire = plain.wire(sum(work.nbytes))
    # Without a tail this is compute, then wire; with one, the collective runs behind it.
    sequential = predict_sequential(replace(work, after=max(0.0, case.tail - wire)), plain)
    limit, found = sequential, []
    for transport in transports:
        limit = min(limit, max(bound(work, case.curves(transport)), work.compute + case.tail))
        found += [tiled.best_plan(transport) for tiled in cases]
    plan = decide(found, (sequential, case.plan(Transport.MESSAGES)))[0]
    best, waves = plan.predicted or sequential, case.matmul.waves
    plan = replace(plan, reason=f"{waves} wave{'s' * (waves > 1)}; {plan.reason}")
    alone = case.matmul.seconds + LAUNCH_SECONDS + case.tail
    return OpPrediction(plan, alone, wire, sequential, best, limit)


@dataclass(frozen=True)
class WaveCase:
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
    def each(
        cls, gpu: Gpu, op: Op, m: int, n: int, k: int, tp: int, dtype: str, tail: float = 0.0
    ) -> tuple[WaveCase, ...]:
        """The op with each of the tilings, the fastest matmul first."""
        return tuple(cls(gpu, op, m, n, k, tp, dtype, t, tail) for t in tilings(gpu, m, n, k, dtype=dtype))

    @property
    def waves(self) -> int:
        """Waves whose tiles travel, or wait for what does; the rows that are there from the start fill the others."""
        return self.matmul.waves - (self.matmul.waves // self.tp if self.op.gathers else 0)

    def curves(self, transport: Transport) -> Curves:
        return declared_curves(self.gpu, self.op, self.tp, transport, dtype=self.dtype)

    def plan(self, transport: Transport, groups: tuple[int, ...] = ()) -> OverlapPlan:
        """Groups count waves, which are relative sizes of what is sent."""
        found, hosts = self.matmul, (0,) * self.tp
        plan = OverlapPlan(self.op, self.m, self.n, self.k, self.dtype, hosts, transport, groups=groups)
        return replace(plan, tile_m=found.tile_m, tile_n=found.tile_n)

    def work(self, transport: Transport) -> Work:
        """The waves, at most 96 units of them."""
        item, found = ITEM_BYTES[self.dtype], self.matmul
        # Through windows each adds up its share of the rows: it reads the parts of all, and writes the sum.
        summed = transport is Transport.WINDOWS and self.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE)
        added = -(-self.m // self.tp) * self.n * item * (self.tp + 1) / self.gpu.copy_rate if summed else 0.0
        nbytes = wire_bytes(self.op, m=self.m, n=self.n, k=self.k, item=item, size=self.tp)
        work = work_in_waves(
            self.op, ranks=self.tp, tiles=found.tiles, at_once=self.gpu.processors, seconds=found.seconds,
            nbytes=nbytes, units=_MOST_UNITS, after=added,
        )  # fmt: skip
        return work if self.op.gathers else replace(work, after=added + self.tail)

    def best_plan(self, transport: Transport) -> tuple[float, OverlapPlan]:
        """The fewest seconds, and the plan that takes them, whose groups count waves.

        >>> from weft.scale.gpus import find_gpu
        >>> case, _ = WaveCase.each(find_gpu("A100"), Op.REDUCE_SCATTER, 4096, 12288, 6144, 8, "bfloat16")
        >>> [len(case.best_plan(transport)[1].groups) for transport in Transport]
        [26, 12]
        """
        seconds, groups = partition(self.work(transport), self.curves(transport))
        cuts = wave_cuts(self.waves, _MOST_UNITS)
        ends = [cuts[unit] for unit in (0, *accumulate(groups))]
        return seconds, self.plan(transport, tuple(b - a for a, b in pairwise(ends)))
