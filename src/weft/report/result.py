"""What a benchmark returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.report.page import page
from weft.report.table import Column, Row, Table


@dataclass(frozen=True)
class Headline:
    """One line of `weft demo`: what people have today, what weft gives, and the bound, in one unit.

    `ratio` is how many times better weft is than today, or, without anything today, the reached share of
    the bound.
    """

    what: str
    today: float | None
    weft: float | None
    bound: float | None
    unit: str
    ratio: float | None
    disturbed: int = 0


@dataclass(frozen=True)
class Report:
    """The rows and the summary of one benchmark, the columns to show, and its lines for `weft demo`.

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
        """A page that stands alone."""
        about = ", ".join(f"{key} {value}" for key, value in machine.items())
        return page(
            f"weft bench {self.benchmark}",
            [table.html() for table in self.tables()],
            footer=f"Measured on: {about}.",
        )
