"""`weft train-demo`: a Llama trained in a lab of rate-limited hosts. It imports torch when it runs, not before."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.comm.deadline import COMMAND

if TYPE_CHECKING:
    from weft.jobs.train import TrainJob, TrainResult


def train_demo(
    hosts: Annotated[int, typer.Option(help="Hosts of the lab, each with a card of its own.")] = 2,
    devices: Annotated[int, typer.Option(help="Ranks of each host.")] = 2,
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 0.5,
    loopback: Annotated[bool, typer.Option("--loopback", help="No namespaces and no limit on the cards.")] = False,
    tp: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 2,
    pp: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 2,
    dp: Annotated[int, typer.Option(help="Copies of the model.")] = 1,
    model: Annotated[str, typer.Option(help="tiny, mini, small or base.")] = "mini",
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens of a packed micro-batch.")] = 512,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    data: Annotated[list[Path] | None, typer.Option(help="Text files; Python's reference texts without.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Save here, and go on from what is there.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
) -> None:
    """Train a small Llama on real text in a lab: losses, tokens a second, exposed communication, within a minute.

    The same run on real machines: `torchrun --nproc-per-node 4 examples/05_train.py --tp 2 --pp 2`.
    """
    from weft.jobs.train import TrainJob
    from weft.jobs.train.run import train_on
    from weft.lab import Cluster
    from weft.report.drawing import curve_text

    job = TrainJob(
        model=model, tp=tp, pp=pp, dp=dp, steps=steps, tokens=tokens, microbatches=microbatches,
        data=tuple(str(file.resolve()) for file in data or ()), context=min(256, tokens),
        checkpoint="" if checkpoint is None else str(checkpoint.resolve()), resume=checkpoint is not None,
    )  # fmt: skip
    job.check(hosts * devices)
    _check(job, html_file)
    with Cluster(hosts=hosts, devices=devices, gbps=None if loopback else gbps) as cluster:
        typer.echo(f"{cluster}\nllama {model}: tensor {tp} x pipeline {pp} x data {dp}")
        trained = cluster.run(train_on, job, timeout=COMMAND.seconds)[0]
    if not trained.steps:
        typer.echo(f"nothing to do: {checkpoint} is at step {steps} already")
        return
    typer.echo(f"\nloss\n{curve_text(trained.losses)}\n\n{_sum_up(trained)}")
    if html_file is not None:
        html_file.write_text(_page(trained, f"{cluster}", job), encoding="utf-8")
        typer.echo(f"wrote {html_file}", err=True)


def _check(job: TrainJob, html_file: Path | None) -> None:
    """Raises before the work is done, not after it."""
    for file in job.data:
        if not Path(file).is_file():
            raise ValueError(f"got the data file {file}, which is not there")
    if html_file is not None and not html_file.absolute().parent.is_dir():
        raise ValueError(f"got the output file {html_file}, but {html_file.absolute().parent} is not a directory")


def _sum_up(trained: TrainResult) -> str:
    """The median step. The first one is left out, as plans are made in it."""
    import statistics

    steps = trained.steps[1:] or trained.steps
    rate = statistics.median(figures.tokens_per_second for figures in steps)
    exposed = statistics.median(figures.exposed for figures in steps)
    share = statistics.median(figures.exposed_fraction for figures in steps)
    return (
        f"loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}; {rate:,.0f} tokens/s; "
        f"exposed communication {1000 * exposed:.1f} ms a step ({share:.0%})"
    )


def _page(trained: TrainResult, lab: str, job: TrainJob) -> str:
    from weft.report import timeline_svg
    from weft.report.drawing import SCRIPT, curve_svg, page

    rates = [figures.tokens_per_second for figures in trained.steps]
    shares = [100 * figures.exposed_fraction for figures in trained.steps]
    curves = (
        ({"loss": trained.losses}, "Loss"),
        ({"tokens/s": rates}, "Tokens a second"),
        ({"% of the step": shares}, "Exposed communication"),
    )
    body = [f'<p class="note">{escape(lab)}</p>', f'<p class="note">{escape(_sum_up(trained))}</p>']
    body += [f"<figure>{curve_svg(series, title=title)}</figure>" for series, title in curves]
    body += [f"<h2>The last step, rank by rank</h2><figure>{timeline_svg([trained.timeline])}</figure>"]
    title = f"Llama {job.model}: tensor {job.tp} x pipeline {job.pp} x data {job.dp}"
    return page(title, body, script=SCRIPT)
