"""`weft plan pipeline`: what it prints parses back, and every schedule stands beside the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.app import app
from weft.pipeline import SCHEDULES, Costs, Schedule, Transfers, schedule
from weft.pipeline.schedules.generators import SEVERAL_STAGES
from weft.pipeline.schedules.schedule import from_torch_csv

CASE = ("--schedule", "eager-1f1b", "--stages", "4", "--microbatches", "16", "--comm", "0.5")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "pipeline", *arguments])


def rows(output: str) -> dict[str, list[str]]:
    """The table: cells by the schedule's name."""
    table = output[output.index("schedule  ") :].splitlines()[1:-1]
    cells = [re.split(r" {2,}", line) for line in table]
    return {cell[0].removesuffix(" *"): cell[1:] for cell in cells}


def _of_four(name: str) -> Schedule:
    return schedule(name, stages=8 if name in SEVERAL_STAGES else 4, microbatches=16)


def test_the_grid_parses_back() -> None:
    result = run(*CASE)
    assert result.exit_code == 0, result.output
    grid, _, _ = result.output.partition("\n\n")
    assert Schedule.parse(grid) == schedule("eager-1f1b", stages=4, microbatches=16)


def test_all_schedules_are_compared() -> None:
    table = rows(run(*CASE, "--summary").output)
    assert set(table) == {"1f1b, synchronous", *SCHEDULES}
    spent = Costs.uniform(4, transfer=0.5)
    for name in SCHEDULES:
        if name not in SEVERAL_STAGES:
            found = schedule(name, stages=4, microbatches=16).simulate(spent)
            assert table[name][0] == f"{found.seconds:.2f}"
            assert table[name][1] == f"{found.lower_bound:.2f}"
            assert table[name][2] == f"{found.bubble:.1%}"
            assert table[name][4] == " ".join(map(str, found.peak_activations))
    peer = schedule("1f1b", stages=4, microbatches=16).simulate(spent, transfers=Transfers.SYNCHRONOUS)
    assert table["1f1b, synchronous"][0] == f"{peer.seconds:.2f}"
    assert float(table["eager-1f1b"][0]) < float(table["1f1b"][0]) < float(table["1f1b, synchronous"][0])


def test_interleaved_has_the_same_work_on_the_same_ranks() -> None:
    table = rows(run(*CASE[2:], "--comm", "0", "--summary").output)
    assert table["1f1b"][0] == "57.00"  # 16 micro-batches of 3, and 3 ranks before and after
    assert table["interleaved-1f1b"][0] == "52.50"  # the same work, half the bubble
    printed = run("--schedule", "interleaved-1f1b", "--stages", "6", "--ranks", "2", "--microbatches", "4").output
    assert printed.startswith("schedule interleaved-1f1b: 6 stages, 4 micro-batches, 2 ranks")
    assert rows(printed)["1f1b"][4] == "2 1"
    odd = run("--schedule", "zb-v", "--stages", "5", "--microbatches", "4").output
    assert odd.startswith("schedule zb-v: 5 stages, 4 micro-batches, 3 ranks")


def test_the_page_and_the_csv_are_written(tmp_path: Path) -> None:
    page, table = tmp_path / "plan.html", tmp_path / "plan.csv"
    result = run(*CASE, "--html", str(page), "--csv", str(table))
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r'class="heading"[^>]*>([^<]*)<', text)
    assert headings == ["eager-1f1b", "1f1b, synchronous", *(name for name in SCHEDULES if name != "eager-1f1b")]
    assert text.count("<title>0F15") == len(headings)
    boxes = sum(len(actions) for name in SCHEDULES for actions in _of_four(name).ranks)
    drawn = re.findall(r'class="e (forward|backward|input|weight)"', text)
    assert len(drawn) == boxes + 2 * 4 * 16  # and the synchronous one
    assert re.findall(r"<td[^>]*>(16 16 16 16)</td>", text) == ["16 16 16 16"]  # what gpipe keeps
    made = schedule("eager-1f1b", stages=4, microbatches=16)
    assert from_torch_csv(table.read_text(), name="eager-1f1b") == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "2", "--microbatches", "2", "--schedule", "2f2b"), "expected one of: gpipe, 1f1b"),
        (("--stages", "0", "--microbatches", "2"), "got 0 stages"),
        (("--stages", "2", "--microbatches", "2", "--comm", "-1"), "transfer has -1.0"),
        (("--stages", "2", "--microbatches", "2", "--backward", "0"), "backward is (0.0, 0.0)"),
        (("--stages", "4", "--microbatches", "2", "--ranks", "2"), "expected a rank for each stage"),
        (("--stages", "2", "--microbatches", "2", "--html", "/nowhere/at/all.html"), "/nowhere/at/all.html"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
