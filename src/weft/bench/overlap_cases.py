"""What `weft bench overlap` measures: ops, shapes, ranks, and a link slow enough for the share of communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.overlap.plan import Op

OPS = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL)
RANKS = ((2, 1), (1, 2), (2, 2))  # hosts, devices of each
SHARES = (0.25, 0.5, 1.0, 2.0)
ROWS = (64, 512, 2048)
WEIGHTS = ((768, 3072), (3072, 768), (1024, 4096))  # K, N: a GPT-3 MLP at 1/16 scale, and a larger one
LOOPBACK_GBPS = 1.0  # of a card that a single host does not use


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
            return LOOPBACK_GBPS
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


def quick_cases() -> list[OverlapCase]:
    """The fewest rows that fill the summary."""
    return [
        OverlapCase(Op.REDUCE_SCATTER, 2, 1, 1.0, 2048, 768, 3072),
        OverlapCase(Op.ALL_GATHER, 2, 1, 1.0, 2048, 3072, 768),
        OverlapCase(Op.ALL_REDUCE, 2, 1, 0.5, 512, 768, 3072),
        OverlapCase(Op.ALL_TO_ALL, 2, 1, 0.5, 2048, 768, 3072),
        OverlapCase(Op.ALL_GATHER, 1, 2, None, 512, 3072, 768),
    ]
