"""`weft demo`: one table of what weft gains on this machine.

A capability adds its line by a `Headline` in the report of its benchmark, and the benchmark to `PROVIDERS`.
What is no benchmark is a function of its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.bench import load
from weft.bench.harness import Options
from weft.errors import LabUnavailable
from weft.report.result import Headline
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


def collect(*, announce: Callable[[str], None]) -> Table:
    """Asks every provider, and tells `announce` which one is at work; without a lab, a note says why."""
    headlines: list[Headline] = []
    notes: list[str] = []
    for name, provide in PROVIDERS.items():
        announce(name)
        try:
            headlines += provide()
        except LabUnavailable as error:
            notes.append(f"{name}: {error}")
    return table(headlines, notes=notes)


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
    return None if value is None else f"{value:.3g} {unit}"


def link_rates() -> list[Headline]:
    """Whether a two-host lab has the links that were asked for: the worst of its limited flows."""
    from weft.lab import check

    rows = [row for row in check(hosts=2, gbps=1.0).rows if row.asked is not None]
    worst = max(rows, key=lambda row: abs(row.deviation))
    what = f"lab link, worst of {len(rows)}: {worst.link}"
    return [Headline(what, None, worst.measured, worst.asked, "Gbit/s", ratio=1 + worst.deviation)]


def benchmark(name: str) -> Provider:
    """The headlines of a benchmark, run quickly."""
    return lambda: load(name).run(Options(quick=True)).headlines


PROVIDERS: dict[str, Provider] = {"lab links": link_rates, "gemm": benchmark("gemm")}
