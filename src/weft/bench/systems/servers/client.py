"""Requests to a server over HTTP/1.1: so many at a time (closed loop), or at times that do not wait for it (open loop).

The client runs beside the server, on the same cores, so it does little: messages are bytes that were made before, an
answer is a status and a body that nobody parses unless asked to. It says how much CPU it took.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.bench.systems.servers.rates import percentile, rank
from weft.errors import WeftError

HOST = "127.0.0.1"
SHARE = 0.99  # of the requests that must be in time
DEADLINE_SECONDS = 600.0
_SHOWN = 300  # bytes of a body that an error quotes
T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """A whole HTTP message, and the tokens of its texts."""

    message: bytes
    tokens: int = 0

    @classmethod
    def post(cls, path: str, payload: object, *, tokens: int = 0) -> HttpRequest:
        """A message with a JSON body.

        >>> HttpRequest.post("/x", {}).message.split(b"\\r\\n")[0]
        b'POST /x HTTP/1.1'
        """
        body = json.dumps(payload).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return cls(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, tokens)

    @classmethod
    def get(cls, path: str) -> HttpRequest:
        """A message without a body."""
        return cls(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())


@dataclass(frozen=True)
class HttpAnswer:
    """What came back; `seconds` count from when the request was due."""

    status: int
    body: bytes
    seconds: float = 0.0

    @property
    def is_rejected(self) -> bool:
        """Whether the server had too much to do."""
        return self.status == 429


@dataclass(frozen=True)
class LoadResult:
    """How requests were answered.

    seconds:     from the first request to the last answer
    latencies:   of each answer 200
    rejections:  of each answer 429
    errors:      all else, in words
    tokens:      of the requests that were answered 200
    client_cpu:  seconds that the client computed
    is_cut:      too many were late for the p99 to be within the limit, so it was not gone on with
    """

    seconds: float
    latencies: tuple[float, ...]
    rejections: tuple[float, ...] = ()
    errors: tuple[str, ...] = ()
    tokens: int = 0
    client_cpu: float = 0.0
    is_cut: bool = False

    @property
    def count(self) -> int:
        """Requests that were sent."""
        return len(self.latencies) + len(self.rejections) + len(self.errors)

    def is_within(self, limit: float) -> bool:
        """Whether 99 of 100 requests were answered 200 in this time; rejected ones were not.

        >>> LoadResult(1.0, (0.1,) * 99, rejections=(0.1,)).is_within(0.1)
        True
        """
        in_time = sum(seconds <= limit for seconds in self.latencies)
        return not self.is_cut and not self.errors and 0 < rank(self.count, SHARE) <= in_time

    def row(self) -> dict[str, object]:
        """The values of a row."""
        found = {name: percentile(self.latencies, share) for name, share in _PERCENTILES.items()}
        return {
            **{f"{name}_ms": seconds * 1e3 if self.latencies else None for name, seconds in found.items()},
            "requests": self.count,
            "requests_s": len(self.latencies) / self.seconds,
            "tokens_s": self.tokens / self.seconds,
            "rejected": len(self.rejections) / max(1, self.count),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "client_cores": self.client_cpu / self.seconds,
        }


_PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": SHARE}
Check = Callable[[int, HttpAnswer], str | None]  # of a request's number and its answer: what is wrong with it


def run_client(work: Coroutine[Any, Any, T], *, deadline: float = DEADLINE_SECONDS) -> T:
    """Runs a load to its end; one that does not end is an error. Python's garbage collector rests meanwhile: beside
    torch it takes a tenth of a second, and the client's pauses would count as the server's."""

    async def limited() -> T:
        try:
            return await asyncio.wait_for(work, deadline)
        except asyncio.TimeoutError:
            raise WeftError(f"a server did not answer all requests within {deadline:g} s") from None

    collecting = gc.isenabled()
    gc.disable()
    try:
        return asyncio.run(limited())
    finally:
        if collecting:
            gc.enable()


async def closed_loop(
    port: int, requests: Sequence[HttpRequest], *, concurrency: int, check: Check | None = None, pause: float = 0.0
) -> LoadResult:
    """All requests, `concurrency` at a time, each on a connection of its own that waits `pause` seconds when a
    request was rejected, and then sends it again."""
    tally, numbers = _Tally(requests, check), iter(range(len(requests)))
    async with _Pool(port) as pool:
        await asyncio.gather(*(_work(pool, tally, numbers, pause) for _ in range(min(concurrency, len(requests)))))
    return tally.load()


async def _work(pool: _Pool, tally: _Tally, numbers: Iterator[int], pause: float) -> None:
    for number in numbers:
        answer = await pool.ask(tally, number, time.perf_counter())
        while pause and answer is not None and answer.is_rejected:
            await asyncio.sleep(pause)
            answer = await pool.ask(tally, number, time.perf_counter())


async def open_loop(
    port: int, requests: Sequence[HttpRequest], times: Sequence[float], *, limit: float | None = None
) -> LoadResult:
    """Each request at its time, whether or not others were answered. With a limit, the rest is not sent once more
    requests are late than a p99 within the limit allows."""
    tally, tasks = _Tally(requests), set[asyncio.Task[HttpAnswer | None]]()
    allowed = len(requests) - rank(len(requests), SHARE)
    async with _Pool(port) as pool:
        start = time.perf_counter()
        for number, at in enumerate(times):
            if (delay := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            if limit is not None and tally.late(limit) > allowed:
                tally.is_cut = True
                break
            task = asyncio.create_task(pool.ask(tally, number, start + at))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    if limit is not None and tally.late(limit) > allowed:
        tally.is_cut = True
    return tally.load()


async def overload(
    port: int, requests: Sequence[HttpRequest], *, clients: int, pause: float, seconds: float
) -> LoadResult:  # fmt: skip
    """`clients` that each send one request after the other, for some seconds; who is rejected comes back after a pause.
    They come one by one, within the first quarter of the time. At the end those that still wait leave."""
    tally, numbers = _Tally(requests), iter(range(len(requests)))

    async def client(place: int, pool: _Pool) -> None:
        await asyncio.sleep(seconds / 4 * place / clients)
        await _work(pool, tally, numbers, pause)

    async with _Pool(port) as pool:
        tasks = [asyncio.create_task(client(place, pool)) for place in range(clients)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if end is not None and not isinstance(end, asyncio.CancelledError):
                raise end
    return tally.load()


@dataclass
class _Tally:
    """What a load gives, while it goes on."""

    requests: Sequence[HttpRequest]
    check: Check | None = None
    is_cut: bool = False
    latencies: list[float] = field(default_factory=list)
    rejections: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    waiting: dict[int, float] = field(default_factory=dict)  # number -> when it was due
    start: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    cpu: float = field(default_factory=time.thread_time)

    def add(self, number: int, answer: HttpAnswer | None, error: str | None) -> None:
        self.end = time.perf_counter()
        self.waiting.pop(number, None)
        if answer is not None and answer.status == 200:
            error = self.check(number, answer) if self.check is not None else None
            if error is None:
                self.latencies.append(answer.seconds)
                self.tokens += self.requests[number].tokens
                return
        if answer is not None and answer.is_rejected:
            self.rejections.append(answer.seconds)
        else:
            self.errors.append(error or f"{answer.status}: {answer.body[:_SHOWN]!r}" if answer else f"{error}")

    def late(self, limit: float) -> int:
        """Requests of which it is known that they are not answered in time."""
        due = time.perf_counter() - limit
        late = sum(seconds > limit for seconds in self.latencies) + sum(at < due for at in self.waiting.values())
        return late + len(self.rejections) + len(self.errors)

    def load(self) -> LoadResult:
        return LoadResult(
            max(self.end - self.start, 1e-9), tuple(self.latencies), tuple(self.rejections), tuple(self.errors),
            self.tokens, time.thread_time() - self.cpu, self.is_cut,
        )  # fmt: skip


class _Pool:
    """Connections that stay open; a request takes one that is free, or a new one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []

    async def __aenter__(self) -> _Pool:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._all:
            connection.close()

    async def ask(self, tally: _Tally, number: int, due: float) -> HttpAnswer | None:
        """One request and its answer; None if there was none."""
        tally.waiting[number] = due
        try:
            connection = self._free.pop() if self._free else await self._connect()
            status, body = await connection.ask(tally.requests[number].message)
        except OSError as error:
            tally.add(number, None, f"{type(error).__name__}: {error}")
            return None
        answer = HttpAnswer(status, body, time.perf_counter() - due)
        if connection.is_open:
            self._free.append(connection)
        tally.add(number, answer, None)
        return answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, HOST, self._port)
        self._all.append(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. A protocol, not a stream: that takes half of the CPU."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body_at = self._end = -1
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, message: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Sends; the status and the body come later."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        self._received.clear()
        self._end = -1
        self._transport.write(message)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._end < 0 and (head := self._received.find(b"\r\n\r\n")) >= 0:
            self._body_at = head + 4
            try:
                self._end = self._body_at + content_length(bytes(self._received[:head]))
            except ValueError as error:
                self._finish(ConnectionAbortedError(str(error)))
                return
        if 0 <= self._end <= len(self._received):
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(ConnectionResetError(f"the server closed the connection before it answered ({error})"))

    def _finish(self, error: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if error is not None:
            self.close()
            answer.set_exception(error)
        else:
            answer.set_result((int(self._received[9:12]), bytes(self._received[self._body_at : self._end])))


def content_length(head: bytes) -> int:
    """The bytes of the body, as the head of an answer says.

    >>> content_length(b"HTTP/1.1 200 OK\\r\\nContent-Length: 12")
    12
    """
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    raise ValueError(f"got an answer without a content-length, expected one: {head[:_SHOWN]!r}")


class BlockingClient:
    """One connection that blocks: a request alone, for time in turns with something else in this process."""

    def __init__(self, port: int, *, timeout: float = 60.0) -> None:
        self._socket = socket.create_connection((HOST, port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: HttpRequest) -> HttpAnswer:
        """Sends, and waits for the answer."""
        start, received, end = time.perf_counter(), b"", -1
        self._socket.sendall(request.message)
        while end < 0 or len(received) < end:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the server closed the connection before it answered")
            received += data
            if end < 0 and (head := received.find(b"\r\n\r\n")) >= 0:
                body_at = head + 4
                end = body_at + content_length(received[:head])
        return HttpAnswer(int(received[9:12]), received[body_at:end], time.perf_counter() - start)

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
