"""Tables and pages: what they say, that they parse, that nothing in them is loaded or run from the data."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from weft.cli.app import Demo
from weft.cli.app import table as demo_table
from weft.report import Column, Figure, Headline, Report, Table, timeline_page, timeline_svg
from weft.timeline import KINDS, Baseline, Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "<script>alert('x')</script> & \"quotes\""
COLUMNS = (
    Column("case", "case"),
    Column("weft_ms", "weft, ms", form=".2f"),
    Column("ratio", "ratio", form=".1f", bar=True),
)
ROWS = (
    {"case": "small", "weft_ms": 1.234, "ratio": 2.0, "disturbed": 0},
    {"case": "large", "weft_ms": 10.0, "ratio": 1.0, "disturbed": 3},
    {"case": NASTY, "weft_ms": "out of memory"},
)


class Tags(HTMLParser):
    """All tags with their attributes, the text of the cells, and whether every tag was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in {"meta"}:
            self.open.append(tag)
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def assert_stands_alone(page: str) -> Tags:
    tags = Tags(page)
    assert tags.open == []
    for tag, attributes in tags.seen:
        assert tag not in {"link", "img", "iframe", "object"}
        assert not {"src", "href", "xlink:href", "onclick", "onload"} & set(attributes)
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"' ]*", page)) <= {"http://www.w3.org/2000/svg"}
    return tags


def report() -> Report:
    return Report(
        "gemm", rows=ROWS, summary={"ratio": 1.5, "rows": 3}, columns=COLUMNS, title="title", notes=["a note"]
    )


def test_a_table_prints_its_cells_marks_and_notes() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report().tables()[0])
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert ["small", "1.23", "2.0"] in lines
    assert ["large", "*", "10.00", "1.0"] in lines
    assert ["a", "note"] in lines
    assert any(line[:2] == ["*", "some"] for line in lines)


def test_a_table_has_no_mark_where_nothing_was_disturbed() -> None:
    assert Table("t", COLUMNS, ROWS[:1]).all_notes() == []


def test_markup_in_data_is_text_in_a_terminal() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Table("", (Column("x", "x"),), [{"x": "[red]not a colour[/]"}]))
    assert "[red]not a colour[/]" in console.export_text()


def test_cells_without_a_number() -> None:
    column = Column("x", "x", form=".2f")
    assert [column.cell(row) for row in ({}, {"x": None}, {"x": "words"}, {"x": True}, {"x": 3})] == [
        "-",
        "-",
        "words",
        "True",
        "3.00",
    ]


def test_the_json_has_the_keys_of_the_design() -> None:
    document = json.loads(report().json(machine={"cores": 2}))
    assert list(document) == ["benchmark", "machine", "rows", "summary"]
    assert document["benchmark"] == "gemm"
    assert document["machine"] == {"cores": 2}
    assert document["rows"] == [dict(row) for row in ROWS]
    assert document["summary"] == {"ratio": 1.5, "rows": 3}


def test_a_figure_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Report("x", rows=[], summary={"ratio": math.nan}, columns=COLUMNS).json(machine={})


def test_the_page_of_a_report_says_all_and_stands_alone() -> None:
    tags = assert_stands_alone(report().html(machine={"cpu": "Example", "cores": 2}))
    assert tags.cells[:6] == ["case", "weft, ms", "ratio", "small", "1.23", "2.0"]
    assert NASTY in tags.cells
    widths = [attributes["style"] for tag, attributes in tags.seen if tag == "b"]
    assert widths == ["width:100.0%", "width:50.0%", "width:0.0%"]
    assert "script" not in {tag for tag, _ in tags.seen}


def test_a_table_without_rows_is_a_page_too() -> None:
    assert_stands_alone(Report("x", rows=[], summary={}, columns=COLUMNS).html(machine={}))


def test_demo_headlines() -> None:
    made = demo_table(
        [
            Headline("linear", today=1.5, weft=1.0, bound=None, unit="ms", ratio=1.5),
            Headline("link", today=None, weft=0.97, bound=1.0, unit="Gbit/s", ratio=0.97),
        ]
    )
    cells = [[column.cell(row) for column in made.columns] for row in made.rows]
    assert cells == [
        ["linear", "1.5 ms", "1 ms", "-", "1.50"],
        ["link", "-", "0.97 Gbit/s", "1 Gbit/s", "0.97"],
    ]


# -- timelines
# -------------------------------------------------------------------------------------------------------


def timelines() -> list[Timeline]:
    predicted = [
        Event("comm", "send", "group 0", 5.0, 6.0, bytes=1 << 20),
        Event("compute", "compute", "m", 5.0, 7.0),
    ]
    measured = [Event("comm", "recv", NASTY, 0.0, 2.0), Event("comm", "send", "at once", 1.0, 4.0, flops=1e9)]
    return [Timeline(predicted, name="predicted"), Timeline(measured, name="measured")]


def bars(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [e for e in root.iter(f"{SVG}rect") if "e" in e.get("class", "").split()]


def test_the_svg_has_one_bar_an_event_on_one_axis() -> None:
    drawn = {e.findtext(f"{SVG}title", "").splitlines()[0]: e for e in bars(timeline_svg(timelines()))}
    assert set(drawn) == {"group 0", "m", NASTY, "at once"}
    x = {name: float(e.get("x", "")) for name, e in drawn.items()}
    width = {name: float(e.get("width", "")) for name, e in drawn.items()}
    assert x["group 0"] == x["m"] == x[NASTY], "each timeline starts at zero"
    assert width["m"] == pytest.approx(2 * width["group 0"], abs=0.02)
    assert width["at once"] == pytest.approx(3 * width["group 0"], abs=0.03)
    assert x["at once"] - x[NASTY] == pytest.approx(width["group 0"], abs=0.02)
    assert float(drawn["at once"].get("y", "")) > float(drawn[NASTY].get("y", "")), "events at once do not hide"
    assert drawn["group 0"].findtext(f"{SVG}title") == "group 0\nsend, 1.00 s from 0 s\n1 MiB at 0.00839 Gbit/s"


@given(
    st.lists(
        st.builds(
            lambda lane, kind, name, a, b: Event(lane, kind, name, min(a, b), max(a, b)),
            st.text(st.characters(), max_size=60),
            st.sampled_from(KINDS),
            st.text(st.characters()),
            st.floats(0, 1e6),
            st.floats(0, 1e6),
        ),
        max_size=10,
    )
)
def test_any_timeline_gives_a_well_formed_svg(events: list[Event]) -> None:
    drawn = bars(timeline_svg([Timeline(events)]))
    assert len(drawn) == len(events)
    for bar in drawn:
        assert float(bar.get("x", "")) >= 0
        assert float(bar.get("x", "")) + float(bar.get("width", "")) <= 1041
        assert float(bar.get("width", "")) > 0


def test_the_page_of_timelines_has_their_summaries_and_stands_alone() -> None:
    page = timeline_page(timelines(), title="a run", baseline=Baseline(1.0, 3.0))
    tags = assert_stands_alone(page)
    assert [tag for tag, _ in tags.seen].count("table") == 2
    assert [tag for tag, _ in tags.seen].count("script") == 1, "only our own"
    assert "E_overlap" in page
    assert "prefers-color-scheme: dark" in page


def test_figures_stand_under_the_tables_of_a_report_and_of_the_demo() -> None:
    figure = Figure(NASTY, timelines(), notes=["a note on it"])
    line = Headline("linear", today=1.5, weft=1.0, bound=None, unit="ms", ratio=1.5, figures=[figure])
    whole = Report("gemm", rows=ROWS, summary={}, columns=COLUMNS, figures=[figure])
    assert list(whole.document(machine={})) == ["benchmark", "machine", "rows", "summary"], "figures are for people"
    for text in (whole.html(machine={"cores": 2}), Demo([line], ["no lab here"]).html(machine={"cores": 2})):
        tags = assert_stands_alone(text)
        assert [tag for tag, _ in tags.seen].count("script") == 1, "only our own"
        assert [tag for tag, _ in tags.seen].count("svg") == 1
        assert text.index("</table>") < text.index("<svg")
        assert text.index("predicted</text>") < text.index("measured</text>")
        assert "a note on it" in text
