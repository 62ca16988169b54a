"""A lab as values: what it is asked to be, what the caller and the lab's process send each other, how a run ended."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from weft.errors import PeerTimeout, RankFailed
from weft.lab.network import MAX_GBPS, MAX_HOSTS, MIN_GBPS


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
class LabRun:
    """What was run: the function's name, on hosts of `devices` ranks, with `timeout` seconds to finish."""

    function: str
    devices: int
    timeout: float

    def who(self, rank: int) -> str:
        """
        >>> LabRun("f", devices=2, timeout=60.0).who(3)
        'rank 3 (host 1, device 1)'
        """
        return f"rank {rank} (host {rank // self.devices}, device {rank % self.devices})"


@dataclass(frozen=True)
class LabJob:
    """One run: `payload` is the pickled `(fn, args)`, which only the ranks unpickle.

    module is where fn is defined, and preparation what multiprocessing's own children get to find it (path,
    directory, main script): the lab's process imports it once, before it forks the ranks.
    """

    payload: bytes
    module: str
    preparation: Mapping[str, object]
    run: LabRun


@dataclass(frozen=True)
class Refusal:
    """The lab's process cannot do what it was asked; `unavailable` when this machine is the reason."""

    text: str
    unavailable: bool = False


class How(Enum):
    """The ways in which a rank's part of a run ends."""

    RETURNED = "returned"
    RAISED = "raised"  # the function raised in the rank
    DIED = "died"  # the process ended without a word: a signal, or os._exit
    STUCK = "stuck"  # still running when the time was over
    STOPPED = "stopped"  # still running when the grace after another rank's failure was over


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    seconds: on the monotonic clock, which all processes of a machine share. For RAISED it is read by the
             rank itself; for DIED it is a time at which the process was known to live, so that a death comes
             before what its peers raise because of it, or at the same time.
    summary: one line, such as `ValueError: boom` or `killed by SIGKILL`
    detail:  the traceback of RAISED, the stacks of STUCK, what faulthandler wrote before DIED
    data:    the pickled result of RETURNED
    """

    rank: int
    how: How
    seconds: float
    summary: str = ""
    detail: str = ""
    data: bytes = b""


def failure(endings: Sequence[Ending], run: LabRun) -> RankFailed | PeerTimeout | None:
    """The error that a run's endings amount to, or None when every rank returned."""
    cause = first_failure(endings)
    if cause is not None:
        return RankFailed(_failed_text(cause, endings, run))
    stuck = [ending for ending in endings if ending.how is How.STUCK]
    if stuck:
        return PeerTimeout(_stuck_text(stuck, endings, run), seconds=run.timeout)
    return None


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed first: the cause, where the others only saw their connection to it break."""
    failed = [ending for ending in endings if ending.how in (How.RAISED, How.DIED)]
    return min(failed, key=lambda ending: (ending.seconds, ending.how is How.RAISED), default=None)


def _failed_text(cause: Ending, endings: Sequence[Ending], run: LabRun) -> str:
    lines = [f"{run.who(cause.rank)} of {len(endings)} failed first in `{run.function}`: {cause.summary}"]
    if cause.detail:
        lines.append(cause.detail.rstrip())
    others = [ending for ending in endings if ending is not cause and ending.how is not How.RETURNED]
    if others:
        lines.append(f"{len(others)} of the other ranks ended after it:")
        lines += [f"  {run.who(ending.rank)} {ending.how.value}: {ending.summary:.200}" for ending in others]
    return "\n".join(lines)


def _stuck_text(stuck: Sequence[Ending], endings: Sequence[Ending], run: LabRun) -> str:
    names = ", ".join(str(ending.rank) for ending in stuck)
    count = f"{len(stuck)} of {len(endings)} ranks of `{run.function}`"
    lines = [f"{count} that were still running, ranks {names}; they were stopped. They were here:"]
    for ending in stuck:
        lines += [f"{run.who(ending.rank)}:", ending.detail.rstrip()]
    return "\n".join(lines)
