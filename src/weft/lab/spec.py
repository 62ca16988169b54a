"""What a lab is asked to be, and what travels between the caller and the lab's own process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.lab.network import MAX_GBPS, MAX_HOSTS, MIN_GBPS
from weft.lab.outcome import Run


@dataclass(frozen=True)
class Spec:
    """A lab: `hosts` hosts of `devices` ranks; rank r is device `r % devices` of host `r // devices`.

    gbps is the TCP payload rate of each host's card in Gbit/s, or None for plain loopback.
    """

    name: str
    hosts: int
    devices: int
    gbps: float | None
    threads: int

    def __post_init__(self) -> None:
        for what in ("hosts", "devices", "threads"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what} is {value!r}; expected a whole number, at least 1")
        if self.hosts > MAX_HOSTS and self.gbps is not None:
            raise ValueError(
                f"hosts is {self.hosts}; the lab's switch has {MAX_HOSTS} addresses (10.77.0.0/24). "
                "Use fewer hosts with more devices each, or gbps=None for plain loopback"
            )
        if self.gbps is not None and not _is_rate(self.gbps):
            raise ValueError(
                f"gbps is {self.gbps!r}; expected a rate in Gbit/s from {MIN_GBPS:g} to {MAX_GBPS:g}, or "
                "None for plain loopback without rate limits"
            )
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise ValueError(f"name is {self.name!r}; expected 1 to 64 letters, digits, dots, dashes or underscores")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.hosts * self.devices

    def describe(self) -> str:
        """One line.

        >>> Spec("a", hosts=2, devices=2, gbps=1.0, threads=1).describe()
        'lab a: 2 hosts x 2 devices, each host behind one full-duplex card of 1 Gbit/s; loopback inside a host is not limited'
        >>> Spec("a", hosts=2, devices=2, gbps=None, threads=1).describe()
        'lab a: 2 hosts x 2 devices on plain loopback: no namespaces, no rate limit, hosts in name only'
        """  # noqa: E501
        shape = f"lab {self.name}: {self.hosts} hosts x {self.devices} devices"
        if self.gbps is None:
            return f"{shape} on plain loopback: no namespaces, no rate limit, hosts in name only"
        return (
            f"{shape}, each host behind one full-duplex card of {self.gbps:g} Gbit/s; "
            "loopback inside a host is not limited"
        )


def _is_rate(gbps: object) -> bool:
    number = isinstance(gbps, (int, float)) and not isinstance(gbps, bool)
    return number and math.isfinite(gbps) and MIN_GBPS <= gbps <= MAX_GBPS  # type: ignore[operator, arg-type]


@dataclass(frozen=True)
class Job:
    """One run: `payload` is the pickled `(fn, args)`, which only the ranks unpickle.

    module is where fn is defined, and preparation what multiprocessing's own children get to find it (path,
    directory, main script): the lab's process imports it once, before it forks the ranks.
    """

    payload: bytes
    module: str
    preparation: Mapping[str, object]
    run: Run


@dataclass(frozen=True)
class Refusal:
    """The lab's process cannot do what it was asked; `unavailable` when this machine is the reason."""

    text: str
    unavailable: bool = False
