"""Schedules to and from the CSV of torch.distributed.pipelining: a line for each rank, an action in each cell.

torch's files may also hold empty cells, communication and FSDP's steps, which are passed over: weft inserts its
own transfers. A forward and a backward that torch runs as one (`(0F1;1B0)OVERLAP_F_B`) become two actions.
"""

from __future__ import annotations

import csv
import io
import re

from weft.pipeline.action import Action
from weft.pipeline.schedule import Schedule

_NOT_COMPUTE = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*", re.ASCII)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)


def to_torch_csv(schedule: Schedule) -> str:
    """The text that torch's schedule runtime loads as `compute_only`.

    >>> from weft.pipeline import schedule
    >>> print(to_torch_csv(schedule("1f1b", stages=2, microbatches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(schedule.ranks)
    return file.getvalue()


def from_torch_csv(text: str, *, name: str = "imported") -> Schedule:
    """The schedule of such a text, with or without communication.

    >>> from_torch_csv("0F0,,0B0\\n0RECV_F0,1F0,1B0\\n").ranks
    ((0F0, 0B0), (1F0, 1B0))
    """
    ranks: list[list[Action]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            ranks.append([action for cell in row for action in _actions(cell.strip())])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    every = [action for actions in ranks for action in actions]
    if not every:
        raise ValueError(f"got the CSV {text[:80]!r} without actions; expected a line for each rank, such as 0F0,0B0")
    stages = max(action.stage for action in every) + 1
    microbatches = max(action.microbatch for action in every) + 1
    return Schedule(name, stages, microbatches, tuple(map(tuple, ranks)))


def _actions(cell: str) -> list[Action]:
    together = _TOGETHER.fullmatch(cell)
    if together is not None:
        return [Action.parse(part.strip()) for part in together[1].split(";")]
    return [] if not cell or _NOT_COMPUTE.fullmatch(cell) else [Action.parse(cell)]
