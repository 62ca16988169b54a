"""Requests that arrive at random: served as they come, or in closed batches, by the same `weft.Generator`.

Time is what the systems compute; while nothing is there to do, the clock jumps to the next arrival, so that nobody
waits for requests that are only imagined. What has arrived while a step was computed joins at the next.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.transformer.generation import Generator

Clock = Callable[[], float]
_SLACK = 1.1  # a p99 is noisy: the same rate must pass again


@dataclass(frozen=True)
class TimedRequest:
    """A request that comes `at` so many seconds and wants `new_tokens` tokens."""

    at: float
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Service:
    """How arrivals were served: seconds from the first arrival to the last token, and each request's own.

    >>> Service(2.0, 30, (0.5, 1.0)).tokens_per_second
    15.0
    """

    seconds: float
    tokens: int
    latencies: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def p99(self) -> float:
        """Seconds within which 99 of 100 requests were done."""
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[98]


def poisson(
    count: int, *, rate: float, words: int, prompts: tuple[int, int], new_tokens: tuple[int, int], seed: int = 0
) -> list[TimedRequest]:
    """`count` arrivals, `rate` a second; lengths are uniform between two numbers. At another rate the same requests
    come in the same order.

    >>> [len(a.prompt) for a in poisson(2, rate=1.0, words=9, prompts=(3, 3), new_tokens=(1, 4))]
    [3, 3]
    """
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        prompt = tuple(rng.randrange(words) for _ in range(rng.randint(*prompts)))
        found.append(TimedRequest(at, prompt, rng.randint(*new_tokens)))
        at += rng.expovariate(1.0) / rate
    return found


def serve_continuously(
    model: Any, arrivals: Sequence[TimedRequest], *, clock: Clock = time.perf_counter, **options: Any
) -> Service:  # fmt: skip
    """Each request joins at the step after its arrival; `options` are those of `weft.Generator`."""
    generator, waiting, now = Generator(model, **options), list(arrivals), 0.0
    streams: list[tuple[TimedRequest, Any]] = []
    done: dict[int, float] = {}
    while waiting or len(done) < len(arrivals):
        if waiting and len(done) == len(streams):  # nothing to do until the next one comes
            now = max(now, waiting[0].at)
        while waiting and waiting[0].at <= now:
            arrival = waiting.pop(0)
            streams.append((arrival, generator.submit(arrival.prompt, max_new_tokens=arrival.new_tokens, eos=())))
        start = clock()
        generator.step()
        now += clock() - start
        for number, (arrival, stream) in enumerate(streams):
            if number not in done and stream.is_done:
                done[number] = now - arrival.at
    tokens = sum(len(stream.tokens) for _, stream in streams)
    return Service(now - arrivals[0].at, tokens, tuple(done[number] for number in range(len(arrivals))))


def serve_in_batches(
    model: Any, arrivals: Sequence[TimedRequest], *, most: int, clock: Clock = time.perf_counter
) -> Service:  # fmt: skip
    """What has arrived, up to `most` requests, is a batch that runs to its end; who comes meanwhile waits. A request
    that has its tokens leaves the batch, which gets faster, but all get their answers when the last one has."""
    generator, waiting, now, latencies, tokens = Generator(model), list(arrivals), 0.0, [], 0
    while waiting:
        now = max(now, waiting[0].at)
        batch = [arrival for arrival in waiting[:most] if arrival.at <= now]
        waiting = waiting[len(batch) :]
        start = clock()
        streams = [generator.submit(a.prompt, max_new_tokens=a.new_tokens, eos=()) for a in batch]
        while not all(stream.is_done for stream in streams):
            generator.step()
        now += clock() - start
        latencies += [now - arrival.at for arrival in batch]
        tokens += sum(arrival.new_tokens for arrival in batch)
    return Service(now - arrivals[0].at, tokens, tuple(latencies))


def busiest(serve: Callable[[float], Service], p99: float, *, first: float, factor: float) -> Service | None:
    """The most tokens a second that a system serves with 99 of 100 requests done within `p99` seconds; None where that
    is never so. The rate of arrivals rises by a factor until two in a row are too much."""
    best: Service | None = None
    rate, misses = first, 0
    while misses < 2:
        found = serve(rate)
        if found.p99 > p99:
            misses += 1
        else:
            misses, best = 0, found
        rate *= factor
    return best


def continuous_against_closed(
    model: Any, *, words: int, count: int = 200, most: int = 16, prompts: tuple[int, int] = (16, 256),
    new_tokens: tuple[int, int] = (8, 128), factor: float = 1.12, seed: int = 0, clock: Clock = time.perf_counter,
) -> dict[str, float]:  # fmt: skip
    """Tokens a second of both, at a p99 that both keep: a tenth longer than the one that closed batches have at half of
    what they can compute when there is always enough to do. `continuous_vs_closed` is how many times as many the
    generator serves."""

    def at(rate: float) -> list[TimedRequest]:
        return poisson(count, rate=rate, words=words, prompts=prompts, new_tokens=new_tokens, seed=seed)

    def in_batches(rate: float) -> Service:
        return serve_in_batches(model, at(rate), most=most, clock=clock)

    def as_they_come(rate: float) -> Service:
        return serve_continuously(model, at(rate), clock=clock)

    in_batches(1e9)  # the first pass makes buffers
    half = count / in_batches(1e9).seconds / 2  # requests a second
    p99 = _SLACK * max(in_batches(half).p99 for _ in range(3))
    closed = busiest(in_batches, p99, first=half, factor=factor)
    ours = busiest(as_they_come, p99, first=half, factor=factor)
    rates = [0.0 if found is None else found.tokens_per_second for found in (closed, ours)]
    return {
        "p99_s": p99, "closed_tokens_s": rates[0], "continuous_tokens_s": rates[1],
        "continuous_vs_closed": rates[1] / rates[0] if rates[0] else math.nan,
    }  # fmt: skip
