"""One overlapped matmul on declared GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.predict import bound, predict_sequential
from weft.scale.gpus import LAUNCH_SECONDS, Gpu, find_gpu
from weft.scale.waves import Case, best_partition
from weft.timeline import overlap_efficiency

# As for the CPU's planner: a plan must promise this much over the sequential one.
_WORTH = 0.985


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
    cases = Case.each(gpu, op, m, n, k, tp, dtype, behind)
    if tp == 1:
        return _alone(cases[0]).later(tail)
    usual = tuple(Transport) if gpu.peers else (Transport.MESSAGES,)
    return _predicted(cases, usual if transport is None else (transport,)).later(tail - behind)


def _alone(case: Case) -> OpPrediction:
    seconds = case.matmul.seconds + LAUNCH_SECONDS
    plan = replace(case.plan(Transport.WINDOWS), reason="there is only one GPU")
    return OpPrediction(plan, seconds, 0.0, seconds, seconds, seconds)


@lru_cache(maxsize=4096)
def _predicted(cases: tuple[Case, ...], transports: tuple[Transport, ...]) -> OpPrediction:
    """The best of all tilings and transports, beside the fastest matmul and a collective."""
    case = cases[0]
    plain, work = case.curves(Transport.MESSAGES), case.work(Transport.MESSAGES)
    wire = plain.wire(sum(work.nbytes))
    # Without a tail this is compute, then wire; with one, the collective runs behind it.
    sequential = predict_sequential(replace(work, after=max(0.0, case.tail - wire)), plain)
    best, plan, limit = sequential, case.plan(Transport.MESSAGES), sequential
    for transport in transports:
        limit = min(limit, max(bound(work, case.curves(transport)), work.compute + case.tail))
        for tiled in cases:
            seconds, groups = best_partition(tiled, transport)
            if seconds < min(best, _WORTH * sequential):
                best, plan = seconds, tiled.plan(transport, groups)
    why = f"{best * 1e3:.3g} ms predicted, {sequential * 1e3:.3g} ms sequentially"
    if plan.sequential:
        why = f"{case.matmul.waves} waves: overlap is not worth it, {sequential * 1e3:.3g} ms without"
    alone = case.matmul.seconds + LAUNCH_SECONDS + case.tail
    return OpPrediction(replace(plan, predicted=best, reason=why), alone, wire, sequential, best, limit)
