"""What the machines are: hosts and the rates of their network cards, as declared values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.layout import format_ints, parse_ints


@dataclass(frozen=True)
class Cluster:
    """Hosts, each behind one full-duplex network card that its devices share.

    gbps:    payload rate of each host's card in Gbit/s, the same in and out at once
    latency: seconds from the start of a message to its first byte on the other side

    >>> Cluster.uniform(4, gbps=10.0).rate(0)
    1250000000.0
    """

    gbps: tuple[float, ...]
    latency: float = 100e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "gbps", tuple(float(rate) for rate in self.gbps))
        if not self.gbps or not all(math.isfinite(rate) and rate > 0 for rate in self.gbps):
            raise ValueError(f"gbps is {self.gbps}, expected one finite rate above 0 for each host")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency is {self.latency}, expected seconds, finite and 0 or more")

    @classmethod
    def uniform(cls, hosts: int, *, gbps: float, latency: float = 100e-6) -> Cluster:
        """`hosts` equal hosts."""
        return cls((gbps,) * hosts, latency)

    @property
    def hosts(self) -> int:
        """The number of hosts; they count from 0."""
        return len(self.gbps)

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """The card of each host in bytes/s."""
        return np.array(self.gbps) * 1e9 / 8

    def rate(self, host: int) -> float:
        """The card of a host in bytes/s."""
        return float(self.rates[host])

    def __str__(self) -> str:
        values = sorted(set(self.gbps))
        kinds = format_ints(values.index(rate) for rate in self.gbps)
        rates = ",".join(f"{rate!r}" for rate in values)
        return f"{self.hosts} hosts at {rates} Gbit/s, cards {kinds}, latency {self.latency!r} s"

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster that prints as `text`.

        >>> cluster = Cluster((1.0, 2.5, 1.0))
        >>> Cluster.parse(str(cluster)) == cluster
        True
        """
        try:
            body, latency = text.removesuffix(" s").split(", latency ")
            head, cards = body.split(" Gbit/s, cards ")
            rates = [float(rate) for rate in head.split(" hosts at ")[1].split(",")]
            return cls(tuple(rates[card] for card in parse_ints(cards)), float(latency))
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"got the cluster {text!r}, expected one such as {str(cls((1.0, 1.0)))!r} ({error})"
            ) from error
