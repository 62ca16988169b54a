"""`weft rerank` and `weft classify`, and what they and `weft embed` have in common. torch is imported when they run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from weft.jobs.embed import EmbedOptions, Progress, Scorer
    from weft.jobs.embed.job import JobTask

MAIN = "\0"  # the name of what a group does without one: no file and no command has it


class OnError(str, Enum):
    skip = "skip"
    fail = "fail"


class Order(str, Enum):
    score = "score"
    input = "input"


class FilesOrMerge(TyperGroup):
    """A command that takes files, and `merge` beside it: the first argument is the name of a file unless it is that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands:
            args = [MAIN, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == MAIN else name, command, rest

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "SOURCE --out OUT --model FOLDER [OPTIONS] | merge OUT PART...")


def group(command: Callable[..., None]) -> typer.Typer:
    """`weft COMMAND SOURCE ...`, and `weft COMMAND merge OUT PART...`."""
    app = typer.Typer(cls=FilesOrMerge, no_args_is_help=True, help=(command.__doc__ or "").splitlines()[0])
    app.command(MAIN, hidden=True)(command)
    app.command("merge")(_merge)
    return app


def _merge(
    out: Annotated[Path, typer.Argument(help="The output: a name with the ending of the parts.")],
    parts: Annotated[list[Path], typer.Argument(help="All parts of one job, in any order.")],
) -> None:
    """Put the parts of a job together that --shard wrote: the same file as the job writes when it is not cut."""
    from weft.jobs.texts.parts import merge

    rows = merge(out, parts)
    typer.echo(f"wrote {rows} rows to {out}", err=True)


Source = Annotated[Path, typer.Argument(help="A .txt, .jsonl, .csv or .parquet file, or - for standard input.")]
ScoresOut = Annotated[Path, typer.Option("--out", "-o", help="A .jsonl or .parquet file.")]
Classifier = Annotated[
    Path, typer.Option(help="A folder with a classifier of transformers, or a CrossEncoder.")
]  # fmt: skip
Format = Annotated[str | None, typer.Option("--format", help="The input's format, if its name does not say.")]
Length = Annotated[int | None, typer.Option(help="Tokens of a text or a pair; more are cut. Default: the model's.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32 or bfloat16. Default: as the weights are saved; float16 in float32.")
]
Budget = Annotated[int, typer.Option(help="Tokens of a batch.")]
Errors = Annotated[OnError, typer.Option(help="What to do with a record that cannot be read.")]
ShardOption = Annotated[
    str | None, typer.Option(help="A part of the texts, such as 1/4: every fourth from the first on; see merge.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Start anew instead of going on.")]
Threads = Annotated[int, typer.Option(help="0 for as many as torch would use.")]
Raw = Annotated[bool, typer.Option("--raw", help="The model's logits, and not what its folder makes of them.")]


def rerank(
    source: Source,
    out: ScoresOut,
    model: Classifier,
    query: Annotated[str | None, typer.Option(help="One query for all records, instead of a column.")] = None,
    query_column: Annotated[str, typer.Option(help="The key or column of the query.")] = "query",
    documents: Annotated[
        str, typer.Option(help="The key or column of the documents: a list of texts, or one text.")
    ] = "documents",
    order: Annotated[Order, typer.Option(help="By score, the best first, or as in the input.")] = Order.score,
    top: Annotated[int | None, typer.Option(help="Only so many of the best documents of each query.")] = None,
    raw: Raw = False,
    kind: Format = None,
    max_length: Length = None,
    dtype: Dtype = None,
    token_budget: Budget = 4096,
    errors: Errors = OnError.fail,
    shard: ShardOption = None,
    restart: Restart = False,
    threads: Threads = 0,
) -> None:
    """Score documents against queries, without computing padding. A job that was stopped goes on where it was.

    A line of JSON, or a row, for each record: `index` of the documents and `score` of each, sorted. Plain text has a
    document a line and needs --query. `weft rerank merge OUT PART...` puts parts together that --shard wrote.
    """

    def task(scorer: Scorer) -> tuple[JobTask, dict[str, Any]]:
        from weft.jobs.embed.tasks import RerankTask

        in_order = order is Order.input
        made = RerankTask(scorer, raw=raw, in_order=in_order, top=top)
        return made, {"task": "rerank", "raw": raw, "order": order.value, "top": top}

    made = options(
        source, out, kind=kind, column=query_column, token_budget=token_budget, errors=errors, restart=restart,
        shard=shard, threads=threads, beside=documents, query=query, lists=True,
    )  # fmt: skip
    _score(made, model, task, max_length, dtype, "ranked the documents of")


def classify(
    source: Source,
    out: ScoresOut,
    model: Classifier,
    column: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    pair: Annotated[
        str | None, typer.Option(help="The key or column of a second text, for models of pairs.")
    ] = None,
    raw: Raw = False,
    kind: Format = None,
    max_length: Length = None,
    dtype: Dtype = None,
    token_budget: Budget = 4096,
    errors: Errors = OnError.fail,
    shard: ShardOption = None,
    restart: Restart = False,
    threads: Threads = 0,
) -> None:  # fmt: skip
    """Classify texts, in order, without computing padding. A job that was stopped goes on where it was.

    A line of JSON, or a row, for each text: its `label`, the `score` of that, and the `scores` of all labels.
    `weft classify merge OUT PART...` puts parts together that --shard wrote.
    """

    def task(scorer: Scorer) -> tuple[JobTask, dict[str, Any]]:
        from weft.jobs.embed.tasks import ClassifyTask

        return ClassifyTask(scorer, raw=raw), {"task": "classify", "raw": raw}

    made = options(
        source, out, kind=kind, column=column, token_budget=token_budget, errors=errors, restart=restart, shard=shard,
        threads=threads, beside=pair,
    )  # fmt: skip
    _score(made, model, task, max_length, dtype, "classified")


def options(
    source: Path, out: Path, *, kind: str | None, column: str, token_budget: int, errors: OnError, restart: bool,
    shard: str | None, threads: int, beside: str | None = None, query: str | None = None, lists: bool = False,
) -> EmbedOptions:  # fmt: skip
    """What the shell asked of a job, checked; sets torch's threads."""
    from weft.jobs.embed import EmbedOptions
    from weft.jobs.texts.parts import Shard

    if threads < 0:
        raise ValueError(f"got {threads} threads, expected a number from 0 on")
    if threads:
        import torch

        torch.set_num_threads(threads)
    return EmbedOptions(
        None if str(source) == "-" else source, out, kind, column, token_budget, errors is OnError.skip, not restart,
        beside=beside, query=query, lists=lists, shard=None if shard is None else Shard.parse(shard),
    )  # fmt: skip


def _score(
    made: EmbedOptions,
    model: Path,
    task: Callable[[Scorer], tuple[JobTask, dict[str, Any]]],
    max_length: int | None,
    dtype: str | None,
    verb: str,
) -> None:
    from weft.jobs.embed import Scorer
    from weft.jobs.embed.job import run_task
    from weft.jobs.embed.recipe import SCORES

    made.check(SCORES)
    scorer = Scorer(model, max_length=max_length, dtype=dtype)
    does, about = task(scorer)
    asked = made.with_about({**scorer.identity(), **about})
    carry_out(asked, lambda report: run_task(asked, does, report=report), f"{verb} {{}} records, in {asked.out}")


def carry_out(
    asked: EmbedOptions, work: Callable[[Callable[[Progress], None]], Progress], said: str
) -> None:  # fmt: skip
    """Runs a job with a bar, and says at its end what was done; `said` has a place for the number of rows."""
    try:
        with _bar() as report, _heard(report) as listening:
            done = work(listening)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    rate = f", {done.tokens / done.seconds:,.0f} tokens/s" if done.seconds else ""
    typer.echo(said.format(done.rows) + rate, err=True)
    if done.skipped:
        typer.echo(f"skipped {done.skipped} records; {asked.out}.skipped says which and why", err=True)


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


rerank_app = group(rerank)
classify_app = group(classify)
