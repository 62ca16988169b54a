"""What a step is judged by: its loss, its tokens a second, and the communication that was left to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.timeline import Event
from weft.timeline.events import difference, length, union


@dataclass(frozen=True)
class StepFigures:
    """One step of a run.

    step:    counts from 1
    loss:    the mean over all tokens that have something to predict
    seconds: of the slowest rank, without checkpoints
    exposed: seconds in which a rank communicated or waited and multiplied nothing; the mean over ranks
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    exposed: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def exposed_fraction(self) -> float:
        return self.exposed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"step {self.step:5d}  loss {self.loss:8.4f}  {self.tokens_per_second:10,.0f} tokens/s  "
            f"exposed communication {1000 * self.exposed:8.1f} ms ({self.exposed_fraction:4.0%})"
        )


def exposed_seconds(events: Sequence[Event]) -> float:
    """Seconds of one rank's step in which it communicated, or waited for it, while no matmul ran.

    Transfers of a pipeline count only while a stage waits for them: they run beside whole passes. Passes themselves
    (`2F0`) are no evidence of computing: overlapped matmuls wait inside of them.

    >>> matmul = Event("compute", "compute", "all_gather_matmul: matmul", 1.0, 3.0)
    >>> rows = Event("comm", "recv", "all_gather_matmul: rows", 0.0, 2.0)
    >>> late = Event("compute", "wait", "0.x#0 0->1", 5.0, 5.5)
    >>> exposed_seconds([matmul, rows, late, Event("in", "recv", "0.x#0 0->1", 4.0, 5.5)])
    1.5
    """
    waits = [(e.start, e.end) for e in events if e.kind == "wait"]
    wires = [(e.start, e.end) for e in events if e.kind in ("send", "recv") and e.lane not in ("in", "out")]
    matmuls = union((e.start, e.end) for e in events if e.kind == "compute" and ": " in e.name)
    return length(difference(union([*waits, *wires]), difference(matmuls, union(waits))))


class LossLog:
    """A run's figures as JSON lines; a run that is resumed goes on after the step that it resumed from."""

    def __init__(self, file: str | Path, *, after: int) -> None:
        self._file = Path(file)
        kept = read_log(file, until=after) if self._file.exists() else []
        new = self._file.with_name(f".{self._file.name}.part")
        new.write_text("".join(_line(figures) for figures in kept), encoding="utf-8")
        new.replace(self._file)  # at once: a kill leaves the old lines or these

    def add(self, figures: StepFigures) -> None:
        """Writes one step, at once."""
        with self._file.open("a", encoding="utf-8") as out:
            out.write(_line(figures))


def read_log(file: str | Path, *, until: int | None = None) -> list[StepFigures]:
    """What `LossLog` wrote, up to step `until`; a last line that a kill cut off is left out."""
    found = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        try:
            figures = StepFigures(**json.loads(line))
        except ValueError:
            break
        if until is None or figures.step <= until:
            found.append(figures)
    return found


def _line(figures: StepFigures) -> str:
    return json.dumps(asdict(figures)) + "\n"
