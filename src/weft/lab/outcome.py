"""How a run ended, rank by rank, and what that means for the caller: values and pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weft.errors import PeerTimeout, RankFailed


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


@dataclass(frozen=True)
class Run:
    """What was run: the function's name, on hosts of `devices` ranks, with `timeout` seconds to finish."""

    function: str
    devices: int
    timeout: float

    def who(self, rank: int) -> str:
        """
        >>> Run("f", devices=2, timeout=60.0).who(3)
        'rank 3 (host 1, device 1)'
        """
        return f"rank {rank} (host {rank // self.devices}, device {rank % self.devices})"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed first: the cause, where the others only saw their connection to it break."""
    failed = [ending for ending in endings if ending.how in (How.RAISED, How.DIED)]
    return min(failed, key=lambda ending: (ending.seconds, ending.how is How.RAISED), default=None)


def failure(endings: Sequence[Ending], run: Run) -> RankFailed | PeerTimeout | None:
    """The error that a run's endings amount to, or None when every rank returned."""
    cause = first_failure(endings)
    if cause is not None:
        return RankFailed(_failed_text(cause, endings, run))
    stuck = [ending for ending in endings if ending.how is How.STUCK]
    if stuck:
        return PeerTimeout(_stuck_text(stuck, endings, run), seconds=run.timeout)
    return None


def _failed_text(cause: Ending, endings: Sequence[Ending], run: Run) -> str:
    lines = [f"{run.who(cause.rank)} of {len(endings)} failed first in `{run.function}`: {cause.summary}"]
    if cause.detail:
        lines.append(cause.detail.rstrip())
    others = [ending for ending in endings if ending is not cause and ending.how is not How.RETURNED]
    if others:
        lines.append(f"{len(others)} of the other ranks ended after it:")
        lines += [f"  {run.who(ending.rank)} {ending.how.value}: {ending.summary:.200}" for ending in others]
    return "\n".join(lines)


def _stuck_text(stuck: Sequence[Ending], endings: Sequence[Ending], run: Run) -> str:
    names = ", ".join(str(ending.rank) for ending in stuck)
    count = f"{len(stuck)} of {len(endings)} ranks of `{run.function}`"
    lines = [f"{count} that were still running, ranks {names}; they were stopped. They were here:"]
    for ending in stuck:
        lines += [f"{run.who(ending.rank)}:", ending.detail.rstrip()]
    return "\n".join(lines)
