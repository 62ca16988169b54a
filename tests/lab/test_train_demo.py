"""`weft train-demo` in a lab: what it prints and writes, and that a run goes on where it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.app import app

SMALL = ["--model", "tiny", "--tokens", "128", "--microbatches", "2"]


def demo(*options: str) -> Result:
    return CliRunner().invoke(app, ["train-demo", *SMALL, *options])


def losses_in(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss +([\d.]+)", output)}


def test_a_run_over_cards_prints_its_curve_and_goes_on(
    namespaces: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, run = tmp_path / "page.html", tmp_path / "run"
    done = demo("--steps", "3", "--html", str(page), "--checkpoint", str(run), "--gbps", "0.2")
    assert done.exit_code == 0, done.output
    printed = capfd.readouterr().out  # of rank 0, as it trains
    assert sorted(losses_in(printed)) == [1, 2, 3]
    assert "2 hosts x 2 devices" in done.output
    assert re.search(r"loss [\d.]+ -> [\d.]+; [\d,]+ tokens/s; exposed communication [\d.]+ ms a step", done.output)
    html = page.read_text()
    assert "<title>Llama tiny: tensor 2 x pipeline 2 x data 1</title>" in html
    assert "rank 3/compute" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")

    again = demo("--steps", "5", "--checkpoint", str(run), "--tp", "2", "--pp", "1", "--dp", "2")
    assert again.exit_code == 0, again.output
    assert sorted(losses_in(capfd.readouterr().out)) == [4, 5]
    assert "nothing to do" in demo("--steps", "5", "--checkpoint", str(run), "--loopback").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "tp 3 x pp 2 x dp 1 is 6 ranks, and there are 4"),
        (["--data", "nowhere.txt"], "nowhere.txt, which is not there"),
        (["--html", "nowhere/page.html"], "is not a directory"),
        (["--model", "huge"], "model is 'huge', expected one of tiny"),
    ],
)
def test_what_cannot_run_is_refused_before_a_lab_is_made(options: list[str], message: str) -> None:
    done = demo(*options)
    assert done.exit_code == 2
    assert message in done.output
