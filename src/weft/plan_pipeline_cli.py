"""`weft plan pipeline`: a schedule's grid, and all schedules compared, without a device or a process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.pipeline import Simulation

PEER = "1f1b, synchronous"
UNITS = "times in forwards of a rank; activations in micro-batches of a rank"


def pipeline(
    stages: Annotated[int, typer.Option(help="How many stages.")],
    microbatches: Annotated[int, typer.Option(help="How many micro-batches a step has.")],
    schedule_name: Annotated[
        str, typer.Option("--schedule", help="Which schedule is printed; all are compared.")
    ] = "eager-1f1b",
    ranks: Annotated[int | None, typer.Option(help="Fewer than stages, for interleaved-1f1b only.")] = None,
    comm: Annotated[float, typer.Option(help="Seconds of a transfer, if a rank's forward takes 1.")] = 0.5,
    backward: Annotated[float, typer.Option(help="Seconds of a backward, if a rank's forward takes 1.")] = 2.0,
    summary: Annotated[bool, typer.Option("--summary", help="Only the comparison, not the grid.")] = False,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the schedule here, for torch.distributed.pipelining.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw the timelines here.")] = None,
) -> None:
    """Plan a pipeline's step: the schedule's grid, and every schedule's time, bubble and memory.

    Ranks have equal work; a transfer takes --comm of a rank's forward. interleaved-1f1b gets the same ranks and the
    same work, cut into twice as many stages (or as many as --stages says, if it is the one that is printed).
    """
    from weft.pipeline import schedule
    from weft.pipeline.schedules import INTERLEAVED
    from weft.pipeline.torch_csv import to_torch_csv
    from weft.report import Column, Table
    from weft.report.pipeline import pipeline_page
    from weft.timeline.text import align_columns

    chosen = schedule(schedule_name, stages=stages, microbatches=microbatches, ranks=ranks)
    interleaved_stages = stages if schedule_name == INTERLEAVED else 2 * stages
    found = simulate_all(
        len(chosen.ranks), microbatches, comm=comm, backward=backward, interleaved_stages=interleaved_stages
    )
    if not summary:
        typer.echo(f"{chosen}\n")
    head, *rows = compare(found, chosen=schedule_name)
    typer.echo(f"{align_columns([head, *rows])}\n{UNITS}; * is above")
    if csv_file is not None:
        csv_file.write_text(to_torch_csv(chosen), encoding="ascii")
        typer.echo(f"wrote {csv_file}", err=True)
    if html_file is not None:
        title = f"{schedule_name}: {stages} stages, {microbatches} micro-batches, a transfer takes {comm:g} forwards"
        order = sorted(found, key=lambda name: name != schedule_name)
        columns = [Column(text, text, right=text != head[0]) for text in head]
        table = Table("", columns, [dict(zip(head, row, strict=True)) for row in rows], [f"{UNITS}; * is drawn first"])
        drawn = pipeline_page({name: found[name] for name in order}, title=title, table=table)
        html_file.write_text(drawn, encoding="utf-8")
        typer.echo(f"wrote {html_file}", err=True)


def simulate_all(
    ranks: int, microbatches: int, *, comm: float, backward: float, interleaved_stages: int
) -> dict[str, Simulation]:
    """Every schedule on the same ranks with the same work, and 1F1B that stops for its transfers."""
    from weft.pipeline import SCHEDULES, Costs, Transfers, schedule
    from weft.pipeline.schedules import INTERLEAVED

    def simulated(name: str, transfers: Transfers = Transfers.OVERLAPPED) -> Simulation:
        stages = interleaved_stages if name == INTERLEAVED else ranks
        part = ranks / stages  # of a rank's work, on average, is one stage's
        costs = Costs.uniform(stages, forward=part, backward=backward * part, transfer=comm)
        made = schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
        return made.simulate(costs, transfers=transfers)

    return {PEER: simulated("1f1b", Transfers.SYNCHRONOUS), **{name: simulated(name) for name in SCHEDULES}}


def compare(found: dict[str, Simulation], *, chosen: str) -> list[list[str]]:
    """The head of a table, and one row for each schedule."""
    peer = found[PEER].seconds
    rows = [["schedule", "step", "bound", "bubble", "speed", "peak activations of each rank"]]
    for name, simulation in found.items():
        part = len(simulation.schedule.ranks) / simulation.schedule.stages
        peaks = " ".join(f"{peak * part:g}" for peak in simulation.schedule.peak_by_rank)
        times = [f"{simulation.seconds:.2f}", f"{simulation.lower_bound:.2f}", f"{simulation.bubble:.1%}"]
        rows.append([f"{name} *" if name == chosen else name, *times, f"{peer / simulation.seconds:.2f}x", peaks])
    return rows
