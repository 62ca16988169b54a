"""Rows of figures, set the same way in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

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
