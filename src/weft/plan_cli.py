"""`weft plan ...`: plans printed, compared and drawn, without a device or a process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import plan_pipeline_cli

if TYPE_CHECKING:
    from weft.layout import Layout
    from weft.reshard import Plan

app = typer.Typer(no_args_is_help=True, help="Plans: printed, compared with their bound, and drawn.")


app.command("pipeline")(plan_pipeline_cli.pipeline)


@app.callback()
def _plans() -> None:
    """Plans: printed, compared with their bound, and drawn."""


@app.command("reshard")
def reshard(
    shape: Annotated[str, typer.Option(help="The tensor, such as 1024,1024,512.")],
    src: Annotated[str, typer.Option(help='Hosts x devices and layout of the source, such as "2x4:S0RR".')],
    dst: Annotated[str, typer.Option(help='The same of the destination, such as "2x4:RS0R".')],
    dtype: Annotated[str, typer.Option(help="The type of its elements.")] = "float32",
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 10.0,
    strategy: Annotated[str, typer.Option(help="Which plan is printed; all are compared.")] = "optimal",
    same_hosts: Annotated[bool, typer.Option("--same-hosts", help="Both meshes begin at rank 0.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only the comparison, not the plan.")] = False,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw the timelines here.")] = None,
) -> None:
    """Plan a move of one tensor from a mesh and layout to another: the plan, its bound, every strategy's time.

    S0 is a dim cut along mesh axis 0 (the hosts), S1 along axis 1 (the devices of a host), S01 along both, R a
    dim that is not cut.
    """
    from weft.report import timeline_page
    from weft.reshard import STRATEGIES

    plans = _plans_of(shape, src, dst, dtype, gbps, same_hosts)
    if strategy not in plans:
        raise ValueError(f"got the strategy {strategy!r}; expected one of: {', '.join(STRATEGIES)}")
    if not summary:
        typer.echo(str(plans[strategy]))
    typer.echo(compare(plans))
    if html_file is not None:
        timelines = [plan.simulate() for plan in plans.values()]
        html_file.write_text(timeline_page(timelines, title=f"reshard {shape}: {src} to {dst}"), encoding="utf-8")
        typer.echo(f"wrote {html_file}", err=True)


def compare(plans: dict[str, Plan]) -> str:
    """One line for each strategy: predicted seconds, of the bound, chunks, and the busiest card's bytes."""
    from weft.timeline.text import align_columns, format_bytes, format_seconds

    rows = [["strategy", "predicted", "of bound", "chunks", "busiest out", "busiest in"]]
    for name, plan in plans.items():
        cards = plan.bytes_by_card.values()
        share = plan.lower_bound / plan.seconds if plan.seconds else 1.0
        most = (max(card.out for card in cards), max(card.into for card in cards))
        figures = [format_seconds(plan.seconds), f"{share:.3f}", str(len(plan.chunks)), *map(format_bytes, most)]
        rows.append([name, *figures])
    bound = next(iter(plans.values())).lower_bound
    rows.append(["bound", format_seconds(bound), "1.000", "", "", ""])
    return align_columns(rows)


def _plans_of(shape: str, src: str, dst: str, dtype: str, gbps: float, same_hosts: bool) -> dict[str, Plan]:
    import torch

    from weft.cluster import Cluster
    from weft.reshard import STRATEGIES, plan_reshard

    try:
        sizes = [int(size) for size in shape.split(",") if size.strip()]
    except ValueError:
        raise ValueError(f"got the shape {shape!r}; expected whole numbers, such as 1024,1024,512") from None
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"got the type {dtype!r}; expected one of torch's, such as float32 or bfloat16")
    a = parse_side(src, ndim=len(sizes))
    start = 0 if same_hosts else a.mesh.size
    b = parse_side(dst, ndim=len(sizes), first_rank=start, first_host=0 if same_hosts else max(a.mesh.hosts) + 1)
    cluster = Cluster.uniform(max(*a.mesh.hosts, *b.mesh.hosts) + 1, gbps=gbps)
    return {name: plan_reshard(sizes, kind, src=a, dst=b, cluster=cluster, strategy=name) for name in STRATEGIES}


def parse_side(text: str, *, ndim: int, first_rank: int = 0, first_host: int = 0) -> Layout:
    """A layout from hosts x devices and the papers' notation.

    >>> str(parse_side("2x4:S0R", ndim=2).mesh)
    '2x4 ranks 0-7 hosts 0*4,1*4 axes host,device'
    """
    from weft.layout import Layout, Mesh

    mesh, _, notation = text.partition(":")
    hosts, _, devices = mesh.partition("x")
    if not (hosts.isdigit() and devices.isdigit() and int(hosts) and int(devices)):
        raise ValueError(f"got the mesh {text!r}; expected hosts x devices and a layout, such as 2x4:S0RR")
    grid = Mesh.grid(int(hosts), int(devices), first_rank=first_rank, first_host=first_host)
    layout = Layout.parse(grid, notation)
    dims = sum(letter in "RS" for letter in notation)
    if dims != ndim:
        raise ValueError(f"got the layout {notation!r} of {dims} dims for a shape of {ndim}; expected one S or R a dim")
    return layout
