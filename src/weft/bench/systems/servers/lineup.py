"""The servers that can run a model, started once: each is checked, then all have the same loads, in turns."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from weft.bench.harness import FOREIGN_LIMIT, relative_spread
from weft.bench.machine import NoiseMeter, foreign_cores
from weft.bench.systems.packed import why_absent
from weft.bench.systems.servers.client import (
    BlockingClient,
    HttpRequest,
    LoadResult,
    closed_loop,
    open_loop,
    run_client,
)
from weft.bench.systems.servers.processes import SENTENCE_TRANSFORMERS, WEFT, ServerProcess, ServerSetup
from weft.bench.systems.servers.rates import RateSearch, percentile, poisson_times
from weft.bench.systems.servers.workload import SizedText, vectors
from weft.errors import WeftError
from weft.jobs.embed import Encoder

AGREEMENT = 1e-4  # of vectors of length 1, across runtimes
SLACK = 1.1  # over the p99 from which the limit is made: it is noisy
_LOWEST, _NARROW = 3.0, 1.3  # the first search goes from a third of what a server can do, the next ones close by
_CHECKED = 3  # texts


@dataclass(frozen=True)
class SearchEffort:
    """How much is measured: the requests and the seconds that a trial has at least, trials of a search, searches, and
    trials that may be repeated because others disturbed them. A trial must be longer than the limit by far, or no queue
    can grow in it."""

    requests: int
    seconds: float
    steps: int
    rounds: int
    retries: int

    def count(self, rate: float) -> int:
        """Requests of a trial.

        >>> SearchEffort(60, 4.0, steps=3, rounds=1, retries=1).count(40.0)
        160
        """
        return max(self.requests, math.ceil(rate * self.seconds))


@dataclass(frozen=True)
class Sustained:
    """What a server sustains: requests a second, one figure a search, and its last load that was within the limit."""

    rates: tuple[float, ...]
    load: LoadResult | None
    disturbed: int = 0

    @property
    def rate(self) -> float:
        """The median; 0 if the p99 was never within the limit."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        return relative_spread(self.rates)


class ServerLineup:
    """Servers of one model. `absent` says of each that could not run why."""

    def __init__(
        self, setups: Sequence[ServerSetup], model: Path, texts: Sequence[SizedText], *, choose_with: int
    ) -> None:
        self._stack, self._texts, self._meter = ExitStack(), texts, NoiseMeter()
        self.absent = {setup.name: setup.absent for setup in setups if setup.absent is not None}
        self.servers: dict[str, ServerProcess] = {}
        sample = model.parent / f"{model.name}.txt"
        sample.write_text("\n".join(text.text for text in texts[:choose_with]), encoding="utf-8")
        self.encoder = Encoder(model)
        try:
            self._start([setup for setup in setups if setup.name not in self.absent], model, sample)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, setups: Sequence[ServerSetup], model: Path, sample: Path) -> None:
        """All at once, but for the one that tries out sizes of batches, which needs silence."""
        crowd = [setup for setup in setups if setup.name != SENTENCE_TRANSFORMERS]
        for several in (crowd, [setup for setup in setups if setup not in crowd]):
            started = [self._stack.enter_context(ServerProcess(setup, model, texts=sample)) for setup in several]
            for server in started:
                try:
                    self._check(server.wait_until_ready())
                    self.servers[server.name] = server
                except (WeftError, ValueError, OSError) as error:
                    if server.name in (WEFT, SENTENCE_TRANSFORMERS):
                        raise
                    self.absent[server.name] = why_absent(error)

    def _check(self, server: ServerProcess) -> None:
        """Raises if a server computes something else, which would make its time worthless."""
        few = sorted(self._texts, key=lambda text: text.tokens)[:: len(self._texts) // _CHECKED]
        want = self.encoder.embed(self.encoder.tokenize([text.text for text in few])).numpy()
        with server.turn(), BlockingClient(server.port) as caller:
            for text, row in zip(few, want, strict=True):
                answer = caller.ask(text.request())
                if answer.status != 200:
                    raise ValueError(f"it answers {answer.status}: {answer.body[:200]!r}")
                difference = float(np.abs(vectors(json.loads(answer.body))[0] - row).max())
                if not difference < AGREEMENT:
                    raise ValueError(f"its vectors differ from weft's by {difference:.1e}")

    def closed(self, concurrency: int, count: int) -> dict[str, LoadResult]:
        """So many requests at a time, each server in turn."""
        requests, found = self._requests(count), dict[str, LoadResult]()
        for server in self._shuffled(seed=concurrency):
            with self._peer_may_fail(server), server.turn():
                found[server.name] = run_client(closed_loop(server.port, requests, concurrency=concurrency))
        return found

    def p99_at_half(self, name: str, capacity: float, effort: SearchEffort) -> float:
        """A tenth more than the p99 of a server at half of the requests a second that it can answer; the largest of two
        loads, or of one where there is one search."""
        rate, seeds = capacity / 2, range(min(2, effort.rounds))
        found = [self._open(self.servers[name], rate, effort.count(rate), seed=seed)[0] for seed in seeds]
        return SLACK * max(percentile(load.latencies, 0.99) for load in found)

    def sustained(self, limit: float, capacities: Mapping[str, float], effort: SearchEffort) -> dict[str, Sustained]:
        """The most requests a second of each server within a p99; the first search is a wide one."""
        found: dict[str, list[Sustained]] = {name: [] for name in self.servers}
        for number in range(effort.rounds):
            searches = {name: _search(capacities[name], found[name], effort.steps) for name in self.servers}
            for name, one in self._searched(searches, limit, effort, seed=number).items():
                found[name].append(one)
        return {name: _joined(found[name]) for name in self.servers}

    def _searched(
        self, searches: Mapping[str, RateSearch], limit: float, effort: SearchEffort, *, seed: int
    ) -> dict[str, Sustained]:  # fmt: skip
        """One search of each server, trial by trial in turns."""
        left, open_searches = effort.retries, dict(searches)
        found = {name: Sustained((), None) for name in searches}
        while waiting := [server for server in self._shuffled(seed=seed) if not open_searches[server.name].is_done]:
            for server in waiting:
                search, before = open_searches[server.name], found[server.name]
                with self._peer_may_fail(server):
                    load, foreign = self._open(server, search.rate, effort.count(search.rate), seed=seed, limit=limit)
                    is_disturbed, passes = foreign > FOREIGN_LIMIT, load.is_within(limit)
                    if is_disturbed and not passes and left:
                        left -= 1
                        continue  # again in the next turn
                    rates, best = ((search.rate,), load) if passes else (before.rates, before.load)
                    found[server.name] = Sustained(rates, best, before.disturbed + is_disturbed)
                    open_searches[server.name] = search.tell(passes).lower_if_none(searches[server.name])
        return found

    @contextmanager
    def _peer_may_fail(self, server: ServerProcess) -> Iterator[None]:
        """A peer's failure is a text in a row, not the end of the benchmark; ours is."""
        try:
            yield
        except WeftError as error:
            if server.name in (WEFT, SENTENCE_TRANSFORMERS):
                raise
            self.absent[server.name] = why_absent(error)
            del self.servers[server.name]

    def _open(
        self, server: ServerProcess, rate: float, count: int, *, seed: int, limit: float | None = None
    ) -> tuple[LoadResult, float]:  # fmt: skip
        """A load at random times, and the cores that others used meanwhile."""
        times, before = poisson_times(count, rate=rate, seed=seed), self._meter.sample()
        with server.turn():
            load = run_client(open_loop(server.port, self._requests(count, seed), times, limit=limit))
        return load, foreign_cores(before, self._meter.sample())

    def _requests(self, count: int, seed: int = 0) -> list[HttpRequest]:
        """The same for every server, others for another seed."""
        chosen = self._texts if seed == 0 else random.Random(seed).sample(self._texts, len(self._texts))
        return [chosen[number % len(chosen)].request() for number in range(count)]

    def _shuffled(self, *, seed: int) -> Iterator[ServerProcess]:
        return iter(random.Random(seed).sample(list(self.servers.values()), len(self.servers)))

    def __enter__(self) -> ServerLineup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _search(capacity: float, before: Sequence[Sustained], steps: int) -> RateSearch:
    """From a third of what a server can do to all of it; once a rate is known, close to that, with two trials less."""
    known = [one.rate for one in before if one.rates]
    if not known:
        return RateSearch(capacity / _LOWEST ** (1 + len(before)), capacity, steps)
    return RateSearch(known[-1] / _NARROW, known[-1] * _NARROW, max(1, steps - 2))


def _joined(several: Sequence[Sustained]) -> Sustained:
    loads = [one.load for one in several if one.load is not None]
    rates = tuple(rate for one in several for rate in one.rates)
    return Sustained(rates, loads[-1] if loads else None, sum(one.disturbed for one in several))
