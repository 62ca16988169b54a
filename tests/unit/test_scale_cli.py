"""`weft predict` and `weft simulate`: what they print is what was predicted, and what they refuse is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.app import app
from weft.overlap.plan import OverlapPlan
from weft.scale import ScaleJob, compare, find_gpu, find_model, predict_op
from weft.scale.step import ALL, ideal_seconds
from weft.timeline import Timeline

PREDICT = ("predict", "--gpu", "H800", "--op", "matmul_reduce_scatter", "--m", "8192", "--n", "12288", "--k", "49152")
SIMULATE = ("simulate", "--cluster", "4x4", "--model", "gpt3-13b", "--tp", "4", "--pp", "4", "--microbatches", "8")
SMALL = ScaleJob(find_model("gpt3-13b"), find_gpu("A100"), hosts=4, devices=4, tp=4, pp=4, dp=1, microbatches=8)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_what_it_predicts(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run(*PREDICT, "--json", str(file))
    assert result.exit_code == 0, result.output
    found = predict_op("H800", "matmul_reduce_scatter", 8192, 12288, 49152, tp=8)
    lines = result.stdout.splitlines()
    for name, seconds in (("sequential", found.sequential), ("overlapped", found.overlapped), ("bound", found.bound)):
        (line,) = (text for text in lines if text.startswith(name))
        assert f"{seconds * 1e3:.2f} ms" in line
    assert f"{found.speedup:.2f}x" in result.stdout
    assert f"E_overlap {found.e_overlap:.1%}" in result.stdout
    (plan,) = (text.removeprefix("plan: ") for text in lines if text.startswith("plan: "))
    assert OverlapPlan.parse(plan) == found.plan
    written = json.loads(file.read_text())
    assert (written["gpu"], written["m"], written["dtype"]) == ("H800", 8192, "bfloat16")
    assert written["overlapped"] == found.overlapped
    assert written["e_overlap"] == found.e_overlap


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--gpu", "V100"), "'V100'; expected one of: A100"),
        (("--op", "matmul"), "'matmul'; expected one of: all_gather_matmul"),
        (("--tp", "9"), "tp=9; expected 1 to 8"),
        (("--m", "0"), "m=0"),
        (("--transport", "air"), "'air'; expected one of: auto, windows, messages"),
        (("--gpu", "RTX4090", "--transport", "windows"), "cannot map"),
        (("--dtype", "int4"), "'int4'; expected one of: bf16"),
        (("--json", "no/such/folder/x.json"), "create it first"),
    ],
)
def test_what_cannot_be_predicted_is_named(change: tuple[str, ...], says: str) -> None:
    result = run(*PREDICT, *change)
    assert result.exit_code == 2
    assert says in result.output


def test_the_command_prints_a_row_for_each_case(tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    result = run(*SIMULATE, "--json", str(figures), "--timeline", str(trace))
    assert result.exit_code == 0, result.output
    found = compare(SMALL)
    for name, step in found.items():
        (line,) = (text for text in result.stdout.splitlines() if text.startswith(f"{name} "))
        assert f"{step.seconds / found[ALL].seconds:.3f}x" in line
        assert f"{step.mfu:.1%}" in line
    assert "reshard: every GPU sends" in result.stdout
    written = json.loads(figures.read_text())
    assert written["ideal_seconds"] == ideal_seconds(SMALL)
    assert {row["case"]: row["seconds"] for row in written["rows"]} == {n: s.seconds for n, s in found.items()}
    assert Timeline.load(trace).seconds == pytest.approx(found[ALL].seconds)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_command_simulates_inference(mode: str) -> None:
    result = run("simulate", "--cluster", "1x8", "--model", "llama2-70b", "--tp", "8", "--mode", mode, "--gpu", "H100")
    assert result.exit_code == 0, result.output
    assert f"llama2-70b, {mode}: 1x8 H100" in result.stdout


def test_what_does_not_fit_is_marked() -> None:
    result = run("simulate", "--cluster", "1x8", "--model", "gpt3-175b", "--tp", "8", "--gpu", "RTX4090")
    assert result.exit_code == 0, result.output
    assert "! does not fit into 22.4 GiB" in result.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--cluster", "4"), "'4'; expected hosts x GPUs"),
        (("--model", "gpt5"), "'gpt5'; expected one of: gpt3-175b"),
        (("--gpu", "V100"), "'V100'"),
        (("--dp", "3"), "expected as many; change dp"),
        (("--mode", "dream"), "'dream'; expected one of: train, prefill, decode"),
        (("--activations", "lost"), "'lost'; expected one of: sharded, replicated"),
        (("--lengths", "odd"), "'odd'; expected one of: full"),
        (("--schedule", "magic"), "'magic'"),
        (("--timeline", "no/such/folder/x.json"), "create it first"),
    ],
)
def test_what_cannot_be_simulated_is_named(change: tuple[str, ...], says: str) -> None:
    result = run(*SIMULATE, *change)
    assert result.exit_code == 2
    assert says in result.output
