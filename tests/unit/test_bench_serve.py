"""`weft bench serve`: searches, texts, answers, rows and the summary, and the queue of a peer."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import serve
from weft.bench.systems.sentence_transformers import minilm_folder
from weft.bench.systems.servers import sentence_transformers_app as app
from weft.bench.systems.servers import workload
from weft.bench.systems.servers.alone import what_differs
from weft.bench.systems.servers.client import LoadResult
from weft.bench.systems.servers.lineup import Sustained, _joined, _search
from weft.bench.systems.servers.processes import ServerProcess, ServerSetup, setups
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


def test_a_search_in_which_nothing_passes_goes_lower_and_ends() -> None:
    first = search = RateSearch(10.0, 30.0, steps=3)
    tried = []
    while not search.is_done:
        tried.append(search.rate)
        search = search.tell(search.rate <= 2.0).lower_if_none(first)
    assert search.found is not None
    assert 1.0 < search.found <= 2.0
    search = first
    for _ in range(20):
        search = search.tell(False).lower_if_none(first)
    assert search.is_done
    assert search.found is None


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
    {"figure": "command", "embed_command_vs_st": 2.5, "embed_command_vs_st_default": 3.0},
    {"figure": "start", "embed_start_s": 3.0},
    {"figure": "path", "embed_path_share": 0.04},
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
        "embed_command_vs_st_default": 3.0,
        "embed_start_s": 3.0,
        "embed_path_share": 0.04,
    }
    absent = [row for row in rows if row.get("absent")]
    assert [row["system"] for row in absent] == ["infinity"]


def test_the_summary_says_why_a_figure_is_missing() -> None:
    rows = rows_of("a", {"weft": 30.0, "sentence-transformers": 0.0}, {"vllm": "no .venv-vllm"})
    found = serve.summary(rows)
    assert found["vs_sentence_transformers"] == "never within the limit"
    assert found["vs_vllm_pooling"] == "no .venv-vllm"
    assert found["rejected_ms"] == "not measured"


# ---- the peer --------------------------------------------------------------------------------------------------------


def test_the_peers_queue_makes_one_batch_of_requests_that_come_together() -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_folder()), device="cpu")
    calls: list[int] = []

    class Counting:
        def encode(self, texts: list[str], **options: object) -> object:
            calls.append(len(texts))
            return model.encode(texts, **options)

    async def ask() -> list[object]:
        batcher = app._Batcher(Counting(), 8)
        worker = asyncio.create_task(batcher.work())
        try:
            return await asyncio.gather(*(batcher.encode([f"text {n}", "and one more"]) for n in range(20)))
        finally:
            worker.cancel()

    found = asyncio.run(asyncio.wait_for(ask(), 120))
    assert calls == [32, 8]  # texts, of which 32 are the most
    for n, rows in enumerate(found):
        np.testing.assert_allclose(rows, model.encode([f"text {n}", "and one more"]), atol=1e-5)
