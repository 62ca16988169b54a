"""Servers for tests: in a thread of this process, or as people start them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from weft.jobs.serve import ModelChoice, ServeOptions
from weft.jobs.serve.board import Board
from weft.jobs.serve.http.app import make_app
from weft.jobs.serve.http.protocol import BoundedProtocol
from weft.jobs.serve.models import ServedModel
from weft.jobs.serve.service import TextService

sys.path.append(str(Path(__file__).parents[1] / "unit"))

DEADLINE = 120.0  # seconds; only ends what would hang


@dataclass
class Serving:
    """A server in a thread: where it is, and what is in it."""

    url: str
    service: TextService
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=DEADLINE, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body` is JSON, or bytes as they are."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        with self.client() as client:
            return client.post(path, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)


@contextmanager
def serving(
    models: Mapping[str, ServedModel], *, around: Callable[[Any], Any] = lambda app: app, **options: Any
) -> Iterator[Serving]:
    """A server in a thread, on models that are open; `around` may put something around its application."""
    asked = ServeOptions(tuple(ModelChoice(name, m.folder) for name, m in models.items()), port=0, **options)
    held: list[Serving] = []
    is_up = threading.Event()
    app = around(make_app(lambda: held[0].service))
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http=BoundedProtocol, log_level="warning", lifespan="off", ws="none")
    )

    async def main() -> None:
        service = TextService(models, asked, Board())
        held.append(Serving("", service, asyncio.get_running_loop()))
        running = asyncio.ensure_future(server.serve())
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        if server.started:
            held[0].url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        is_up.set()
        await running
        assert service.close(DEADLINE)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert is_up.wait(DEADLINE)
        yield held[0]
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive()


class Process:
    """`weft serve`, in a process of its own."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "weft", "serve", *map(str, arguments), "--port", "0"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `started` closes it
        self.process = subprocess.Popen(
            command, stdout=self.errors, stderr=self.errors, env={**os.environ, **environment}
        )
        self.url = ""

    def wait(self) -> str:
        """The address, once it listens."""
        limit = threading.Event()
        while not (found := re.search(r"serving .* on (http://\S+)", self.log())):
            assert self.process.poll() is None, self.log()
            assert not limit.wait(0.05)
        self.url = found[1]
        return self.url

    def log(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[Process]:
    """A process that listens; killed at the end if it is still there."""
    process = Process(*arguments, **environment)
    try:
        process.wait()
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        process.errors.close()
