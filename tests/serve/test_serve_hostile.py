"""Clients that are slow, leave, lie or ask for too much: what they get, and that others do not notice."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from servers import DEADLINE, Serving, serving

from weft.comm.deadline import Limit
from weft.jobs.serve import service as service_module
from weft.jobs.serve.http import protocol
from weft.jobs.serve.models import Ask, Given, ServedModel, TextContent
from weft.jobs.serve.options import ModelChoice
from weft.jobs.serve.tokens import RequestTokenizer


class Gated(ServedModel):
    """Another model behind a gate, which is closed at first; fails as told."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(ModelChoice("gated", model.folder))
        self.inner, self.tasks, self.width, self.dtype = model, model.tasks, model.width, model.dtype
        self.max_length = model.max_length
        self.entered, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self.batches: list[int] = []
        self.poison: int | None = None  # a batch with a text of so many tokens fails

    def tokenizer(self) -> RequestTokenizer:
        return self.inner.tokenizer()

    def identity(self) -> dict[str, Any]:
        return self.inner.identity()

    def prepare(self, given: Sequence[Given], ask: Ask) -> list[tuple[TextContent, int]]:
        return self.inner.prepare(given, ask)

    def run(self, contents: Sequence[TextContent]) -> list[Any]:
        self.batches.append(len(contents))
        self.entered.release()
        assert self.opened.acquire(timeout=DEADLINE)
        if any(len(content.tokens) == self.poison for content in contents):
            raise RuntimeError("poisoned")
        return self.inner.run(contents)


@contextmanager
def gated(models: dict[str, ServedModel], **options: Any) -> Iterator[tuple[Serving, Gated]]:
    gate = Gated(models["unit"])
    with serving({"gated": gate}, **options) as server:
        try:
            yield server, gate
        finally:
            gate.opened.release(1000)


def raw(server: Serving, content: bytes) -> socket.socket:
    """A connection on which this was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), DEADLINE)
    connection.sendall(content)
    return connection


def head(length: int | str, path: str = "/v1/embeddings") -> bytes:
    size = f"Content-Length: {length}" if isinstance(length, int) else "Transfer-Encoding: chunked"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n".encode()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_a_slow_sender_holds_up_nobody(server: Serving) -> None:
    body = json.dumps({"input": "slow"}).encode()
    with raw(server, head(len(body)) + body[:5]) as slow:
        for _ in range(5):
            assert server.post("/v1/embeddings", {"input": "fast"}).status_code == 200
        slow.sendall(body[5:])
        assert slow.recv(15).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_ends(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SERVE_BODY", Limit("the body of a request", 0.05))
    with raw(server, head(100) + b"{") as slow:
        assert slow.recv(15).startswith(b"HTTP/1.1 408")


def closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; waits for that, up to the deadline."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_head_that_does_not_come_ends(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with raw(server, whole) as usual:  # one that is between requests is not meant
        assert usual.recv(15) == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(protocol, "SERVE_HEAD", Limit("the head of a request", 0.05))
        with raw(server, b"") as silent, raw(server, whole[:30]) as cut:
            assert closed(silent)
            assert closed(cut)
        monkeypatch.setattr(protocol, "SERVE_HEAD", Limit("the head of a request", DEADLINE))
        usual.sendall(whole)
        wait_for(lambda: b"HTTP/1.1 200 OK" in usual.recv(4096))


@pytest.mark.parametrize("what", [b"x: y\r\n", b"x"], ids=["many", "long"])
def test_a_head_that_does_not_end_is_not_held(server: Serving, what: bytes) -> None:
    with raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\nname: ") as endless:
        with suppress(ConnectionError):
            for _ in range(100):
                endless.sendall(what * 4000)
        assert closed(endless)
    assert server.get("/health").status_code == 200


def test_a_slow_reader_holds_up_nobody(server: Serving) -> None:
    body = json.dumps({"inputs": ["ab" * 29] * 32}).encode()
    readers = []
    try:
        for _ in range(4):
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the answers have a megabyte each
            slow.connect(("127.0.0.1", server.port))
            slow.sendall(head(len(body), "/embed_all") + body)
            readers.append(slow)
        for _ in range(5):
            assert server.post("/v1/embeddings", {"input": "fast"}).status_code == 200
        assert readers[0].recv(15).startswith(b"HTTP/1.1 200")
    finally:
        for slow in readers:
            slow.close()
    assert server.post("/v1/embeddings", {"input": "fast"}).status_code == 200


def test_who_leaves_is_not_computed(models: dict[str, ServedModel]) -> None:
    body = json.dumps({"input": ["never", "computed"]}).encode()
    with gated(models) as (server, gate):
        first, answers = in_thread(lambda: server.post("/v1/embeddings", {"input": "first"}))
        assert gate.entered.acquire(timeout=DEADLINE)
        leaving = raw(server, head(len(body)) + body)
        wait_for(lambda: server.service.engine.waiting == 2)
        leaving.close()
        wait_for(lambda: server.service.board.value("weft_dropped") == 1)
        last, more = in_thread(lambda: server.post("/v1/embeddings", {"input": "last"}))
        wait_for(lambda: server.service.engine.waiting == 3)
        gate.opened.release(2)
        first.join(DEADLINE)
        last.join(DEADLINE)
        assert [a.status_code for a in (*answers, *more)] == [200, 200]
        assert gate.batches == [1, 1]
        assert server.service.board.value("weft_requests_in_flight") == 0


def test_who_leaves_while_sending_is_forgotten(server: Serving) -> None:
    raw(server, head(1000) + b'{"input"').close()
    raw(server, b"POST /v1/emb").close()
    assert server.post("/v1/embeddings", {"input": "still"}).status_code == 200


def test_too_many_at_once_are_refused_at_once(models: dict[str, ServedModel]) -> None:
    with gated(models, max_concurrent_requests=1) as (server, gate):
        first, answers = in_thread(lambda: server.post("/v1/embeddings", {"input": "first"}))
        assert gate.entered.acquire(timeout=DEADLINE)  # and the gate is closed: what follows does not wait for it
        refused = server.post("/v1/embeddings", {"input": "second"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        tei = server.post("/embed", {"inputs": "second"})
        assert (tei.status_code, tei.json()) == (429, {"error": "Model is overloaded", "error_type": "Overloaded"})
        assert server.get("/health").status_code == 200
        gate.opened.release()
        first.join(DEADLINE)
        assert answers[0].status_code == 200
        gate.opened.release()
        assert server.post("/embed", {"inputs": "third"}).status_code == 200


def test_a_text_that_fails_fails_alone(models: dict[str, ServedModel]) -> None:
    with gated(models) as (server, gate):
        gate.poison = 7 + 2
        first, _ = in_thread(lambda: server.post("/embed", {"inputs": "a"}))
        assert gate.entered.acquire(timeout=DEADLINE)
        threads = [in_thread(lambda text=text: server.post("/embed", {"inputs": text})) for text in ("abc", "abcdefg")]
        wait_for(lambda: server.service.engine.waiting == 2)
        gate.opened.release(10)
        for thread in (first, *(thread for thread, _ in threads)):
            thread.join(DEADLINE)
        good, bad = (found[0] for _, found in threads)
        assert good.status_code == 200
        assert (bad.status_code, bad.json()["error_type"]) == (424, "Backend")
        assert gate.batches[:2] == [1, 2]
        assert server.post("/embed", {"inputs": "a"}).status_code == 200


def test_what_is_no_number_is_not_sent(models: dict[str, ServedModel]) -> None:
    import torch

    model: Any = models["plain"]
    encoder = model._encoder
    steps = encoder._steps
    encoder._steps = [lambda rows: torch.where(rows.sum() > 0, torch.nan, torch.nan) * rows]
    try:
        with serving({"plain": model}) as server:
            answer = server.post("/embed", {"inputs": "a", "normalize": None})
            assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")
    finally:
        encoder._steps = steps


@pytest.mark.parametrize("size", [200, "chunked"])
def test_bodies_over_the_limit(models: dict[str, ServedModel], size: int | str) -> None:
    """A stream is cut off where it passes the limit, and not where it ends."""
    with serving(models, payload_limit=100) as server:
        body = b"x" * 200 if size == 200 else b"c8\r\n" + b"x" * 200 + b"\r\n"  # and no end
        with raw(server, head(size) + body) as connection:
            assert connection.recv(15).startswith(b"HTTP/1.1 413")
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200


BAD: dict[str, tuple[bytes, int, int]] = {  # body, status of TEI's routes, of OpenAI's
    "nothing": (b"", 400, 400),
    "no JSON": (b"hello", 400, 400),
    "cut": (b'{"KEY": ["a"', 400, 400),
    "NaN": (b'{"KEY": NaN}', 422, 400),
    "a number": (b'{"KEY": 5}', 422, 400),
    "null": (b'{"KEY": null}', 422, 400),
    "no key": (b"{}", 422, 400),
    "a list": (b"[1, 2]", 422, 400),
    "a text": (b'"text"', 422, 400),
    "mixed": (b'{"KEY": ["a", 5]}', 422, 400),
    "floats": (b'{"KEY": [1.5]}', 422, 400),
    "booleans": (b'{"KEY": [true]}', 422, 400),
    "negative ids": (b'{"KEY": [-1]}', 422, 400),
    "ids beyond": (b'{"KEY": [4000000000]}', 422, 422),
    "huge ids": (b'{"KEY": [99999999999999999999999]}', 422, 400),
    "empty": (b'{"KEY": []}', 400, 400),
    "no ids": (b'{"KEY": [[]]}', 400, 400),
    "lone surrogate": (rb'{"KEY": "\ud800"}', 400, 400),
    "not UTF-8": (b'{"KEY": "\xff\xfe"}', 400, 400),
    "deep": (b'{"KEY": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, 400),
    "10,000 texts": (json.dumps({"KEY": ["a"] * 10_000}).encode(), 413, 413),
    "a megabyte": (json.dumps({"KEY": "word " * 200_000}).encode(), 413, 413),
    "three megabytes": (json.dumps({"KEY": "word " * 600_000}).encode(), 413, 413),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(server: Serving, name: str) -> None:
    body, tei, openai = BAD[name]
    answer = server.post("/embed", body.replace(b"KEY", b"inputs"))
    assert answer.status_code == tei, answer.text
    assert set(answer.json()) == {"error", "error_type"}
    answer = server.post("/v1/embeddings", body.replace(b"KEY", b"input"))
    assert answer.status_code == openai, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 500  # what was given is not repeated


def test_a_megabyte_can_be_cut(server: Serving) -> None:
    answer = server.post("/embed", {"inputs": "word " * 200_000, "truncate": True})
    assert answer.status_code == 200
    assert answer.headers["x-compute-tokens"] == "60"


def test_strange_texts_are_texts(server: Serving, models: dict[str, ServedModel]) -> None:
    encoder = models["unit"]._encoder  # type: ignore[attr-defined]
    texts = ["", " ", "nul\0byte", "\u202e\u0000\uffff", "👩‍👩‍👧‍👦", "a[SEP]b", "\x7f\x1b[31m"]
    found = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    wanted = encoder.embed(encoder.tokenize(texts)).numpy()
    assert np.array([row["embedding"] for row in found], np.float32).tobytes() == wanted.tobytes()


def test_no_route_but_health_without_the_key(models: dict[str, ServedModel]) -> None:
    with serving(models, api_key="s3cret") as server:
        document = server.get("/openapi.json", headers={"authorization": "Bearer s3cret"}).json()
        paths = [(path, method) for path, methods in document["paths"].items() for method in methods]
        assert len(paths) > 15
        for path, method in [*paths, ("/openapi.json", "get")]:
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                with server.client() as client:
                    answer = client.request(method, path, headers=given)
                assert answer.status_code == (200 if path in ("/health", "/ping") else 401), path
        key = {"authorization": "Bearer s3cret"}
        assert server.post("/v1/embeddings", {"input": "a"}, headers=key).status_code == 200
        assert server.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert server.get("/v1/models", headers={"authorization": b"Bearer \xe9"}).status_code == 401
