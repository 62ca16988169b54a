"""Processes: one that serves, or several that share a port and the one that watches them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import uvicorn

from weft.jobs.serve.board import Board
from weft.jobs.serve.http.app import make_app
from weft.jobs.serve.models import ServedModel, open_model, warm_up
from weft.jobs.serve.options import ServeOptions
from weft.jobs.serve.service import Service

_log = logging.getLogger("weft.serve")


def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then ends what it has begun. `announce` gets the address when it listens."""
    with _bound(options.host, options.port) as listener:  # before anything is loaded: somebody may have the port
        if options.threads:
            torch.set_num_threads(options.threads)
        models = load(options)
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        _run(models, options, Board(), 0, listener, lambda: announce(address))


def load(options: ServeOptions) -> dict[str, ServedModel]:
    """All models, ready to run."""
    models = {}
    for choice in options.models:
        model = open_model(choice, dtype=options.dtype)
        warm_up(model)
        models[choice.name] = model
    return models


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the port, and does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot serve on {host}:{port}: {error.strerror}; pass another --port") from error
        yield listener


class _Server(uvicorn.Server):
    """uvicorn's, with signals of ours: its own would end the process by the signal, and not with 0."""

    started_hook: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_hook()


def _run(
    models: Mapping[str, ServedModel],
    options: ServeOptions,
    board: Board,
    index: int,
    listener: socket.socket,
    started: Callable[[], None],
) -> None:
    """One worker, from its first request to its last."""
    # A thread that waits for the interpreter, after each native call, gets it this soon.
    sys.setswitchinterval(0.0005)
    held: list[Service] = []
    config = uvicorn.Config(
        make_app(lambda: held[0]), access_log=options.log_requests, log_level="warning", lifespan="off",
        server_header=False, timeout_graceful_shutdown=int(options.drain_seconds), backlog=2048,
    )  # fmt: skip
    server = _Server(config)
    server.started_hook = started

    async def main() -> None:
        service = Service(models, options, board, index)
        held.append(service)

        def stop() -> None:
            service.is_draining = server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await server.serve(sockets=[listener])
        service.close(options.drain_seconds)

    loop = _new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
