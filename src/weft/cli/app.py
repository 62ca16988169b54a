"""The program `weft`: its commands, and how their errors are shown. Short commands are here, the others in their files.

Nothing here imports torch before a command needs it, so that `weft --help` answers at once. An error that a
user can mend is its message and exit code 2; `weft --traceback ...` shows where it came from.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli import embed, kernels, lab, plan, scale
from weft.cli.output import check_writable, console, write
from weft.errors import WeftError

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
app.add_typer(plan.app, name="plan")
app.add_typer(kernels.app, name="kernels")
app.command("tune")(lab.tune)
app.command("embed")(embed.embed)
app.command("train-demo")(lab.train_demo)
app.command("predict")(scale.predict)
app.command("simulate")(scale.simulate)


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
    width: Annotated[int | None, typer.Option(help="Columns; the terminal's unless told.")] = None,
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
    from weft.cli.demo import collect

    check_writable(html_file)
    found = collect(announce=lambda name: typer.echo(f"measuring {name} ...", err=True))
    console().print(found.table())
    if html_file is not None:
        write(html_file, found.html(machine=machine.describe()))
