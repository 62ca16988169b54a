"""`weft.lab.check`: what it measures and how it shows it. That rates are met is a benchmark's matter."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.lab import check
from weft.lab.check import CheckResult, Row, render
from weft.lab.linux import card


def test_every_kind_of_link_is_measured_and_none_is_too_fast(namespaces: None) -> None:
    gbps, seconds = 0.2, 0.3
    result = check(hosts=3, gbps=gbps, seconds=seconds)
    assert [row.link for row in result.rows] == [
        "host 0 to host 1",
        "host 0 to host 1, both ways at once",
        "host 1 to host 0, both ways at once",
        "2 devices of host 0 to host 1, together",
        "host 0 to the next, all hosts at once",
        "host 1 to the next, all hosts at once",
        "host 2 to the next, all hosts at once",
        "2 hosts to host 0, together",
        "inside host 0",
    ]
    assert result.rows[-1].asked is None
    assert "3 hosts x 2 devices" in result.lab
    # Two buckets on the way can be full once, and a window of data can wait for a receiver that is late.
    most = gbps + (2 * card(gbps).burst + card(gbps).window) * 8e-9 / seconds
    assert all(0.0 < row.measured <= most for row in result.rows[:-1])


def test_links_between_hosts_need_two_hosts() -> None:
    with pytest.raises(ValueError, match="hosts is 1; expected at least 2"):
        check(hosts=1)


@pytest.mark.parametrize(("measured", "ok"), [(0.94, False), (0.951, True), (1.0, True), (1.049, True), (1.06, False)])
def test_five_per_cent_either_way(measured: float, ok: bool) -> None:
    assert Row("a", 1.0, measured).ok is ok
    assert CheckResult("lab", (Row("a", None, 1e-9), Row("b", 1.0, measured))).ok is ok


def test_the_table() -> None:
    rows = Row("host 0 to host 1", 2.0, 1.8, tries=3, stolen=0.02, cpu=0.5), Row("inside host 0", None, 25.0)
    text = io.StringIO()
    Console(width=120, file=text).print(render(CheckResult("lab a", rows)))
    lines = text.getvalue().splitlines()
    assert lines[0].strip() == "lab a"
    assert [cell.strip() for cell in lines[4].split("│")[1:-1]] == [
        "host 0 to host 1",
        "2",
        "1.8",
        "-10.0%",
        "0.50",
        "3",
        "2.0%",
        "off by more than 5%",
    ]
    assert "not limited" in lines[5]
