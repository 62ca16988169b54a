"""How well communication was hidden behind a matmul, after Flux.

`ECT = time - best matmul alone` is the communication time that is left to see, and
`E_overlap = 1 - ECT(ours) / ECT(sequential)`: 1 is all hidden, 0 is no better than matmul and then communication, and a
negative figure is harm.
"""

from __future__ import annotations

from dataclasses import dataclass


def exposed_seconds(seconds: float, *, matmul_seconds: float) -> float:
    """ECT: the part of `seconds` that the matmul alone does not explain.

    >>> exposed_seconds(12.0, matmul_seconds=10.0)
    2.0
    """
    return seconds - matmul_seconds


def overlap_efficiency(seconds: float, *, matmul_seconds: float, sequential_seconds: float) -> float | None:
    """E_overlap; None where the sequential run is no slower than its matmul: there is nothing to hide.

    >>> overlap_efficiency(12.0, matmul_seconds=10.0, sequential_seconds=18.0)
    0.75
    """
    hideable = exposed_seconds(sequential_seconds, matmul_seconds=matmul_seconds)
    if hideable <= 0:
        return None
    return 1.0 - exposed_seconds(seconds, matmul_seconds=matmul_seconds) / hideable


@dataclass(frozen=True)
class Baseline:
    """The best matmul alone, matmul and then communication, a bound, and communication alone, where they are known."""

    matmul_seconds: float
    sequential_seconds: float
    bound_seconds: float | None = None
    communication_seconds: float | None = None


class Judged:
    """What took `seconds`, beside a baseline: the figures that both together give."""

    seconds: float
    baseline: Baseline | None

    @property
    def ect(self) -> float | None:
        """Exposed seconds of communication; None without a baseline."""
        if self.baseline is None:
            return None
        return exposed_seconds(self.seconds, matmul_seconds=self.baseline.matmul_seconds)

    @property
    def e_overlap(self) -> float | None:
        """Overlap efficiency; None without a baseline, or where the baseline leaves nothing to hide."""
        if self.baseline is None:
            return None
        return overlap_efficiency(
            self.seconds,
            matmul_seconds=self.baseline.matmul_seconds,
            sequential_seconds=self.baseline.sequential_seconds,
        )

    @property
    def bound_fraction(self) -> float | None:
        """The bound over the time: 1 is at the bound. None where no bound is known, or no time was taken."""
        bound = self.baseline.bound_seconds if self.baseline else None
        return None if bound is None or self.seconds == 0 else bound / self.seconds
