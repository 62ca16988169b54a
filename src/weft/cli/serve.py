"""The command `weft serve`. It imports torch when it runs, not before."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[Path | None, typer.Argument(help="A folder with a model.", show_default=False)] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A further model: a folder, or name=folder. May be repeated.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.")] = 8080,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the first model. Default: the folder's name.")
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a batch. Default: 768.")] = None,
    max_concurrent_requests: Annotated[int, typer.Option(help="Of a worker; more are answered with 429.")] = 512,
    max_client_batch_size: Annotated[int, typer.Option(help="Texts of a request; more are answered with 413.")] = 32,
    payload_limit: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 2_000_000,
    auto_truncate: Annotated[
        bool, typer.Option("--auto-truncate", help="Cut texts that are too long where a request does not say.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WEFT_API_KEY", help="What requests must send as `Authorization: Bearer`."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: as the weights are saved.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that share the port and the weights.")] = 1,
    threads: Annotated[int, typer.Option(help="Of a worker; 0 for as many as it has cores.")] = 0,
    drain_seconds: Annotated[float, typer.Option(help="That requests have to end in after SIGTERM.")] = 30.0,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line for each request: its path and status, nothing of its text.")
    ] = False,
) -> None:
    """Serve models over HTTP: the routes of OpenAI, TEI, Cohere and Jina, without computing padding."""
    # Before anything reads them: requests are tokenized beside each other as it is, and numpy's threads, which nobody
    # needs here, would not survive the fork of a worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        for name in ("fastapi", "uvicorn", "orjson"):
            import_module(name)
    except ImportError as error:
        raise ImportError(f"weft serve needs {error.name}; pip install 'weft[serve,hf]'") from error
    from weft.jobs.serve import ModelChoice, ServeOptions, serve
    from weft.jobs.serve.options import BATCH_TOKENS, named

    choices = [ModelChoice.parse(text) for text in [*([] if folder is None else [str(folder)]), *(model or [])]]
    if served_model_name is not None and choices:
        choices[0] = ModelChoice(served_model_name, choices[0].folder)
    options = ServeOptions(
        named(choices), host, port, BATCH_TOKENS if max_batch_tokens is None else max_batch_tokens,
        max_concurrent_requests, max_client_batch_size, payload_limit, auto_truncate, api_key, dtype, threads,
        workers, drain_seconds, log_requests,
    )  # fmt: skip
    names = ", ".join(choice.name for choice in options.models)
    code = serve(options, lambda address: typer.echo(f"serving {names} on {address}", err=True))
    if code:
        raise typer.Exit(code)
