"""`weft plan reshard`: what it prints parses back, and every strategy stands beside the bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.app import app
from weft.reshard import STRATEGIES, Plan

CASE = ("plan", "reshard", "--shape", "64,64,8", "--src", "2x4:RS0R", "--dst", "2x4:S0RR", "--gbps", "10")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refusal(*arguments: str) -> str:
    """What a call that can't be planned says."""
    result = run("plan", "reshard", *arguments)
    assert result.exit_code != 0
    return str(result.exception) + result.output


def test_the_printed_plan_parses_back() -> None:
    result = run(*CASE, "--chunks")
    assert result.exit_code == 0, result.output
    text = result.output[result.output.index("reshard plan ") :]
    plan = Plan.parse(text)
    assert plan.strategy == "optimal"
    assert plan.tensors[0].shape == (64, 64, 8)
    assert str(plan).strip() == text.strip()


def test_the_comparison_comes_first_and_chunks_only_when_asked() -> None:
    short, long = run(*CASE).output, run(*CASE, "--chunks").output
    assert short.startswith("strategy ")
    assert long.startswith("strategy ")
    assert "bound " in short
    assert "--chunks prints them" in short
    assert len(short.splitlines()) < 20
    assert not [line for line in short.splitlines() if line.startswith(("stream ", "0 "))]
    assert [line for line in long.splitlines() if line.startswith("stream ")]


def test_every_strategy_is_compared_with_the_bound() -> None:
    result = run(*CASE, "--summary")
    lines = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert {*STRATEGIES, "bound"} <= lines.keys()
    shares = {name: float(lines[name][3]) for name in STRATEGIES}
    assert shares["optimal"] == max(shares.values())
    assert 0 < shares["send_recv"] < shares["optimal"] <= 1


def test_another_strategy_is_printed_when_asked() -> None:
    assert "\nreshard plan send_recv" in run(*CASE, "--strategy", "send_recv").output


def test_meshes_on_the_same_hosts_share_ranks() -> None:
    result = run(*CASE, "--same-hosts")
    assert "cluster 2 hosts" in result.output


def test_timelines_are_drawn_on_one_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(*CASE, "--summary", "--html", str(page)).exit_code == 0
    text = page.read_text()
    assert all(name in text for name in STRATEGIES)
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shape", "8,x", "--src", "1x1:RR", "--dst", "1x1:RR"), "'8,x'"),
        (("--shape", "8,8", "--src", "2:RR", "--dst", "1x1:RR"), "'2:RR'"),
        (("--shape", "8,8", "--src", "1x1:R", "--dst", "1x1:RR"), "1 dims for a shape of 2"),
        (("--shape", "8,8", "--src", "1x1:RR", "--dst", "1x1:QR"), "'QR'"),
        (("--shape", "8,8", "--src", "1x1:RR", "--dst", "1x1:RR", "--dtype", "float33"), "'float33'"),
        (("--shape", "8,8", "--src", "1x1:RR", "--dst", "1x1:RR", "--strategy", "magic"), "'magic'"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal(*arguments)
