"""A request's way through a worker: its model by name, a place, tokens, the engine, and the answer or a refusal."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from weft.comm.deadline import SERVE_BATCH, SERVE_BODY
from weft.jobs.serve.board import Board, RequestFigures, WorkerBoard
from weft.jobs.serve.engine import BatchFigures, ComputeEngine
from weft.jobs.serve.errors import Problem, RequestError, invalid
from weft.jobs.serve.models import Ask, Given, ServedModel, Task
from weft.jobs.serve.options import ServeOptions

# Characters that are tokenized where the request is, in about a millisecond: a thread would cost a short text more.
_INLINE = 2048
_log = logging.getLogger("weft.serve")
BodyT = TypeVar("BodyT", bound=BaseModel)


@dataclass(frozen=True)
class Answer:
    """Results of a request's texts in order, and its figures."""

    model: ServedModel
    results: Sequence[Any]
    figures: RequestFigures
    characters: int

    @property
    def headers(self) -> dict[str, str]:
        """As TEI sends them, in milliseconds."""
        f = self.figures
        times = {"total": f.total, "tokenization": f.tokenizing, "queue": f.queue, "inference": f.compute}
        return {
            "x-compute-type": "cpu",
            "x-compute-time": str(round(f.total * 1e3)),
            "x-compute-characters": str(self.characters),
            "x-compute-tokens": str(f.tokens),
            **{f"x-{name}-time": str(round(seconds * 1e3)) for name, seconds in times.items()},
        }


class TextService:
    """The models of a worker. Made in its event loop."""

    def __init__(self, models: Mapping[str, ServedModel], options: ServeOptions, board: Board, index: int = 0) -> None:
        self.models, self.options, self.board = models, options, board
        self.figures: WorkerBoard = board.worker(index)
        self.engine = ComputeEngine(
            models, budget=options.max_batch_tokens, loop=asyncio.get_running_loop(), report=self._computed
        )
        self.tokenizing_threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.tokenizing_threads, thread_name_prefix="weft-serve-tokens")
        self._in_flight = 0
        self._key = None if options.api_key is None else f"Bearer {options.api_key}".encode()
        self.is_draining = False
        self.engine.start()

    def _computed(self, figures: BatchFigures) -> None:
        self.figures.batch(figures.texts, figures.tokens, figures.seconds)
        self.figures.gauge("te_queue_size", figures.waiting)

    def close(self, timeout: float) -> bool:
        """Ends what is under way; whether that was done in time."""
        is_done = self.engine.close(timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return is_done

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs, and is not stuck in a batch."""
        busy = self.engine.busy_since
        return self.engine.is_alive and (busy is None or time.perf_counter() - busy < SERVE_BATCH.seconds)

    def check_key(self, request: Request) -> None:
        """Raises where a key is needed and was not given. Compared in constant time."""
        if self._key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self._key):
            raise RequestError(Problem.UNAUTHORIZED, "expected the header `Authorization: Bearer KEY`")

    async def body(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body of a request, checked. It is never held beyond the limit, and must come in time."""
        content = await _in_time(_read(request, self.options.payload_limit))
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise invalid(error) from error
        except RecursionError as error:
            raise RequestError(Problem.SYNTAX, "the body is nested too deeply") from error

    def model(self, name: str | None, task: Task | None = None) -> ServedModel:
        """The model of this name; without one, the first that can do it, or else the first."""
        if name is not None:
            if name not in self.models:
                known = ", ".join(map(repr, self.models))
                raise RequestError(
                    Problem.UNKNOWN_MODEL, f"The model {name!r} does not exist; here is {known}", param="model"
                )
            return self.models[name]
        able = (model for model in self.models.values() if task is None or task in model.tasks)
        return next(able, next(iter(self.models.values())))

    def check_size(self, count: int, what: str = "inputs") -> None:
        """Raises where a request has no texts, or too many."""
        if not count:
            raise RequestError(Problem.EMPTY, f"`{what}` cannot be empty", param=what)
        most = self.options.max_client_batch_size
        if count > most:
            raise RequestError(Problem.TOO_LARGE, f"batch size {count} > maximum allowed batch size {most}", param=what)

    async def compute(
        self, request: Request, model: ServedModel, given: Sequence[Given], ask: Ask, *, method: str = "batch"
    ) -> Answer:
        """The results of texts. Raises `RequestError`; a client that leaves takes its texts out of the queue."""
        start = time.perf_counter()
        self.figures.count("te_request_count", method)
        model.check(ask)
        with self._place():
            return await self._compute(request, model, given, ask, method, start)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the requests that are worked on; raises at once where there is no place."""
        if self._in_flight >= self.options.max_concurrent_requests:
            raise RequestError(Problem.OVERLOADED, "Model is overloaded")
        self._in_flight += 1
        self.figures.gauge("weft_requests_in_flight", self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1
            self.figures.gauge("weft_requests_in_flight", self._in_flight)

    async def _compute(
        self, request: Request, model: ServedModel, given: Sequence[Given], ask: Ask, method: str, start: float
    ) -> Answer:
        kind = "te_predict" if ask.task in (Task.PREDICT, Task.RERANK) else "te_embed"
        self.figures.count(f"{kind}_count", by=len(given))
        characters = sum(map(_length, given))
        began = time.perf_counter()
        if characters <= _INLINE:
            contents = model.prepare(given, ask)
        else:
            contents = await asyncio.get_running_loop().run_in_executor(self._pool, model.prepare, given, ask)
        tokenizing = time.perf_counter() - began
        ticket = self.engine.submit(model.name, contents)
        leaving = asyncio.ensure_future(_left(request))
        leaving.add_done_callback(lambda _: ticket.future.cancel())
        try:
            await ticket.future
        except asyncio.CancelledError:
            ticket.is_gone = True
            self.figures.count("weft_dropped")
            if leaving.done() and not leaving.cancelled():
                raise ClientDisconnect from None
            raise
        except RequestError:
            raise
        except Exception as error:
            _log.exception("a batch failed")
            raise RequestError(Problem.BACKEND, f"Inference failed: {type(error).__name__}") from error
        finally:
            leaving.cancel()
        self.figures.count(f"{kind}_success", by=len(given))
        tokens = sum(count for _, count in contents)
        figures = RequestFigures(
            method, len(given), tokens, time.perf_counter() - start, tokenizing, ticket.queue_seconds,
            ticket.compute_seconds,
        )  # fmt: skip
        self.figures.answered(figures)
        return Answer(model, ticket.results, figures, characters)

    async def in_pool(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What takes long and needs no model, beside the event loop."""
        with self._place():
            return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


def _length(text: Given) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)


async def _in_time(reading: Coroutine[Any, Any, bytes]) -> bytes:
    """As `asyncio.wait_for`, without a task of its own, which would cost a short request more than reading does."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = task.cancel()

    timer = asyncio.get_running_loop().call_later(SERVE_BODY.seconds, end)
    try:
        return await reading
    except asyncio.CancelledError:
        if not is_late:
            raise
        if hasattr(task, "uncancel"):  # Python 3.11
            task.uncancel()
        raise RequestError(Problem.SLOW, f"the body did not come within {SERVE_BODY.seconds:.0f} s") from None
    finally:
        timer.cancel()


async def _read(request: Request, limit: int) -> bytes:
    """The body. One that is too long is not read to its end."""
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > limit:
        raise RequestError(Problem.TOO_LARGE, f"the body has {said} bytes, expected at most {limit}")
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > limit:
            raise RequestError(Problem.TOO_LARGE, f"the body has more than {limit} bytes, which is the limit")
        parts.append(part)
    return b"".join(parts)


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
