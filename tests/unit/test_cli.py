"""The command line, in this process and as a program."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import weft
import weft.lab
from weft import bench
from weft.bench.harness import BenchOptions, Case, measure
from weft.cli import app as commands
from weft.cli import doctor
from weft.cli.app import MOST_LINES, app
from weft.errors import LabUnavailable
from weft.lab.check import CheckResult, Row
from weft.report import Column, Headline, Report
from weft.timeline import Event, Timeline

runner = CliRunner()


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """A benchmark `toy` of the table, really measured; the options of each run."""
    runs: list[BenchOptions] = []

    def run(options: BenchOptions) -> Report:
        runs.append(options)
        case = Case("sum", {"loop": lambda: sum(x for x in range(999)), "sum": lambda: sum(range(999))})
        row = measure(case, rounds=1, max_retries=0).row()
        return Report(
            "toy",
            rows=[row],
            summary={"loop_ms": row["loop_ms"]},
            columns=[Column("case", "case"), Column("loop_ms", "loop, ms", form=".3f")],
        )

    def lines() -> list[Headline]:
        return [Headline("toy", today=2.0, weft=1.0, bound=None, unit="ms", ratio=2.0)]

    module = types.ModuleType("weft.bench.toy")
    module.__dict__.update(NAME="toy", HELP="sums of small numbers", run=run, demo=lines)
    monkeypatch.setitem(sys.modules, "weft.bench.toy", module)
    monkeypatch.setitem(bench.BENCHMARKS, "toy", "weft.bench.toy")
    return runs


def test_the_program_starts_without_torch() -> None:
    code = "import sys; import weft.cli.app; print(sorted({'torch', 'numpy', 'rich.table'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_help_as_a_program() -> None:
    version = run_program("--version")
    assert (version.stdout, version.returncode) == (f"weft {weft.__version__}\n", 0)
    help_text = run_program("--help")
    assert help_text.returncode == 0
    for command in ("doctor", "bench", "lab", "trace", "demo"):
        assert command in help_text.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nothing"], "weft: got the benchmark 'nothing'; expected one of: gemm"),
        (["bench"], "weft: got no benchmark; expected one of: gemm"),
        (["bench", "gemm", "--json", "no/such/folder/x.json"], "is not a directory; create it first"),
        (["bench", "gemm", "--html", "."], "cannot be written; choose another place"),
        (["trace", "show", "no-such-trace.json"], "No such file or directory: 'no-such-trace.json'"),
    ],
)
def test_an_error_is_one_line_and_code_2(arguments: list[str], message: str) -> None:
    done = run_program(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("weft: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_traceback_comes_when_asked_for() -> None:
    done = run_program("--traceback", "bench", "nothing")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "got the benchmark 'nothing'" in done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    done = run_program("bench", "--fast")
    assert done.returncode == 2
    assert "--fast" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("lines", "shown"), [(2, 2), (30, MOST_LINES)])
def test_an_error_is_shown_with_its_remedy_but_not_a_whole_story(
    monkeypatch: pytest.MonkeyPatch, lines: int, shown: int
) -> None:
    def unavailable() -> list[doctor.Check]:
        raise LabUnavailable("\n".join(f"line {i}" for i in range(lines)))

    monkeypatch.setattr(doctor, "examine", unavailable)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: line 0\n  line 1")
    assert len(result.stderr.splitlines()) == shown
    assert ("--traceback" in result.stderr) == (shown < lines)


# -- bench ------------------------------------------------------------------------------


def test_bench_lists_what_each_benchmark_measures(toy: list[BenchOptions]) -> None:
    result = runner.invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()][-1] == [
        "toy",
        "sums of small numbers",
    ]
    assert toy == []


def test_bench_prints_a_table_and_writes_json_and_a_page(toy: list[BenchOptions], tmp_path: Path) -> None:
    figures, page = tmp_path / "toy.json", tmp_path / "toy.html"
    result = runner.invoke(app, ["bench", "toy", "--quick", "--json", str(figures), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert toy == [BenchOptions(quick=True, cards=("dma",))]
    assert "loop, ms" in result.stdout
    document = json.loads(figures.read_text())
    assert list(document) == ["benchmark", "machine", "rows", "summary"]
    assert document["benchmark"] == "toy"
    assert document["summary"]["loop_ms"] == document["rows"][0]["loop_ms"] > 0
    assert {"cpu", "cores", "isa", "torch", "kernel", "memory_gib"} <= set(document["machine"])
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_bench_refuses_a_place_that_it_cannot_write_before_it_runs(toy: list[BenchOptions], tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "toy", "--json", str(tmp_path / "missing" / "toy.json")])
    assert result.exit_code == 2
    assert toy == []


# -- trace ------------------------------------------------------------------------------


def test_trace_show_draws_sums_up_and_writes_a_page(tmp_path: Path) -> None:
    events = [Event("compute", "compute", "m", 0.0, 0.002), Event("comm", "send", "g", 0.001, 0.003, bytes=5)]
    Timeline(events, name="predicted").save(tmp_path / "a.json")
    Timeline(events).save(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    result = runner.invoke(app, ["trace", "show", *files, "--width", "60", "--html", str(tmp_path / "t.html")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines[:6] if "█" in line or ">" in line]
    assert lines[0] == "predicted"
    assert lines[3] == "b.json", "a trace without a name goes by its file's"
    assert lines.count("communication hidden 50.0%") == 2
    assert "predicted" in (tmp_path / "t.html").read_text()


def test_trace_show_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    result = runner.invoke(app, ["trace", "show", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert "x.json: got JSON without a list of trace events" in result.stderr


# -- doctor ------------------------------------------------------------------------------


def test_doctor_examines_this_machine() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == len(doctor.CHECKS)
    assert all(line.split()[0] in {"ok", "missing"} for line in lines)
    for word in (
        "native core",
        "torch",
        "gloo",
        "threads",
        "namespaces",
        "ip and tc",
        "/dev/shm",
        "cuda",
        "triton",
    ):
        assert word in result.stdout


def test_doctor_as_json() -> None:
    checks = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert [set(check) for check in checks] == [{"name", "status", "detail", "remedy"}] * len(doctor.CHECKS)


@pytest.mark.parametrize(
    ("module", "broken", "remedy"),
    [
        ("weft._core", ["native core"], "-> install weft from a wheel"),
        ("torch", ["torch", "process groups"], "-> pip install 'torch>=2.13'"),
    ],
)
def test_doctor_fails_without_what_is_required_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, module: str, broken: list[str], remedy: str
) -> None:
    monkeypatch.delattr(weft, "_core", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) == len(doctor.CHECKS)
    failures = [line for line in lines if line.startswith("broken")]
    assert [line.split("  ")[1].strip() or line for line in failures] == broken
    assert all(remedy in line for line in failures)


def test_a_missing_tool_has_a_remedy_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, **_: None if tool == "tc" else f"/sbin/{tool}")
    check = doctor._link_tools()
    assert check.status == "missing"
    assert "`tc` was not found" in check.detail
    assert "Install iproute2" in check.detail
    assert doctor.is_healthy([check])


# -- lab and demo ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measured", "code"), [(0.99, 0), (0.5, 1)])
def test_lab_check_fails_when_a_link_is_off(monkeypatch: pytest.MonkeyPatch, measured: float, code: int) -> None:
    """The lab itself is tried in tests/lab; here it is what becomes of its result."""
    asked: list[tuple[int, float | None, str]] = []

    def check(*, hosts: int, gbps: float | None, cards: str) -> CheckResult:
        asked.append((hosts, gbps, cards))
        return CheckResult("a lab", (Row("host 0 to host 1", 1.0, measured),))

    monkeypatch.setattr(sys.modules["weft.lab.check"], "check", check)
    result = runner.invoke(app, ["lab", "check", "--hosts", "3", "--gbps", "2.5", "--cards", "dma"])
    assert result.exit_code == code
    assert asked == [(3, 2.5, "dma")]
    assert "host 0 to host 1" in result.stdout


def test_the_demo_has_a_row_for_each_headline_and_a_note_for_a_missing_lab(
    monkeypatch: pytest.MonkeyPatch, toy: list[BenchOptions], tmp_path: Path
) -> None:
    def no_lab() -> list[Headline]:
        raise LabUnavailable("this machine has no namespaces")

    monkeypatch.setattr(commands, "PROVIDERS", {"links": no_lab, "toy": commands.benchmark("toy")})
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert ["toy", "2", "ms", "1", "ms", "-", "2.00"] in [line.split() for line in result.stdout.splitlines()]
    assert "links: this machine has no namespaces" in result.stdout
    assert result.stderr.splitlines() == ["measuring links ...", "measuring toy ..."]
    page = tmp_path / "demo.html"
    result = runner.invoke(app, ["demo", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "links: this machine has no namespaces" in page.read_text(encoding="utf-8")


def test_every_promise_has_its_line_in_the_demo() -> None:
    assert list(commands.PROVIDERS) == ["overlap", "reshard", "pipeline", "packed", "end_to_end"]
    for name in commands.PROVIDERS:
        assert callable(bench.load_promise(name).demo)
