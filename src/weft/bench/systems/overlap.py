"""What `weft bench overlap` measures: ops, shapes and ranks, over a link slow enough for the share of communication.

The systems, each as its own users would call it, on the ranks of a lab:

torch:       the matmul, then the collective, with gloo
decomposed:  the matmul in P or 2 P chunks, each chunk's collective running while the next is computed; the faster
sequential:  weft's matmul, then weft's communication
weft:        the plan that a user gets who does not give one

And what no system beats: the matmul alone, the wire alone, and both at once where neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from weft import overlap
from weft.bench.harness import Case, System, lab_meter, measure, rank_seconds, slowest
from weft.comm import Group
from weft.kernels import linear
from weft.overlap.executor.resources import pack
from weft.overlap.plan import Op, OverlapPlan

OPS = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL)
RANKS = ((2, 1), (1, 2), (2, 2))  # hosts, devices of each
SHARES = (0.25, 0.5, 1.0, 2.0)
ROWS = (64, 512, 2048)
WEIGHTS = ((768, 3072), (3072, 768), (1024, 4096))  # K, N: a GPT-3 MLP at 1/16 scale, and a larger one
LOOPBACK_GBPS = 1.0  # of a card that a single host does not use
SMALL_ROWS = (1, 16, 64, 128)  # of calls in which messages, threads and Python cost more than the matmul
SMALL_WEIGHT = (384, 768)
SMALL_GBPS = 1.0


@dataclass(frozen=True)
class OverlapCase:
    """One row: an op with [m, k] x [n, k]^T on each rank; `share` is seconds on the wire over seconds of the matmul."""

    op: Op
    hosts: int
    devices: int
    share: float | None
    m: int
    k: int
    n: int
    small: bool = False  # a row that is compared with torch alone: nothing of it is worth cutting

    @property
    def name(self) -> str:
        share = "" if self.share is None else f", share {self.share:g}"
        return f"{self.op.value} {self.m}x{self.k}x{self.n}, {self.hosts}x{self.devices}{share}"

    @property
    def short_name(self) -> str:
        """The name as a narrow table has room for it."""
        op = self.op.value.replace("matmul", "").strip("_").replace("_", "-")
        share = "" if self.share is None else f" {self.share:g}"
        return f"{op} {self.m}x{self.k}x{self.n} {self.hosts}x{self.devices}{share}"

    @property
    def compares_plans(self) -> bool:
        """Whether other plans are measured beside the chosen one, and the page draws it: for the largest matmuls."""
        return self.m == ROWS[-1] and (self.k, self.n) in WEIGHTS[:2] and self.hosts > 1 and self.share == 1.0

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices

    @property
    def card_bytes(self) -> float:
        """Bytes that must leave each host, at least."""
        away = 1 - 1 / self.hosts  # the part of the rows that belongs to other hosts
        if self.op is Op.ALL_GATHER:
            return 4.0 * self.m * self.k * away
        if self.op is Op.ALL_TO_ALL:
            return 4.0 * self.m * self.n * away * self.devices
        whole = 4.0 * self.m * self.n
        return whole * away if self.op is Op.REDUCE_SCATTER else whole * 2 * away

    def gbps(self, flops: float, cores: int) -> float:
        """The rate at which the wire takes `share` times as long as the matmul, at `flops` a second and core."""
        if self.share is None:
            return SMALL_GBPS if self.small else LOOPBACK_GBPS
        matmul = 2.0 * self.m * self.k * self.n / flops * max(1.0, self.ranks / cores)
        return self.card_bytes * 8 / (self.share * matmul) / 1e9


def cases() -> Iterator[OverlapCase]:
    """Every row."""
    for hosts, devices in RANKS:
        for op in OPS:
            for share in SHARES if hosts > 1 else (None,):
                for m in ROWS:
                    for k, n in WEIGHTS:
                        yield OverlapCase(op, hosts, devices, share, m, k, n)
    for hosts, devices in ((2, 1), (1, 2)):
        for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER):
            # torch's collectives of parts want as many rows of every rank.
            yield from (_small(op, hosts, devices, m) for m in SMALL_ROWS if op is Op.ALL_REDUCE or m > 1)


def _small(op: Op, hosts: int, devices: int, m: int) -> OverlapCase:
    k, n = SMALL_WEIGHT
    return OverlapCase(op, hosts, devices, None, m, k, n, small=True)


def quick_cases() -> list[OverlapCase]:
    """The fewest rows that fill the summary."""
    return [
        OverlapCase(Op.REDUCE_SCATTER, 2, 1, 1.0, 2048, 768, 3072),
        OverlapCase(Op.ALL_GATHER, 2, 1, 1.0, 2048, 3072, 768),
        OverlapCase(Op.ALL_REDUCE, 2, 1, 0.5, 512, 768, 3072),
        OverlapCase(Op.ALL_TO_ALL, 2, 1, 0.5, 2048, 768, 3072),
        OverlapCase(Op.ALL_GATHER, 1, 2, None, 512, 3072, 768),
        *(_small(Op.ALL_REDUCE, 2, 1, m) for m in SMALL_ROWS),
        _small(Op.REDUCE_SCATTER, 1, 2, 128),
    ]


_PROBE = (256, 1024, 1024)  # m, k, n


def matmul_flops() -> float:
    """Flops a second of this rank in weft's matmul while all ranks compute."""
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    return 2.0 * m * k * n / rank_seconds(lambda: linear(x, w))


_PEAK_SHAPES = ((256, 1024, 1024), (1024, 768, 3072), (1024, 3072, 768))


def peak_flops() -> float:
    """The most flops a second that this rank shows in any matmul, weft's or torch's, while all ranks compute."""
    best = 0.0
    for m, k, n in _PEAK_SHAPES:
        x, w = torch.randn(m, k), torch.randn(n, k)
        packed = pack(w)
        calls: dict[str, System] = {"weft": partial(linear, x, packed), "torch": partial(F.linear, x, w)}
        measured = measure(Case("peak", calls), rounds=5, max_retries=0, meter=lab_meter(), agree=slowest)
        best = max(best, *(2.0 * m * k * n / measured.best(name) for name in calls))
    return best


class Systems:
    """The inputs of one case on one rank, and every system as a function without arguments."""

    def __init__(self, case: OverlapCase, group: dist.ProcessGroup) -> None:
        self.case, self.group, self.size, self.rank = case, group, group.size(), group.rank()
        rows = case.m // self.size if case.op is Op.ALL_GATHER else case.m
        self.x, self.w = torch.randn(rows, case.k), torch.randn(case.n, case.k)
        self.packed = pack(self.w)
        self.to = torch.arange(case.m) * self.size // case.m
        self.whole = torch.randn(case.m, case.k)
        self.out = torch.empty(case.m, case.n)

    def weft(self, plan: OverlapPlan | None) -> Tensor:
        if self.case.op is Op.ALL_GATHER:
            return overlap.all_gather_matmul(self.x, self.packed, group=self.group, plan=plan)
        if self.case.op is Op.ALL_TO_ALL:
            return overlap.matmul_all_to_all(self.x, self.packed, self.to, group=self.group, plan=plan)
        reduce = {Op.REDUCE_SCATTER: overlap.matmul_reduce_scatter, Op.ALL_REDUCE: overlap.matmul_all_reduce}
        return reduce[self.case.op](self.x, self.packed, group=self.group, plan=plan)

    def matmul(self) -> Tensor:
        return linear(self.whole, self.packed, out=self.out)

    def wire(self, group: Group, *, beside: System = bool) -> System:
        """The bytes of the op, rank to rank, and nothing else but what is computed `beside` them and waits for none."""
        here = group.hosts[self.rank]
        peers = [r for r in range(self.size) if group.hosts[r] != here]
        if not peers:
            return beside
        nbytes = int(self.case.card_bytes / self.case.devices / len(peers))
        out, into = torch.zeros(nbytes, dtype=torch.uint8), [torch.empty(nbytes, dtype=torch.uint8) for _ in peers]

        def exchange() -> None:
            transfers = [group.recv(data, peer) for data, peer in zip(into, peers, strict=True)]
            transfers += [group.send(out, peer) for peer in peers]
            beside()
            for transfer in transfers:
                transfer.wait(what="the wire alone")

        return exchange

    def torch(self) -> Tensor:
        if self.case.op is Op.ALL_GATHER:
            gathered = torch.empty(self.case.m, self.case.k)
            dist.all_gather(list(gathered.chunk(self.size)), self.x, group=self.group)
            return F.linear(gathered, self.w)
        y = F.linear(self.x, self.w)
        return self._collective(y, async_op=False)[0]

    def _collective(self, y: Tensor, *, async_op: bool) -> tuple[Tensor, Any]:
        """The collective of the op on some rows of the product; each destination has an equal part of them."""
        if self.case.op is Op.ALL_REDUCE:
            return y, dist.all_reduce(y, group=self.group, async_op=async_op)
        out = y.new_empty(y.shape[0] // self.size if self.case.op is Op.REDUCE_SCATTER else y.shape[0], y.shape[1])
        if self.case.op is Op.ALL_TO_ALL:
            return out, dist.all_to_all_single(out, y, group=self.group, async_op=async_op)
        return out, dist.reduce_scatter(out, list(y.chunk(self.size)), group=self.group, async_op=async_op)

    def decomposed(self, chunks: int) -> Tensor:
        """`chunks` collectives in flight behind as many matmuls. Rows of a chunk are equal parts for all ranks."""
        if self.case.op is Op.ALL_GATHER:
            return self._decomposed_gather(chunks)
        # Chunk c takes the c-th part of every destination's rows.
        parts = self.x.view(self.size, chunks, -1, self.case.k).transpose(0, 1).flatten(1, 2)
        pending = [self._collective(F.linear(part, self.w), async_op=True) for part in parts]
        for _, work in pending:
            work.wait()
        return torch.cat([out for out, _ in pending])

    def _decomposed_gather(self, chunks: int) -> Tensor:
        pending = []
        for part in self.x.chunk(chunks):
            into = [torch.empty_like(part) for _ in range(self.size)]
            pending.append((into, dist.all_gather(into, part, group=self.group, async_op=True)))
        out = torch.empty(self.case.m, self.case.n)
        by_rank = out.view(self.size, chunks, -1, self.case.n)
        for i, (into, work) in enumerate(pending):
            work.wait()
            for source, rows in enumerate(into):
                torch.mm(rows, self.w.t(), out=by_rank[source, i])
        return out
