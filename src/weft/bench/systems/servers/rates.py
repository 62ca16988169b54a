"""The most requests a second that a server answers within a p99: arrivals, percentiles and the search, all pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; infinite if there are none.

    By rank, without interpolation, so that "p99 within a limit" and "at most one in a hundred over it" are the same.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    if not 0 < share <= 1:
        raise ValueError(f"got the share {share}, expected one above 0, up to 1")
    return sorted(values)[rank(len(values), share) - 1] if values else math.inf


def rank(count: int, share: float) -> int:
    """How many of `count` values must not exceed the percentile.

    >>> rank(200, 0.99), rank(60, 0.99)
    (198, 60)
    """
    return math.ceil(round(share * count, 9))


def poisson_times(count: int, *, rate: float, seed: int = 0) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average, the first at 0. At another rate the same
    pattern is faster or slower.

    >>> poisson_times(3, rate=1.0) == [2 * at for at in poisson_times(3, rate=2.0)]
    True
    """
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(1.0)
    return [at / rate for at in times]


@dataclass(frozen=True)
class RateSearch:
    """A search for the largest rate that passes, between two rates, in `steps` halvings of their ratio.

    It is a value: `tell` gives the search after a trial. `low` is the largest rate that passed, once one did.

    >>> search = RateSearch(1.0, 16.0, steps=2)
    >>> search.rate, search.tell(True).rate, search.tell(True).tell(False).found
    (4.0, 8.0, 4.0)
    """

    low: float
    high: float
    steps: int
    passed: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"got rates from {self.low} to {self.high}, expected the first to be the smaller one")

    @property
    def rate(self) -> float:
        """The rate to try next."""
        return math.sqrt(self.low * self.high)

    @property
    def is_done(self) -> bool:
        return self.steps <= 0

    @property
    def found(self) -> float | None:
        """The largest rate that passed; None if none did."""
        return self.low if self.passed else None

    def tell(self, is_good: bool) -> RateSearch:
        """The search after the trial of `rate`."""
        if is_good:
            return RateSearch(self.rate, self.high, self.steps - 1, True)
        return RateSearch(self.low, self.rate, self.steps - 1, self.passed)

    def lower_if_none(self, first: RateSearch) -> RateSearch:
        """This search; where it ended and no rate passed, one below it, down to a thirtieth of where `first` began.

        >>> RateSearch(10.0, 20.0, steps=0).lower_if_none(RateSearch(10.0, 30.0, steps=4))
        RateSearch(low=2.5, high=10.0, steps=2, passed=False)
        """
        if not self.is_done or self.passed or self.low <= first.low / 30:
            return self
        return RateSearch(self.low / 4, self.low, max(1, first.steps // 2))


@dataclass(frozen=True)
class Slope:
    """What y gains for each x, and how much of that is noise: twice the scatter around the line, over the range of x.

    >>> Slope.of([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
    Slope(gain=2.0, noise=0.0)
    """

    gain: float
    noise: float

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Slope:
        if len(x) != len(y) or len(set(x)) < 2:
            raise ValueError(f"got {len(x)} x and {len(y)} y, expected as many, at two places at least")
        middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
        width = sum((a - middle_x) ** 2 for a in x)
        gain = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / width
        rest = [b - middle_y - gain * (a - middle_x) for a, b in zip(x, y, strict=True)]
        scatter = math.sqrt(sum(r * r for r in rest) / len(rest))
        return cls(gain, 2 * scatter / (max(x) - min(x)))

    @property
    def is_flat(self) -> bool:
        """Whether it could be noise."""
        return abs(self.gain) <= self.noise
