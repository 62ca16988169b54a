"""The thread that computes: batches while it is busy, failures of one text, the end. Events force the order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from weft.jobs.serve.engine import BatchFigures, ComputeEngine
from weft.jobs.serve.errors import RequestError

DEADLINE = 30.0


class Gate:
    """Computes by doubling, and waits at a gate; fails where a batch holds "bad"."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.entered, self.opened = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, contents: Sequence[Any]) -> Sequence[Any]:
        self.batches.append(list(contents))
        self.entered.release()
        assert self.opened.acquire(timeout=DEADLINE)
        if "bad" in contents:
            raise ValueError("bad")
        return [2 * content for content in contents]

    async def wait(self) -> None:
        """Until a batch is at the gate."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.entered.acquire(timeout=DEADLINE))


def engine_of(*gates: Gate, budget: int = 10) -> tuple[ComputeEngine, list[BatchFigures]]:
    seen: list[BatchFigures] = []
    models = {f"m{i}": gate for i, gate in enumerate(gates)}
    engine = ComputeEngine(models, budget=budget, loop=asyncio.get_running_loop(), report=seen.append)
    engine.start()
    return engine, seen


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE))


def test_what_comes_while_it_computes_is_one_batch() -> None:
    async def body() -> None:
        gate = Gate()
        engine, seen = engine_of(gate)
        first = engine.submit("m0", [(1, 4)])
        await gate.wait()  # it did not wait for more
        others = [engine.submit("m0", [(i, 2), (i + 10, 2)]) for i in (2, 3)]
        gate.opened.release(2)
        await asyncio.gather(first.future, *(t.future for t in others))
        assert gate.batches == [[1], [2, 12, 3, 13]]
        assert [t.results for t in (first, *others)] == [[2], [4, 24], [6, 26]]
        assert [(f.texts, f.tokens) for f in seen] == [(1, 4), (4, 8)]
        assert engine.close(DEADLINE)

    run(body)


def test_a_request_may_be_spread_over_batches() -> None:
    async def body() -> None:
        gate = Gate()
        engine, _ = engine_of(gate, budget=4)
        gate.opened.release(3)
        ticket = engine.submit("m0", [(i, 2) for i in range(5)])
        await ticket.future
        assert gate.batches == [[0, 1], [2, 3], [4]]
        assert ticket.results == [0, 2, 4, 6, 8]
        assert engine.close(DEADLINE)

    run(body)


def test_one_bad_text_does_not_fail_its_neighbours() -> None:
    async def body() -> None:
        gate = Gate()
        engine, _ = engine_of(gate, budget=100)
        first = engine.submit("m0", [(0, 1)])
        await gate.wait()
        good, bad, also_good = (engine.submit("m0", [(c, 1)]) for c in ("a", "bad", "b"))
        gate.opened.release(10)
        await first.future
        await good.future
        await also_good.future
        assert (good.results, also_good.results) == (["aa"], ["bb"])
        with pytest.raises(ValueError, match="bad"):
            await bad.future
        assert engine.is_alive
        assert engine.close(DEADLINE)

    run(body)


def test_who_left_is_not_computed() -> None:
    async def body() -> None:
        gate = Gate()
        engine, _ = engine_of(gate)
        first = engine.submit("m0", [(1, 1)])
        await gate.wait()
        gone, stays = engine.submit("m0", [(2, 1)]), engine.submit("m0", [(3, 1)])
        gone.is_gone = True
        gone.future.cancel()
        gate.opened.release(2)
        await first.future
        await stays.future
        assert gate.batches == [[1], [3]]
        assert engine.close(DEADLINE)

    run(body)


def test_the_model_whose_text_has_waited_longest_is_next() -> None:
    async def body() -> None:
        one, other = Gate(), Gate()
        engine, _ = engine_of(one, other)
        first = engine.submit("m0", [(1, 1)])
        await one.wait()
        tickets = [engine.submit("m1", [(2, 1)]), engine.submit("m0", [(3, 1)]), engine.submit("m1", [(4, 1)])]
        one.opened.release()
        await first.future
        await other.wait()
        assert (one.batches, other.batches) == ([[1]], [[2, 4]])
        one.opened.release()
        other.opened.release()
        await asyncio.gather(*(t.future for t in tickets))
        assert engine.close(DEADLINE)

    run(body)


def test_closing_ends_what_waits_and_takes_no_more() -> None:
    async def body() -> None:
        gate = Gate()
        engine, _ = engine_of(gate)
        tickets = [engine.submit("m0", [(1, 8)])]
        await gate.wait()
        tickets.append(engine.submit("m0", [(2, 8)]))
        closing = asyncio.get_running_loop().run_in_executor(None, engine.close, DEADLINE)
        refused = None
        while refused is None:  # until it is closing
            try:
                tickets.append(engine.submit("m0", [(3, 8)]))
            except RequestError as error:
                refused = error
            await asyncio.sleep(0)
        assert refused.problem.status == 503
        gate.opened.release(len(tickets))
        assert await closing
        await asyncio.gather(*(t.future for t in tickets))
        assert not engine.is_alive

    run(body)
