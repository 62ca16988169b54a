"""The client of `weft bench serve`, against a small server that does as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from weft.bench.systems.servers.client import (
    BlockingClient,
    HttpAnswer,
    HttpRequest,
    closed_loop,
    open_loop,
    overload,
    run_client,
)
from weft.bench.systems.servers.processes import free_port
from weft.errors import WeftError


class Servant:
    """An HTTP server on the loopback, in a thread of its own. A path says what it does:

    /echo      the body, in pieces of three bytes
    /late      the same after 50 ms
    /full      429         /wrong     500
    /gone      hangs up    /stream    an answer without a length
    """

    def __init__(self) -> None:
        self.port = self.most = self.busy = self.connections = 0
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,))
        self._thread.start()
        assert ready.wait(10)

    def _run(self, ready: threading.Event) -> None:
        async def start() -> asyncio.Server:
            return await asyncio.start_server(self._serve, "127.0.0.1", 0)

        server = self._loop.run_until_complete(start())
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                size = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length")), 0)
                body = await reader.readexactly(size)
                self.busy += 1
                self.most = max(self.most, self.busy)
                await self._answer(path, body, writer)
                self.busy -= 1
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/late":
            await asyncio.sleep(0.05)
        if path == "/gone":
            self.busy -= 1
            raise ConnectionError
        status = {"/full": "429 Too Many", "/wrong": "500 Wrong"}.get(path, "200 OK")
        length = b"" if path == "/stream" else f"Content-Length: {len(body)}\r\n".encode()
        answer = f"HTTP/1.1 {status}\r\n".encode() + length + b"\r\n" + body
        pieces = [answer[at : at + 3] for at in range(0, len(answer), 3)] if path == "/echo" else [answer]
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def servant() -> Iterator[Servant]:
    found = Servant()
    yield found
    found.close()


def asked(path: str, count: int = 1, tokens: int = 7) -> list[HttpRequest]:
    return [HttpRequest.post(path, {"number": number}, tokens=tokens) for number in range(count)]


def test_a_closed_loop_sends_so_many_at_a_time_and_every_answer_is_its_own(servant: Servant) -> None:
    bodies: dict[int, bytes] = {}

    def check(number: int, answer: HttpAnswer) -> str | None:
        bodies[number] = answer.body
        return "an odd one" if number == 5 else None

    load = run_client(closed_loop(servant.port, asked("/late", 20), concurrency=4, check=check))
    assert [json.loads(bodies[number])["number"] for number in range(20)] == list(range(20))
    assert servant.most == servant.connections == 4
    assert (len(load.latencies), load.errors, load.tokens) == (19, ("an odd one",), 19 * 7)
    assert min(load.latencies) >= 0.05
    assert load.seconds >= 5 * 0.05
    assert load.client_cpu > 0
    pieces = run_client(closed_loop(servant.port, asked("/echo", 3), concurrency=1))
    assert len(pieces.latencies) == 3


def test_what_goes_wrong_is_counted_by_kind(servant: Servant) -> None:
    requests = asked("/full") + asked("/wrong") + asked("/gone") + asked("/stream") + asked("/echo")
    load = run_client(closed_loop(servant.port, requests, concurrency=1))
    row = load.row()
    assert (row["rejected"], row["errors"], row["requests"]) == (0.2, 3, 5)
    wrong, gone, stream = load.errors
    assert wrong.startswith("500")
    assert "closed the connection" in gone
    assert "content-length" in stream
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_nobody_listens() -> None:
    load = run_client(closed_loop(free_port(), asked("/echo", 2), concurrency=2))
    assert len(load.errors) == 2
    assert not load.is_within(10.0)
    assert json.dumps(load.row(), allow_nan=False)


def test_an_open_loop_does_not_wait_for_answers(servant: Servant) -> None:
    times = [0.0, 0.001, 0.002, 0.003]
    load = run_client(open_loop(servant.port, asked("/late", 4), times, limit=30.0))
    assert servant.most > 1
    assert load.is_within(30.0)
    assert not load.is_within(0.01)
    assert len(load.latencies) == 4


def test_an_open_loop_stops_when_too_many_are_late(servant: Servant) -> None:
    times = [0.02 * n for n in range(200)]
    load = run_client(open_loop(servant.port, asked("/late", 200), times, limit=0.01))
    assert load.is_cut
    assert not load.is_within(100.0)
    assert 2 < load.count < 200
    rejected = run_client(open_loop(servant.port, asked("/full", 20), [0.0] * 20, limit=10.0))
    assert rejected.is_cut


def test_who_is_rejected_comes_back(servant: Servant) -> None:
    load = run_client(overload(servant.port, asked("/full", 50), clients=3, pause=0.01, seconds=0.5))
    assert not load.latencies
    assert len(load.rejections) > 3  # more than there are clients


def test_a_server_that_never_answers_is_an_error(servant: Servant) -> None:
    with pytest.raises(WeftError, match=r"within 0\.2 s"):
        run_client(closed_loop(servant.port, asked("/late", 100), concurrency=1), deadline=0.2)


def test_one_request_that_blocks(servant: Servant) -> None:
    with BlockingClient(servant.port) as client:
        assert json.loads(client.ask(asked("/echo")[0]).body) == {"number": 0}
        assert client.ask(asked("/wrong")[0]).status == 500
        with pytest.raises(ConnectionResetError):
            client.ask(asked("/gone")[0])
