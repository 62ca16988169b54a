"""`weft bench serve`: its pure parts by tables, and its client against a small server that does as it is told."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import serve
from weft.bench.systems.servers import workload
from weft.bench.systems.servers.alone import what_differs
from weft.bench.systems.servers.client import (
    BlockingClient,
    HttpAnswer,
    HttpRequest,
    LoadResult,
    closed_loop,
    open_loop,
    overload,
    run_client,
)
from weft.bench.systems.servers.lineup import Sustained, _joined, _search
from weft.bench.systems.servers.processes import ServerProcess, ServerSetup, free_port, setups
from weft.bench.systems.servers.rates import RateSearch, Slope, percentile, poisson_times, rank
from weft.errors import WeftError

# ---- percentiles, rates, slopes --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_a_percentile_is_a_value_that_its_share_does_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= rank(len(values), share)
    assert sum(v < found for v in values) < rank(len(values), share)


def test_percentiles_at_their_edges() -> None:
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile(list(range(1, 101)), 1.0) == 100
    assert percentile([], 0.5) == math.inf
    with pytest.raises(ValueError, match="got the share 0"):
        percentile([1.0], 0)


def test_arrivals_have_their_rate_and_one_pattern() -> None:
    slow, fast = (poisson_times(2000, rate=rate, seed=3) for rate in (2.0, 20.0))
    assert slow[0] == 0
    assert slow == sorted(slow)
    assert slow == pytest.approx([10 * at for at in fast])
    assert 900 < slow[-1] < 1100
    assert poisson_times(5, rate=1.0, seed=1) != poisson_times(5, rate=1.0, seed=2)


@given(st.floats(0.5, 400.0), st.integers(1, 12))
def test_a_search_ends_next_to_what_a_server_can_do(limit: float, steps: int) -> None:
    search, tried = RateSearch(1.0, 256.0, steps), 0
    while not search.is_done:
        search = search.tell(search.rate <= limit)
        tried += 1
    assert tried == steps
    width = 256 ** (1 / 2**steps)
    if search.found is None:
        assert limit < width * (1 + 1e-9)
    else:
        assert search.found <= limit
        assert limit <= search.found * width * (1 + 1e-9) or limit > 256


def test_a_search_refuses_rates_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="expected the first to be the smaller"):
        RateSearch(2.0, 1.0, 3)


def test_later_searches_are_close_to_the_first_or_lower_if_nothing_passed() -> None:
    assert (_search(90.0, [], 5).low, _search(90.0, [], 5).high) == (30.0, 90.0)
    close = _search(90.0, [Sustained((60.0,), None)], 5)
    assert close.low < 60 < close.high < 90
    assert close.steps == 3
    assert _search(90.0, [Sustained((), None)], 5).low == pytest.approx(10.0)
    joined = _joined([Sustained((6.0,), None, 1), Sustained((), None, 0), Sustained((9.0,), None, 2)])
    assert (joined.rate, joined.disturbed) == (7.5, 3)


def test_a_slope_is_told_from_noise() -> None:
    noise = [0.3 * (-1) ** n for n in range(100)]
    flat = Slope.of(range(100), [200 + e for e in noise])
    growing = Slope.of(range(100), [200 + 0.1 * n + e for n, e in enumerate(noise)])
    assert flat.is_flat
    assert not growing.is_flat
    assert growing.gain == pytest.approx(0.1, abs=0.001)
    with pytest.raises(ValueError, match="at two places"):
        Slope.of([1.0, 1.0], [2.0, 3.0])


# ---- the client ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("late", "errors", "is_good"), [(0, 0, True), (2, 0, True), (3, 0, False), (0, 1, False)])
def test_within_a_limit(late: int, errors: int, is_good: bool) -> None:
    load = LoadResult(1.0, (0.1,) * (200 - late) + (0.3,) * late, errors=("no",) * errors)
    assert load.is_within(0.2) is is_good


# ---- texts, answers, processes ---------------------------------------------------------------------------------------


def test_texts_have_the_lengths_that_are_said(tmp_path: Path) -> None:
    folder = workload.minilm(tmp_path / "minilm")
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 512
    texts = workload.mixed_texts(folder, 60)
    assert len({text.text for text in texts}) == 60
    assert all(16 <= text.tokens <= 512 for text in texts)
    assert sum(text.tokens < 91 for text in texts) == pytest.approx(30, abs=10)  # half of the logarithmic scale
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [len(tokenizer(text.text)["input_ids"]) for text in texts] == [text.tokens for text in texts]
    assert workload.mixed_texts(folder, 60) == texts


def test_mixed_requests_are_of_all_kinds() -> None:
    texts = [workload.SizedText(f"text {n}", n + 3) for n in range(9)]
    mixed = workload.mixed_requests(texts, 300)
    bodies = [json.loads(one.request.message.split(b"\r\n\r\n", 1)[1]) for one in mixed]
    given = [body.get("input", body.get("inputs")) for body in bodies]
    assert {type(words) for words in given} == {str, list}
    assert {body.get("encoding_format") for body in bodies} == {None, "float", "base64"}
    for one, words in zip(mixed, given, strict=True):
        assert [texts[n].text for n in one.texts] == ([words] if isinstance(words, str) else words)
        assert one.request.tokens == sum(texts[n].tokens for n in one.texts)


def test_an_answer_must_have_the_bits_that_are_wanted() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    forms = [
        json.dumps({"data": [{"embedding": base64.b64encode(row.tobytes()).decode()} for row in rows]}),
        json.dumps({"data": [{"embedding": row.tolist()} for row in rows]}),
        json.dumps(rows.tolist()),
    ]
    other = rows.copy()
    other[1, 2] = np.nextafter(other[1, 2], np.float32(9))
    for form in forms:
        assert what_differs(form.encode(), rows) is None
        assert what_differs(form.encode(), other) == "vector 1 has other bits than the encoder gives"
        assert what_differs(form.encode(), rows[:1]) == "2 vectors for 1 texts"
    assert "cannot be read" in str(what_differs(b"{", rows))
    assert "cannot be read" in str(what_differs(b'{"error": 1}', rows))


def test_a_server_that_ends_or_is_missing_is_named(tmp_path: Path) -> None:
    setup = ServerSetup("poor", "sh -c exit", needs=tmp_path / "nowhere", remedy="make it")
    assert setup.absent == f"no {tmp_path}/nowhere; make it"
    with (
        ServerProcess(ServerSetup("poor", "ls /does/not/exist"), tmp_path) as server,
        pytest.raises(WeftError, match=r"(?s)the server poor ended with .*/does/not/exist"),
    ):
        server.wait_until_ready(timeout=30)


def test_every_server_gets_the_same_threads() -> None:
    found = {setup.name: setup for setup in setups(3)}
    assert list(found) == ["weft", "sentence-transformers", "vllm", "infinity"]
    assert {setup.variables["OMP_NUM_THREADS"] for setup in found.values()} == {"3"}
    assert found["vllm"].variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"


# ---- rows and the summary --------------------------------------------------------------------------------------------


def rows_of(model: str, rates: dict[str, float], absent: dict[str, str]) -> list[serve.Row]:
    load = LoadResult(2.0, (0.1, 0.2), tokens=50, client_cpu=0.1)
    found = {name: Sustained((rate,) if rate else (), load if rate else None) for name, rate in rates.items()}
    closed = serve.closed_rows(model, 8, dict.fromkeys(rates, load))
    return [*closed, *serve.sustained_rows(model, 0.25, found, absent)]


ALONE: list[serve.Row] = [
    {"figure": "overhead", "overhead_ms": 1.5},
    {"figure": "offline", "of_offline": 0.95},
    {"figure": "overload", "rejected_ms": 12.0, "errors": 0},
    {"figure": "soak", "rss_slope": 0.01, "errors": 2},
    {"figure": "command", "embed_command_vs_st": 2.5},
    {"figure": "start", "embed_start_s": 3.0},
]


def test_the_summary_of_stored_rows() -> None:
    rows = rows_of("a", {"weft": 30.0, "sentence-transformers": 10.0, "vllm": 15.0}, {"infinity": "no such thing"})
    rows += rows_of("b", {"weft": 5.0, "sentence-transformers": 2.0, "vllm": 2.0}, {})
    found = serve.summary(json.loads(json.dumps(rows + ALONE, allow_nan=False)))
    assert found == {
        "vs_sentence_transformers": 2.5,
        "vs_vllm_pooling": 2.0,
        "of_offline": 0.95,
        "overhead_ms": 1.5,
        "rejected_ms": 12.0,
        "errors": 2,
        "rss_slope": 0.01,
        "embed_command_vs_st": 2.5,
        "embed_start_s": 3.0,
    }
    absent = [row for row in rows if row.get("absent")]
    assert [row["system"] for row in absent] == ["infinity"]


def test_the_summary_says_why_a_figure_is_missing() -> None:
    rows = rows_of("a", {"weft": 30.0, "sentence-transformers": 0.0}, {"vllm": "no .venv-vllm"})
    found = serve.summary(rows)
    assert found["vs_sentence_transformers"] == "never within the limit"
    assert found["vs_vllm_pooling"] == "no .venv-vllm"
    assert found["rejected_ms"] == "not measured"
