"""Commands that start a lab: `weft lab`, `weft tune` and `weft train-demo`. torch is imported when they run."""

from __future__ import annotations

import os
import re
import selectors
import statistics
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.comm.deadline import COMMAND
from weft.report.result import announce, check_writable, console, parse_grid, write

if TYPE_CHECKING:
    from weft.jobs.train import TrainJob, TrainResult
    from weft.lab import Cluster, Rank
    from weft.overlap.tuning import Shape, TunedPlan

app = typer.Typer(no_args_is_help=True, help="A cluster of network namespaces on this machine.")


@app.callback()
def _group() -> None:
    """A cluster of network namespaces on this machine."""


@app.command("check")
def lab_check(
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 1.0,
    cards: Annotated[str, typer.Option(help="tcp, or dma: cards that read memory themselves.")] = "tcp",
) -> None:
    """Start a lab, and measure whether its links carry what they should, and what a message costs."""
    from weft.lab.check import check, render

    result = check(hosts=hosts, gbps=gbps, cards=cards)
    console().print(render(result))
    if not result.ok:
        raise typer.Exit(1)


@app.command("run", context_settings={"allow_interspersed_args": False})
def lab_run(
    words: Annotated[list[str], typer.Argument(help="The command, after --; one is started on each host.")],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 1.0,
    cards: Annotated[str, typer.Option(help="tcp, or dma: cards that read memory themselves.")] = "tcp",
    devices: Annotated[int, typer.Option(help="Ranks of a host at most, for DMA cards.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of a rank, as all hosts share this machine's cores.")] = 1,
    loopback: Annotated[bool, typer.Option("--loopback", help="No namespaces and no limit on the cards.")] = False,
) -> None:
    """Run a command on every host of a lab, such as torchrun, and show what they print.

    In its words {host} is the host's number, {hosts} how many there are, {rank0_address} the address of host 0. It ends
    with the first exit code that is not 0, after the commands of all hosts have ended.
    """
    from weft.lab import Cluster

    rate = None if loopback else gbps
    with Cluster(hosts=hosts, devices=devices, gbps=rate, cards=cards, threads=threads) as cluster:
        typer.echo(f"{cluster}", err=True)
        codes = _run_everywhere(cluster, words)
    for host, code in enumerate(codes):
        if code:
            typer.echo(f"host{host}: the command ended with {code}", err=True)
    code = next((code for code in codes if code), 0)
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)  # as a shell has it for signals


def _run_everywhere(cluster: Cluster, words: list[str]) -> list[int]:
    """The exit codes by host. Each line of output goes out whole, after the name of its host."""
    from weft.lab.command import fill

    hosts = range(cluster.spec.hosts)
    pending = dict.fromkeys(hosts, b"")
    commands = []
    with selectors.DefaultSelector() as selector:
        for host in hosts:
            ours, theirs = os.pipe()
            selector.register(ours, selectors.EVENT_READ, host)
            filled = fill(words, host=host, hosts=len(hosts), rank0_address=cluster.address(0))
            try:
                commands.append(cluster.command(host, filled, stdout=theirs, stderr=theirs))
            finally:
                os.close(theirs)
        while selector.get_map():
            for key, _ in selector.select():
                read, host = os.read(key.fd, 1 << 16), key.data
                *lines, pending[host] = (pending[host] + read).split(b"\n")
                if not read:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    lines = [pending[host]] if pending[host] else []
                for line in lines:
                    typer.echo(f"host{host} | {line.decode(errors='replace')}")
    return [command.wait() for command in commands]


# ---- weft tune -------------------------------------------------------------------------------------------------------


def tune(
    shapes: Annotated[list[str], typer.Argument(help="OP:MxNxK, such as matmul_reduce_scatter:2048x3072x768.")],
    file: Annotated[Path, typer.Option("--file", help="Where the plans go; those of others in it stay.")],
    ranks: Annotated[str, typer.Option(help="HOSTSxDEVICES of a lab on this machine.")] = "2x1",
    gbps: Annotated[float, typer.Option(help="The rate of each host's card in the lab, Gbit/s.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    candidates: Annotated[int, typer.Option(help="How many predicted plans to measure.", min=1)] = 4,
) -> None:
    """Measure the best few predicted plans for each shape on a lab, and keep the fastest.

    On a real cluster call `weft.overlap.tune` from a script that torchrun starts: the file is the same.
    """
    from weft.lab import Cluster
    from weft.overlap import tuning

    wanted = [_shape(text, dtype) for text in shapes]
    hosts, devices = _ranks(ranks)
    check_writable(file)
    with Cluster(hosts=hosts, devices=devices, gbps=gbps) as cluster:
        for shape in wanted:
            found = cluster.run(_tune_on, shape, candidates, timeout=COMMAND.seconds)[0]
            typer.echo(f"{found.plan}")
            tuning.save(file, [found])
    announce(file)


def _tune_on(rank: Rank, shape: Shape, candidates: int) -> TunedPlan:
    from weft.overlap.tuning import tune as measure

    return measure(shape, group=rank.group, candidates=candidates)


def _shape(text: str, dtype: str) -> Shape:
    from weft.overlap.plan import Op
    from weft.overlap.tuning import Shape

    ops = [op.value for op in Op if op is not Op.GATHER_BACK]
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
    if match is None or match[1] not in ops:
        raise ValueError(f"got the shape {text!r}, expected OP:MxNxK with OP one of {', '.join(ops)}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"got the dtype {dtype!r}, expected float32 or bfloat16")
    return Shape(Op(match[1]), int(match[2]), int(match[3]), int(match[4]), dtype)


def _ranks(text: str) -> tuple[int, int]:
    found = parse_grid(text)
    if found is None:
        raise ValueError(f"got the ranks {text!r}, expected HOSTSxDEVICES, such as 2x1")
    return found


# ---- weft train-demo -------------------------------------------------------------------------------------------------


def train_demo(
    hosts: Annotated[int, typer.Option(help="Hosts of the lab, each with a card of its own.")] = 2,
    devices: Annotated[int, typer.Option(help="Ranks of each host.")] = 2,
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 0.5,
    loopback: Annotated[bool, typer.Option("--loopback", help="No namespaces and no limit on the cards.")] = False,
    tp: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 2,
    pp: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 2,
    dp: Annotated[str, typer.Option(help="Copies of the model, or auto: as many as there are ranks for.")] = "1",
    model: Annotated[str, typer.Option(help="tiny, mini, small or base.")] = "mini",
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens of a packed micro-batch.")] = 512,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    data: Annotated[list[Path] | None, typer.Option(help="Text files; Python's reference texts without.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Save here, and go on from what is there.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
) -> None:
    """Train a small Llama on real text in a lab: losses, tokens a second, exposed communication, within a minute.

    The same run on real machines: `torchrun --nproc-per-node 4 examples/05_train.py --tp 2 --pp 2`; docs/hosts.md.
    """
    from weft.jobs.train import TrainJob
    from weft.jobs.train.job import parse_copies
    from weft.jobs.train.run import train_on
    from weft.lab import Cluster
    from weft.report.drawing import curve_text

    job = TrainJob(
        model=model, tp=tp, pp=pp, dp=parse_copies(dp), steps=steps, tokens=tokens, microbatches=microbatches,
        data=tuple(str(file.resolve()) for file in data or ()), context=min(256, tokens),
        checkpoint="" if checkpoint is None else str(checkpoint.resolve()), resume=checkpoint is not None,
    ).on(hosts * devices)  # fmt: skip
    for file in job.data:
        if not Path(file).is_file():
            raise ValueError(f"got the data file {file}, which is not there")
    check_writable(html_file)
    with Cluster(hosts=hosts, devices=devices, gbps=None if loopback else gbps) as cluster:
        typer.echo(f"{cluster}\nllama {model}: tensor {tp} x pipeline {pp} x data {job.dp}")
        result = cluster.run(train_on, job, timeout=COMMAND.seconds)[0]
    if not result.steps:
        typer.echo(f"nothing to do: {checkpoint} is at step {steps} already")
        return
    typer.echo(f"\nloss\n{curve_text(result.losses)}\n\n{_sum_up(result)}")
    if html_file is not None:
        write(html_file, _page(result, f"{cluster}", job))


def _sum_up(result: TrainResult) -> str:
    """The median step. The first one is left out, as plans are made in it."""
    steps = result.steps[1:] or result.steps
    rate = statistics.median(figures.tokens_per_second for figures in steps)
    exposed = statistics.median(figures.exposed for figures in steps)
    share = statistics.median(figures.exposed_fraction for figures in steps)
    return (
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}; {rate:,.0f} tokens/s; "
        f"exposed communication {1000 * exposed:.1f} ms a step ({share:.0%})"
    )


def _page(result: TrainResult, lab: str, job: TrainJob) -> str:
    from weft.report import timeline_svg
    from weft.report.drawing import SCRIPT, curve_svg, page

    rates = [figures.tokens_per_second for figures in result.steps]
    shares = [100 * figures.exposed_fraction for figures in result.steps]
    curves = (
        ({"loss": result.losses}, "Loss"),
        ({"tokens/s": rates}, "Tokens a second"),
        ({"% of the step": shares}, "Exposed communication"),
    )
    body = [f'<p class="note">{escape(lab)}</p>', f'<p class="note">{escape(_sum_up(result))}</p>']
    body += [f"<figure>{curve_svg(series, title=title)}</figure>" for series, title in curves]
    body += [f"<h2>The last step, rank by rank</h2><figure>{timeline_svg([result.timeline])}</figure>"]
    title = f"Llama {job.model}: tensor {job.tp} x pipeline {job.pp} x data {job.dp}"
    return page(title, body, script=SCRIPT)
