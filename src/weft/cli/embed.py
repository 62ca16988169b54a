"""The command `weft embed`. It imports torch when it runs, not before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.texts import (
    Budget,
    Dtype,
    Errors,
    Format,
    OnError,
    Restart,
    ShardOption,
    Source,
    Threads,
    carry_out,
    group,
    options,
)


def embed(
    source: Source,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .npy, .safetensors, .parquet or .jsonl file.")],
    model: Annotated[
        Path, typer.Option(help="A folder with a model that transformers or sentence-transformers saved.")
    ],
    column: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    kind: Format = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a text; more are cut. Default: the model's.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Put before each text. Default: the model's default.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, by its name.")] = None,
    task: Annotated[
        str | None, typer.Option(help="query or document: the prompt, and the route of a model that has several.")
    ] = None,
    dtype: Dtype = None,
    token_budget: Budget = 4096,
    errors: Errors = OnError.fail,
    shard: ShardOption = None,
    restart: Restart = False,
    threads: Threads = 0,
) -> None:
    """Embed texts, in order, without computing padding. A job that was stopped goes on where it was.

    `weft embed merge OUT PART...` puts parts together that --shard wrote.
    """
    from weft.jobs.embed import kind_of, open_encoder, run

    asked = options(
        source, out, kind=kind, column=column, token_budget=token_budget, errors=errors, restart=restart, shard=shard,
        threads=threads,
    )  # fmt: skip
    asked.check(kind_of(model))
    encoder = open_encoder(model, max_length=max_length, prompt=prompt, prompt_name=prompt_name, task=task, dtype=dtype)
    asked = asked.with_about(encoder.identity())
    carry_out(asked, lambda report: run(asked, encoder, report=report), f"wrote {{}} embeddings to {out}")


app = group(embed)
