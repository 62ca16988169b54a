"""`weft demo`: one table of what weft gains on this machine, and a page with timelines, predicted above measured.

A capability adds its lines by the function `demo` of its benchmark: a row or two, within half a minute. A line may
carry figures, which only the page shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.bench import BENCHMARKS, load
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
NOTE = "ratio: how many times better than today; where nothing is there today, how much of the bound is reached"


@dataclass(frozen=True)
class Demo:
    """The lines of all benchmarks, and notes on what could not be run."""

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


def link_rates() -> list[Headline]:
    """Whether a two-host lab has the links that were asked for: the worst of its limited flows."""
    from weft.lab import check

    rows = [row for row in check(hosts=2, gbps=1.0).rows if row.asked is not None]
    worst = max(rows, key=lambda row: abs(row.deviation))
    what = f"lab link, worst of {len(rows)}: {worst.link}"
    return [Headline(what, None, worst.measured, worst.asked, "Gbit/s", ratio=1 + worst.deviation)]


def benchmark(name: str) -> Provider:
    """The lines of a benchmark."""
    return lambda: load(name).demo()


PROVIDERS: dict[str, Provider] = {"lab links": link_rates, **{name: benchmark(name) for name in BENCHMARKS}}
