"""`weft demo`: one table of what weft gains on this machine, and a page with timelines, predicted above measured.

A promise has one line, which its benchmark's function `demo` measures within half a minute. A line may carry figures,
which only the page shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.bench import load_promise
from weft.errors import LabUnavailable
from weft.report.result import Headline, report_page
from weft.report.table import Column, Table

Provider = Callable[[], Sequence[Headline]]

COLUMNS = (
    Column("what", "what"),
    Column("today", "today", right=True),
    Column("weft", "weft", right=True),
    Column("bound", "bound", right=True),
    Column("ratio", "ratio", form=".2f"),
)
# In the order of the README.
PROMISES = ("overlap", "reshard", "pipeline", "packed", "end_to_end")
NOTE = "ratio: how many times better than today"


@dataclass(frozen=True)
class Demo:
    """The lines of all promises, and notes on what could not be run."""

    headlines: Sequence[Headline]
    notes: Sequence[str] = ()

    def table(self) -> Table:
        """What the terminal shows."""
        return table(self.headlines, notes=self.notes)

    def html(self, *, machine: Mapping[str, object]) -> str:
        """The same as a page that stands alone, with every figure."""
        figures = [figure for headline in self.headlines for figure in headline.figures]
        return report_page("weft demo", [self.table()], figures, machine=machine)


def collect(*, announce: Callable[[str], None]) -> Demo:
    """Asks every provider, and tells `announce` which one is at work; a note says what could not be run, and why."""
    headlines: list[Headline] = []
    notes: list[str] = []
    for name, provide in PROVIDERS.items():
        announce(name)
        try:
            headlines += provide()
        except (LabUnavailable, ImportError) as error:
            notes.append(f"{name}: {error}")
    return Demo(headlines, notes)


def table(headlines: Iterable[Headline], *, notes: Sequence[str] = ()) -> Table:
    """The headlines as a table."""
    rows = [
        {
            "what": h.what,
            "today": _figure(h.today, h.unit),
            "weft": _figure(h.weft, h.unit),
            "bound": _figure(h.bound, h.unit),
            "ratio": h.ratio,
            "disturbed": h.disturbed,
        }
        for h in headlines
    ]
    return Table("weft on this machine", COLUMNS, rows, [NOTE, *notes])


def _figure(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def benchmark(name: str) -> Provider:
    """The line of a promise."""
    return lambda: load_promise(name).demo()


PROVIDERS: dict[str, Provider] = {name: benchmark(name) for name in PROMISES}
