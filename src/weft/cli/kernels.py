"""`weft kernels compile`: every GPU kernel to a binary, without a GPU, with what each takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import check_writable, console, write

if TYPE_CHECKING:
    from rich.table import Table

    from weft.kernels.triton.compile import Resources

app = typer.Typer(no_args_is_help=True, help="The kernels for GPUs.")


@app.callback()
def _group() -> None:
    """The kernels for GPUs."""


@app.command("compile")
def compile_kernels(
    arch: Annotated[str, typer.Option(help="Architectures, with commas between them.")] = "sm80,sm90,sm100",
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
    from weft.kernels.triton.compile import ARCHS, compile_variant, variants

    archs = arch.split(",")
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


def _table(found: list[Resources]) -> Table:
    from rich.table import Table

    table = Table()
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
