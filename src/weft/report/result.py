"""What a benchmark returns, and what commands do with results: files that are checked before the work and announced
after it, and the terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.report.drawing import SCRIPT, Figure, page
from weft.report.table import Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Standard output; a table that goes to a file or a pipe is not squeezed into 80 columns."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)


def check_writable(*files: Path | None) -> None:
    """Raises where a file cannot be written; None is no file. Called before the work is done, not after it."""
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ValueError(f"got the output file {file}, but {folder} is not a directory; create it first")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise ValueError(f"got the output file {file}, which cannot be written; choose another place")


def write(file: Path, text: str) -> None:
    """Writes a file, and says so."""
    file.write_text(text, encoding="utf-8")
    announce(file)


def announce(file: Path) -> None:
    """Says that a file was written."""
    typer.echo(f"wrote {file}", err=True)


def parse_grid(text: str) -> tuple[int, int] | None:
    """Hosts and devices of each; None where the text is something else.

    >>> parse_grid("16x8"), parse_grid("16"), parse_grid("0x8")
    ((16, 8), None, None)
    """
    hosts, _, devices = text.partition("x")
    if not (hosts.isdigit() and devices.isdigit() and int(hosts) and int(devices)):
        return None
    return int(hosts), int(devices)


@dataclass(frozen=True)
class Headline:
    """One line of `weft demo`: what people have today, what weft gives, and the bound, in one unit.

    `ratio` is how many times better weft is than today, or, without anything today, the reached share of
    the bound. `figures` are for the page that `weft demo --html` writes.
    """

    what: str
    today: float | None
    weft: float | None
    bound: float | None
    unit: str
    ratio: float | None
    disturbed: int = 0
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Report:
    """The rows and the summary of one benchmark, the columns to show, and timelines for its page.

    >>> columns = [Column("case", "case"), Column("ratio", "torch / weft", form=".2f", bar=True)]
    >>> report = Report("gemm", rows=[{"case": "1x1", "ratio": 1.5}], summary={"ratio": 1.5}, columns=columns)
    >>> list(report.document(machine={"cores": 2}))
    ['benchmark', 'machine', 'rows', 'summary']
    """

    benchmark: str
    rows: Sequence[Row]
    summary: Mapping[str, object]
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()

    def tables(self) -> list[Table]:
        """The rows, and under them the summary."""
        figures = [{"figure": key, "value": value} for key, value in self.summary.items()]
        return [
            Table(self.title or self.benchmark, self.columns, self.rows, self.notes),
            Table("summary", (Column("figure", "figure"), Column("value", "value", form=".4g")), figures),
        ]

    def document(self, *, machine: Mapping[str, object]) -> dict[str, object]:
        """What `--json` writes."""
        rows = [dict(row) for row in self.rows]
        return {
            "benchmark": self.benchmark,
            "machine": dict(machine),
            "rows": rows,
            "summary": dict(self.summary),
        }

    def json(self, *, machine: Mapping[str, object]) -> str:
        """The document as text; a figure that is not finite is an error, because JSON has no word for it."""
        return json.dumps(self.document(machine=machine), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def html(self, *, machine: Mapping[str, object]) -> str:
        """A page that stands alone: the tables, and under them the figures."""
        return report_page(f"weft bench {self.benchmark}", self.tables(), self.figures, machine=machine)


def report_page(
    title: str, tables: Sequence[Table], figures: Sequence[Figure], *, machine: Mapping[str, object]
) -> str:
    """Tables and figures as one page that opens from disk, without a network."""
    about = ", ".join(f"{key} {value}" for key, value in machine.items())
    body = [*(table.html() for table in tables), *(figure.html() for figure in figures)]
    return page(title, body, footer=f"Measured on: {about}.", script=SCRIPT if figures else "")
