"""Tables, which are set the same way in a terminal and on a page; what a benchmark returns, and pages of both; and what
commands do with results: files that are checked before the work and announced after it, and the terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.report.drawing import SCRIPT, Figure, page, timeline_svg
from weft.timeline import Baseline, Timeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


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


# Tables ---------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
"""Plain values by name: what JSON can say."""


@dataclass(frozen=True)
class Column:
    """Which value of a row is shown, under which title, and how: `form` is a Python format specification.

    Numbers are set to the right, and so is everything else if `right`. `bar` adds a bar to the cells of a
    page, as long as the value is large beside the column's largest.

    >>> Column("torch_ms", "torch, ms", form=".2f").cell({"torch_ms": 1.2345})
    '1.23'
    """

    key: str
    title: str
    form: str = ""
    bar: bool = False
    right: bool = False

    def cell(self, row: Row) -> str:
        """The text of the value; a dash where the row has none."""
        value = row.get(self.key)
        if value is None:
            return "-"
        # Only numbers are formatted: a row may say in words why it has no figure.
        return format(value, self.form) if _is_number(value) else str(value)

    def is_right(self, rows: Sequence[Row]) -> bool:
        """Whether it is set to the right."""
        return self.right or any(_is_number(row.get(self.key)) for row in rows)


@dataclass(frozen=True)
class Table:
    """Columns and rows, with a title and notes under them. Rows with a true `"disturbed"` are marked."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.caption = "\n".join(self.all_notes()) or None
        table.caption_justify = "left"
        for column in self.columns:
            table.add_column(
                Text(column.title),
                justify="right" if column.is_right(self.rows) else "left",
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(Text(text) for text in self._cells(row)))
        return table

    def html(self) -> str:
        """The table as an element of a page."""
        head = "".join(f"<th{self._class(c)}>{escape(c.title)}</th>" for c in self.columns)
        body = "".join(f"<tr>{self._html_cells(row)}</tr>" for row in self.rows)
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.all_notes())
        heading = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'{heading}<div class="wide">{table}</div>{notes}'

    def _class(self, column: Column) -> str:
        name = "barred" if column.bar else "number" if column.is_right(self.rows) else ""
        return f' class="{name}"' if name else ""

    def _html_cells(self, row: Row) -> str:
        cells = []
        for column, text in zip(self.columns, self._cells(row), strict=True):
            content = escape(text)
            if column.bar:
                largest = max(_number(other, column) for other in self.rows)
                share = 100 * _number(row, column) / largest if largest else 0
                content = f'<span>{content}</span><i><b style="width:{share:.1f}%"></b></i>'
            cells.append(f"<td{self._class(column)}>{content}</td>")
        return "".join(cells)

    def all_notes(self) -> list[str]:
        """The notes, with what the mark means if a row has it."""
        disturbed = [row for row in self.rows if row.get("disturbed")]
        mark = "* some rounds were disturbed by other processes or the hypervisor"
        return [*self.notes, mark] if disturbed else list(self.notes)

    def _cells(self, row: Row) -> list[str]:
        cells = [column.cell(row) for column in self.columns]
        return [cells[0] + " *", *cells[1:]] if row.get("disturbed") else cells


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(row: Row, column: Column) -> float:
    value = row.get(column.key)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


# Benchmarks and pages -------------------------------------------------------------------------------------


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


def timeline_page(timelines: Sequence[Timeline], *, title: str, baseline: Baseline | None = None) -> str:
    """A page with the drawing, and under it the summary of each timeline."""
    body = [f"<figure>{timeline_svg(timelines)}</figure>"]
    for timeline in timelines:
        summary = timeline.summary(baseline)
        head, *cells = summary.table()
        columns = [Column(str(i), text, right=i > 0) for i, text in enumerate(head)]
        table = [{str(i): text for i, text in enumerate(row)} for row in cells]
        body.append(Table(timeline.name or "summary", columns, table, summary.remarks()).html())
    return page(title, body, script=SCRIPT)
