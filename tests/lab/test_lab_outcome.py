"""Which rank is to blame, and what the caller is told: no process needed."""

from __future__ import annotations

import pytest

from weft.errors import PeerTimeout, RankFailed
from weft.lab.rank import Ending, How, LabRun, failure, first_failure

RUN = LabRun("step", devices=2, timeout=5.0)


def returned(rank: int) -> Ending:
    return Ending(rank, How.RETURNED, 1.0, data=b"x")


def test_all_returned_is_no_failure() -> None:
    assert failure([returned(0), returned(1)], RUN) is None


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([Ending(0, How.RAISED, 2.0), Ending(1, How.RAISED, 1.0)], 1),
        ([Ending(0, How.RAISED, 1.5), Ending(1, How.DIED, 1.0)], 1),
        ([Ending(0, How.RAISED, 1.5), Ending(1, How.DIED, 1.5)], 1),
        ([Ending(0, How.RAISED, 1.5), Ending(1, How.DIED, 1.6)], 0),
        ([Ending(0, How.STOPPED, 0.5), Ending(1, How.RAISED, 1.6), returned(2)], 1),
    ],
)
def test_the_first_failure_is_the_cause(endings: list[Ending], cause: int) -> None:
    first = first_failure(endings)
    assert first is not None
    assert first.rank == cause


def test_the_message_has_the_traceback_and_a_line_for_each_other_rank() -> None:
    endings = [
        Ending(0, How.RAISED, 2.0, "RuntimeError: Connection closed by peer", "Traceback of rank 0"),
        returned(1),
        Ending(2, How.STOPPED, 4.0, "it was still running"),
        Ending(3, How.RAISED, 1.0, "ValueError: boom", "Traceback of rank 3\nValueError: boom\n"),
    ]
    error = failure(endings, RUN)
    assert isinstance(error, RankFailed)
    assert str(error) == (
        "rank 3 (host 1, device 1) of 4 failed first in `step`: ValueError: boom\n"
        "Traceback of rank 3\nValueError: boom\n"
        "2 of the other ranks ended after it:\n"
        "  rank 0 (host 0, device 0) raised: RuntimeError: Connection closed by peer\n"
        "  rank 2 (host 1, device 0) stopped: it was still running"
    )


def test_stuck_ranks_are_named_with_their_stacks() -> None:
    error = failure([returned(0), Ending(1, How.STUCK, 5.0, "it was still running", "File a.py, line 3")], RUN)
    assert isinstance(error, PeerTimeout)
    assert str(error) == (
        "waited 5 s for 1 of 2 ranks of `step` that were still running, ranks 1; they were stopped. "
        "They were here:\nrank 1 (host 0, device 1):\nFile a.py, line 3"
    )
