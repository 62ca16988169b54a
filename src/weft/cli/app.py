"""The program `weft`: its commands, and how their errors are shown. Short commands are here (`demo` and `kernels
compile` among them), the others in their files.

Nothing here imports torch before a command needs it, so that `weft --help` answers at once. An error that a user can
mend is its message and exit code 2; `weft --traceback ...` shows where it came from.

`weft demo` is one table of what weft gains on this machine: a promise has one line, which its benchmark's function
`demo` measures within half a minute. A line may carry figures, predicted above measured, which only the page shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from weft.bench import load_promise
from weft.cli import embed, lab, paper, serve
from weft.errors import LabUnavailable, WeftError
from weft.report.result import Column, Headline, Table, check_writable, console, report_page, write

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from weft.kernels.triton.compile import Resources

kernels_app = typer.Typer(no_args_is_help=True, help="The kernels for GPUs.")


@kernels_app.callback()
def _group() -> None:
    """The kernels for GPUs."""


@kernels_app.command("compile")
def compile_kernels(
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures, with commas between; those that no default spills on, if not given."),
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="One kernel only, such as matmul.")] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Only the default configurations.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compile the kernels for GPUs that need not be there: registers, spills, shared memory, occupancy.

    Exits with 1 if a default configuration spills or does not fit.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError("the GPU kernels need Triton, which is not installed; pip install triton") from error
    from weft.kernels.triton.compile import ARCHS, TARGETS, compile_variant, variants

    archs = TARGETS if arch is None else tuple(arch.split(","))
    if unknown := [name for name in archs if name not in ARCHS]:
        raise ValueError(f"got the architectures {', '.join(unknown)}, expected some of {', '.join(ARCHS)}")
    chosen = [v for v in variants() if (kernel in (None, v.kernel)) and (v.is_default or not defaults)]
    if not chosen:
        known = sorted({v.kernel for v in variants()})
        raise ValueError(f"got the kernel {kernel!r}, expected one of {', '.join(known)}")
    check_writable(json_file)
    found = []
    with typer.progressbar([(v, a) for v in chosen for a in archs], label="compiling") as work:
        for variant, name in work:
            found.append(compile_variant(variant, name).resources)
    console().print(_table(found))
    bad = [r for r in found if r.is_default and (r.spilled or not r.blocks)]
    typer.echo(f"{len(found)} kernels compiled, {sum(r.spilled > 0 for r in found)} spill, {len(bad)} defaults do")
    if json_file is not None:
        rows = [r.as_dict() for r in found]
        write(json_file, json.dumps({"kernels": rows}, indent=1) + "\n")
    if bad:
        raise typer.Exit(1)


def _table(found: list[Resources]) -> RichTable:
    from rich.table import Table as RichTable

    table = RichTable()
    table.add_column("kernel")
    table.add_column("configuration")
    for heading in ("arch", "warps", "registers", "spilled B", "shared KB", "blocks", "occupancy"):
        table.add_column(heading, justify="right")
    for r in found:
        label = r.label if r.is_default else f"{r.label} (other)"
        table.add_row(
            r.kernel, label, r.arch, str(r.warps), str(r.registers), str(r.spilled), f"{r.shared / 1024:.1f}",
            str(r.blocks), f"{r.occupancy:.0%}",
        )  # fmt: skip
    return table


Provider = Callable[[], Sequence[Headline]]

COLUMNS = (
    Column("what", "what"),
    Column("today", "today", right=True),
    Column("weft", "weft", right=True),
    Column("bound", "bound", right=True),
    Column("ratio", "ratio", form=".2f"),
)
# In the order of the README.
PROMISES = ("overlap", "reshard", "pipeline", "packed", "end_to_end")
NOTE = "ratio: how many times better than today"


@dataclass(frozen=True)
class Demo:
    """The lines of all promises, and notes on what could not be run."""

    headlines: Sequence[Headline]
    notes: Sequence[str] = ()

    def table(self) -> Table:
        """What the terminal shows."""
        return table(self.headlines, notes=self.notes)

    def html(self, *, machine: Mapping[str, object]) -> str:
        """The same as a page that stands alone, with every figure."""
        figures = [figure for headline in self.headlines for figure in headline.figures]
        return report_page("weft demo", [self.table()], figures, machine=machine)


def collect(*, announce: Callable[[str], None]) -> Demo:
    """Asks every provider, and tells `announce` which one is at work; a note says what could not be run, and why."""
    headlines: list[Headline] = []
    notes: list[str] = []
    for name, provide in PROVIDERS.items():
        announce(name)
        try:
            headlines += provide()
        except (LabUnavailable, ImportError) as error:
            notes.append(f"{name}: {error}")
    return Demo(headlines, notes)


def table(headlines: Iterable[Headline], *, notes: Sequence[str] = ()) -> Table:
    """The headlines as a table."""
    rows = [
        {
            "what": h.what,
            "today": _figure(h.today, h.unit),
            "weft": _figure(h.weft, h.unit),
            "bound": _figure(h.bound, h.unit),
            "ratio": h.ratio,
            "disturbed": h.disturbed,
        }
        for h in headlines
    ]
    return Table("weft on this machine", COLUMNS, rows, [NOTE, *notes])


def _figure(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def benchmark(name: str) -> Provider:
    """The line of a promise."""
    return lambda: load_promise(name).demo()


PROVIDERS: dict[str, Provider] = {name: benchmark(name) for name in PROMISES}


MOST_LINES = 8  # a message with its remedy; more is somebody's traceback
USER_ERRORS = (ValueError, OSError, ImportError, WeftError)


class _PlainErrors(TyperGroup):
    """Turns the errors that a user can mend into their message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has gone, as in `weft bench --list | head -1`: not an error
        except USER_ERRORS as error:
            if ctx.params["traceback"]:
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            more = " (`weft --traceback` shows all of it)" if len(lines) > MOST_LINES else ""
            typer.echo("weft: " + "\n  ".join(lines[:MOST_LINES]) + more, err=True)
            raise typer.Exit(2) from error


app = typer.Typer(cls=_PlainErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
trace_app = typer.Typer(no_args_is_help=True, help="Traces that weft.trace() has saved.")
app.add_typer(lab.app, name="lab")
app.add_typer(trace_app, name="trace")
app.add_typer(paper.app, name="plan")
app.add_typer(kernels_app, name="kernels")
app.command("tune")(lab.tune)
app.command("embed")(embed.embed)
app.command("serve")(serve.serve)
app.command("train-demo")(lab.train_demo)
app.command("predict")(paper.predict)
app.command("simulate")(paper.simulate)


def main() -> None:
    """The entry point of `weft` and of `python -m weft`."""
    app(prog_name="weft")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {metadata.version('weft')}")
        raise typer.Exit


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Model-parallel transformers that neither wait for communication nor compute on padding."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what this machine has for weft, and the remedy where something is missing."""
    from weft.cli.doctor import examine, is_healthy, render

    checks = examine()
    typer.echo(json.dumps([check.as_dict() for check in checks], indent=2) if as_json else render(checks))
    if not is_healthy(checks):
        raise typer.Exit(1)


@app.command()
def models() -> None:
    """List the families of models that weft knows, and what it does with each."""
    from weft.cli.doctor import models_table

    typer.echo(models_table())


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; --list shows them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The fewest rows, within 3 minutes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
) -> None:
    """Measure one claim and print its table."""
    from weft.bench import BENCHMARKS, load

    if show_list:
        for each in BENCHMARKS:
            typer.echo(f"{each:<12}{load(each).HELP}")
        return
    if name is None:
        raise ValueError(f"got no benchmark; expected one of: {', '.join(BENCHMARKS)}; try `weft bench gemm --quick`")
    check_writable(json_file, html_file)
    benchmark = load(name)
    from weft.bench import machine
    from weft.bench.harness import BenchOptions

    report = benchmark.run(BenchOptions(quick=quick))
    for table in report.tables():
        console().print(table)
    about = machine.describe()
    if json_file is not None:
        write(json_file, report.json(machine=about))
    if html_file is not None:
        write(html_file, report.html(machine=about))


@trace_app.command("show")
def trace_show(
    files: Annotated[list[Path], typer.Argument(help="Saved traces; several are drawn one above the other.")],
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
    width: Annotated[int | None, typer.Option(help="Columns; the terminal's by default.")] = None,
) -> None:
    """Draw saved traces and sum them up."""
    from weft.report import timeline_page
    from weft.timeline import Timeline
    from weft.timeline.text import draw, printable

    check_writable(html_file)
    timelines = [Timeline.load(file) for file in files]
    named = [t if t.name else Timeline(t.events, name=f.name) for t, f in zip(timelines, files, strict=True)]
    typer.echo(draw([(t.name, t.events) for t in named], width=width or console().width))
    for timeline in named:
        typer.echo(f"\n{printable(timeline.name)}\n{timeline.summary()}")
    if html_file is not None:
        write(html_file, timeline_page(named, title=", ".join(t.name for t in named)))


@app.command()
def demo(
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with timelines here.")] = None,
) -> None:
    """Show in a few minutes what weft gains on this machine: one table, and a page with timelines."""
    from weft.bench import machine

    check_writable(html_file)
    found = collect(announce=lambda name: typer.echo(f"measuring {name} ...", err=True))
    console().print(found.table())
    if html_file is not None:
        write(html_file, found.html(machine=machine.describe()))
