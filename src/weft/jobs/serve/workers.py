"""Processes: one that serves, or several that share a port, and the one that loads the weights for all and watches.

The weights are loaded and packed once, before the others are forked, which see the same memory. Up to then there must
be one thread only: those of OpenMP do not survive a fork. All have sockets of their own on one port (SO_REUSEPORT);
that of the first process only keeps the port. Nothing has a name, so one that is killed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
import uvicorn

from weft.comm.deadline import SERVE_END, SERVE_IDLE
from weft.jobs.serve.board import Board
from weft.jobs.serve.http.app import make_app
from weft.jobs.serve.http.protocol import BoundedProtocol
from weft.jobs.serve.models import ServedModel, open_model, warm_up
from weft.jobs.serve.options import ServeOptions
from weft.jobs.serve.service import TextService
from weft.lab.linux import die_with_parent

_log = logging.getLogger("weft.serve")
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_SHORT_LIFE = 5.0  # seconds: a worker that dies sooner would die again
_MOST_SHORT_LIVES = 5


def serve(options: ServeOptions, announce: Callable[[str], None]) -> int:
    """Serves until SIGTERM or SIGINT, then ends what it has begun; the exit code. `announce` gets the address when it
    listens."""
    is_shared = options.workers > 1
    with _bound(options.host, options.port, is_shared=is_shared) as listener:  # somebody may have the port: ask first
        port = int(listener.getsockname()[1])
        where = f"[{options.host}]" if ":" in options.host else options.host

        def started() -> None:
            announce(f"http://{where}:{port}")

        if not is_shared:
            if options.threads:
                torch.set_num_threads(options.threads)
            models = load(options)
            gc.collect()
            gc.freeze()  # else a full collection looks through all of it, for a quarter of a second under load
            return _run(models, options, Board(), 0, listener, started)
        torch.set_num_threads(1)
        models = load(options)
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            _log.warning("%d threads before the fork: workers cannot use OpenMP, and are slower", threads)
        gc.collect()
        gc.freeze()  # a collection in a worker does not touch, and so does not copy, what all of them share
        try:
            return _Supervisor(models, options, port, started).run()
        finally:
            gc.unfreeze()


def load(options: ServeOptions) -> dict[str, ServedModel]:
    """All models, ready to run."""
    models = {}
    for choice in options.models:
        model = open_model(choice, dtype=options.dtype)
        warm_up(model)
        models[choice.name] = model
    return models


def _bound(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """A socket that has the port, and does not listen yet. One that is shared is asked for alone first: others of the
    same user could share it, too, and requests would go astray."""
    try:
        if is_shared and port:
            with _socket(host, port, is_shared=False) as alone:
                alone.listen(1)
        return _socket(host, port, is_shared=is_shared)
    except OSError as error:
        raise ValueError(f"cannot serve on {host}:{port}: {error.strerror or error}; pass another --port") from error


def _socket(host: str, port: int, *, is_shared: bool) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


class _Supervisor:
    """Forks the workers, starts one anew that died, and ends all when it is told to."""

    def __init__(
        self, models: Mapping[str, ServedModel], options: ServeOptions, port: int, started: Callable[[], None]
    ) -> None:
        self._models, self._options, self._port, self._started = models, options, port, started
        self._board = Board(options.workers)
        self._workers: dict[int, tuple[int, float]] = {}  # pid: its number, when it began
        self._short_lives = 0
        self._listening, self._says_so = os.pipe()
        self._silent = options.workers  # that do not listen yet
        self._deadline: float | None = None  # of the end
        self._code = 0
        self._cores = sorted(os.sched_getaffinity(0))

    def run(self) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for; workers take them as they come
        os.set_blocking(self._listening, False)
        for number in range(self._options.workers):
            self._fork(number)
        while self._workers:
            info = signal.sigtimedwait(_SIGNALS, 0.05 if self._silent else 1.0)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._stop(signal.SIGTERM)
            self._reap()
            self._hear()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._code = 1
                self._stop(signal.SIGKILL)
        return self._code

    def _hear(self) -> None:
        if self._silent:
            with suppress(BlockingIOError):
                self._silent -= len(os.read(self._listening, self._silent))
            if not self._silent:
                self._started()

    def _stop(self, number: signal.Signals) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._options.drain_seconds + SERVE_END.seconds
        for pid in self._workers:
            os.kill(pid, number)

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number, began = self._workers.pop(pid)
            if self._deadline is not None:
                self._code = self._code or (1 if status else 0)
                continue
            lived = time.monotonic() - began
            self._short_lives = self._short_lives + 1 if lived < _SHORT_LIFE else 0
            _log.error("worker %d ended with status %d after %.1f s", number, status, lived)
            if self._short_lives >= _MOST_SHORT_LIVES:
                _log.error("workers keep ending within %.0f s; giving up", _SHORT_LIFE)
                self._code = 1
                self._stop(signal.SIGTERM)
            else:
                self._fork(number)

    def _fork(self, number: int) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._workers[pid] = number, time.monotonic()
            return
        code = 1
        try:
            die_with_parent(parent)
            code = self._work(number)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # what the first process has registered for its end is not this one's

    def _work(self, number: int) -> int:
        """A worker, with cores of its own."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        mine = _share(self._cores, number, self._options.workers)
        os.sched_setaffinity(0, mine)
        torch.set_num_threads(self._options.threads or len(mine))
        with _socket(self._options.host, self._port, is_shared=True) as listener:
            return _run(
                self._models, self._options, self._board, number, listener, lambda: os.write(self._says_so, b".")
            )


def _share(cores: list[int], number: int, workers: int) -> list[int]:
    """The cores of a worker: neighbours, as many as all others, give or take one."""
    mine = cores[number * len(cores) // workers : (number + 1) * len(cores) // workers]
    return mine or [cores[number % len(cores)]]


class _Server(uvicorn.Server):
    """uvicorn's, with signals of ours: its own would end the process by the signal, and not with 0."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], object]) -> None:
        super().__init__(config)
        self._tell = started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()


def _run(
    models: Mapping[str, ServedModel],
    options: ServeOptions,
    board: Board,
    number: int,
    listener: socket.socket,
    started: Callable[[], object],
) -> int:
    """One worker, from its first request to its last; its exit code."""
    # A thread waits for the interpreter after each native call: not 5 ms, while requests are read.
    sys.setswitchinterval(0.0005)
    held: list[TextService] = []
    config = uvicorn.Config(
        make_app(lambda: held[0]), http=BoundedProtocol, access_log=options.log_requests, lifespan="off", ws="none",
        log_level="info" if options.log_requests else "warning", backlog=2048, server_header=False,
        timeout_graceful_shutdown=max(round(options.drain_seconds), 1), timeout_keep_alive=round(SERVE_IDLE.seconds),
    )  # fmt: skip
    server = _Server(config, started)

    async def main() -> bool:
        service = TextService(models, options, board, number)
        held.append(service)

        def stop() -> None:
            server.force_exit = service.is_draining  # whoever asks twice does not want to wait
            service.is_draining = server.should_exit = True

        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop)
        await server.serve(sockets=[listener])
        return service.close(SERVE_END.seconds / 2)

    loop = _new_loop()
    try:
        return 0 if loop.run_until_complete(main()) else 1
    finally:
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
