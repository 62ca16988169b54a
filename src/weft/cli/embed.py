"""The command `weft embed`. It imports torch when it runs, not before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.jobs.embed import Progress


class OnError(str, Enum):
    skip = "skip"
    fail = "fail"


def embed(
    source: Annotated[Path, typer.Argument(help="A .txt, .jsonl, .csv or .parquet file, or - for standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .npy, .safetensors, .parquet or .jsonl file.")],
    model: Annotated[
        Path, typer.Option(help="A folder with a model that transformers or sentence-transformers saved.")
    ],
    column: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    kind: Annotated[str | None, typer.Option("--format", help="The input's format, if its name does not say.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a text; more are cut. Default: the model's.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Put before each text. Default: the model's default.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, by its name.")] = None,
    task: Annotated[
        str | None, typer.Option(help="query or document: the prompt, and the route of a model that has several.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16. Default: as the weights are saved; float16 in float32.")
    ] = None,
    token_budget: Annotated[int, typer.Option(help="Tokens of a batch.")] = 4096,
    errors: Annotated[OnError, typer.Option(help="What to do with a record that cannot be read.")] = OnError.fail,
    restart: Annotated[bool, typer.Option("--restart", help="Start anew instead of going on.")] = False,
    threads: Annotated[int, typer.Option(help="0 for as many as torch would use.")] = 0,
) -> None:
    """Embed texts, in order, without computing padding. A job that was stopped goes on where it was."""
    import torch

    from weft.jobs.embed import EmbedOptions, kind_of, open_encoder, run

    if threads < 0:
        raise ValueError(f"got {threads} threads, expected a number from 0 on")
    if threads:
        torch.set_num_threads(threads)
    options = EmbedOptions(
        None if str(source) == "-" else source, out, kind, column, token_budget, errors is OnError.skip, not restart
    )
    options.check(kind_of(model))
    encoder = open_encoder(model, max_length=max_length, prompt=prompt, prompt_name=prompt_name, task=task, dtype=dtype)
    options = replace(options, about=encoder.identity())
    try:
        with _bar() as report, _heard(report) as listening:
            done = run(options, encoder, report=listening)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    rate = f", {done.tokens / done.seconds:,.0f} tokens/s" if done.seconds else ""
    typer.echo(f"wrote {done.rows} embeddings to {out}{rate}", err=True)
    if done.skipped:
        typer.echo(f"skipped {done.skipped} records; {out}.skipped says which and why", err=True)


@contextmanager
def _heard(report: Callable[[Progress], None]) -> Iterator[Callable[[Progress], None]]:
    """`report`, which also raises if Ctrl-C was pressed and got lost: Python drops what is raised in a finalizer."""
    pressed = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    def check(progress: Progress) -> None:
        if pressed:
            raise KeyboardInterrupt
        report(progress)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr with texts, tokens a second and the time left, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("embedding", total=None)

        def report(progress: Progress) -> None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            text = f"{progress.rows:,} texts, {rate:,.0f} tokens/s"
            total = None if progress.share is None else 1.0
            bar.update(task, description=text, total=total, completed=progress.share or 0.0)

        yield report
