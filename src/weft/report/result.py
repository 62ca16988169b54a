"""What a benchmark returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.report.page import page
from weft.report.table import Column, Row, Table


@dataclass(frozen=True)
class Report:
    """The rows and the summary of one benchmark, and the columns in which they are shown.

    >>> columns = [Column("case", "case"), Column("ratio", "torch / weft", form=".2f", bar=True)]
    >>> report = Report("gemm", rows=[{"case": "1x1", "ratio": 1.5}], summary={"ratio": 1.5}, columns=columns)
    >>> report.document(machine={"cores": 2})
    {'benchmark': 'gemm', 'machine': {'cores': 2}, 'rows': [{'case': '1x1', 'ratio': 1.5}], 'summary':
    {'ratio': 1.5}}
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
        return (
            json.dumps(self.document(machine=machine), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        )

    def html(self, *, machine: Mapping[str, object]) -> str:
        """A page that stands alone."""
        about = ", ".join(f"{key} {value}" for key, value in machine.items())
        return page(
            f"weft bench {self.benchmark}",
            [table.html() for table in self.tables()],
            footer=f"Measured on: {about}.",
        )
