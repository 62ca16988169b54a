"""Arrivals on a clock that the test moves: who waits for whom, and that both ways serve the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from generation_cases import WORDS, lively

import weft
from weft.bench.systems.arrivals import Service, TimedRequest, busiest, poisson, serve_continuously, serve_in_batches


def ticking(seconds: float) -> Callable[[], float]:
    """Every call of it is so much later: what lies between two calls takes `seconds`."""
    return (seconds * n for n in count()).__next__


def test_a_late_request_waits_for_a_batch_and_joins_a_generator() -> None:
    model = weft.pack(lively("Llama"))
    arrivals = [TimedRequest(0.0, (5, 6, 7), 10), TimedRequest(1.5, (8,), 2), TimedRequest(100.0, (9, 4), 1)]
    found = serve_continuously(model, arrivals, clock=ticking(1.0))  # a step takes a second
    assert found.latencies == (10.0, 2.5, 1.0)
    assert (found.seconds, found.tokens) == (101.0, 13)
    found = serve_in_batches(model, arrivals, most=8, clock=ticking(10.0))  # a batch ten
    assert found.latencies == (10.0, 18.5, 10.0)
    assert (found.seconds, found.tokens) == (110.0, 13)


def test_arrivals_are_the_same_at_every_rate() -> None:
    options = {"words": WORDS, "prompts": (1, 9), "new_tokens": (2, 5)}
    slow, fast = poisson(200, rate=1.0, **options), poisson(200, rate=10.0, **options)
    assert [a.prompt for a in slow] == [a.prompt for a in fast]
    assert slow[-1].at == pytest.approx(10 * fast[-1].at)
    assert 150 < slow[-1].at < 250
    assert {len(a.prompt) for a in slow} == set(range(1, 10))
    assert {a.new_tokens for a in slow} == {2, 3, 4, 5}


def test_real_steps_on_the_real_clock() -> None:
    model = weft.pack(lively("GPT2"))
    arrivals = poisson(20, rate=50.0, words=WORDS, prompts=(1, 30), new_tokens=(1, 9))
    ways = [serve_continuously(model, arrivals, slots=4), serve_in_batches(model, arrivals, most=4)]
    assert [way.tokens for way in ways] == [sum(a.new_tokens for a in arrivals)] * 2
    for way in ways:
        assert len(way.latencies) == 20
        assert 0 < way.p99 <= max(way.latencies)


def test_the_busiest_rate_within_a_p99() -> None:
    def serve(rate: float) -> Service:
        return Service(1.0, int(rate * 100), (rate / 10,) * 3)

    found = busiest(serve, 0.4, first=1.0, factor=1.02)
    assert found is not None
    assert 390 < found.tokens <= 400
    assert busiest(serve, 0.05, first=1.0, factor=1.5) is None


def test_one_rate_that_somebody_disturbed_is_passed_over() -> None:
    slow = iter([0.1, 9.0, 0.1, 9.0, 9.0])
    found = busiest(lambda rate: Service(1.0, round(rate), (next(slow),) * 3), 1.0, first=100.0, factor=2.0)
    assert found is not None
    assert found.tokens == 400
