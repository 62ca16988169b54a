"""sentence-transformers behind FastAPI, as people write it who care: requests that come close together are one batch.

    python sentence_transformers_app.py --model DIR --port 8080 --texts FILE

It needs nothing of weft, so that it is as its own users have it. Requests wait in a queue. A worker takes the first,
then what else is there or comes within a few milliseconds, up to a number of texts, and encodes them in a thread, so
that the next ones are read and parsed meanwhile. `encode` sorts texts by length. Of a few sizes of its batches, the one
that is fastest on the texts of `--texts` is used; `GET /health` says which.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

SIZES = (2, 4, 8)  # texts of mixed length; larger ones are half as fast on CPUs, or less
TEXTS_AT_ONCE = 32
WAIT_SECONDS = 0.005
MOST_WAITING = 512  # requests


class _EmbeddingRequest(BaseModel):
    """What OpenAI's clients send."""

    input: str | list[str]
    model: str = ""
    encoding_format: str = "float"


class _Batcher:
    """A queue of texts, and the worker that empties it."""

    def __init__(self, model: Any, size: int) -> None:
        self.size = size
        self._model = model
        self._queue: asyncio.Queue[tuple[list[str], asyncio.Future[Any]]] = asyncio.Queue(MOST_WAITING)
        self._thread = ThreadPoolExecutor(1)

    async def encode(self, texts: list[str]) -> Any:
        """[texts, width]."""
        found = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((texts, found))
        except asyncio.QueueFull:
            raise HTTPException(429, "overloaded") from None
        return await found

    async def work(self) -> None:
        """Batch after batch."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next()
            texts = [text for several, _ in batch for text in several]
            try:
                rows = await loop.run_in_executor(self._thread, self._encode, texts)
            except Exception as error:
                for _, found in batch:
                    if not found.done():
                        found.set_exception(HTTPException(500, str(error)))
                continue
            start = 0
            for several, found in batch:
                if not found.done():
                    found.set_result(rows[start : start + len(several)])
                start += len(several)

    async def _next(self) -> list[tuple[list[str], asyncio.Future[Any]]]:
        """The first that waits, and others up to a number of texts: those that are there, or come very soon."""
        batch = [await self._queue.get()]
        until = asyncio.get_running_loop().time() + WAIT_SECONDS
        while sum(len(texts) for texts, _ in batch) < TEXTS_AT_ONCE:
            try:
                batch.append(self._queue.get_nowait())
            except asyncio.QueueEmpty:
                left = until - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except asyncio.TimeoutError:
                    break
        return [(texts, found) for texts, found in batch if not found.cancelled()] or await self._next()

    def _encode(self, texts: list[str]) -> Any:
        return self._model.encode(texts, batch_size=self.size, show_progress_bar=False)


def best_size(model: Any, texts: list[str]) -> int:
    """The batch size with which these texts are encoded fastest, as many at once as the server takes."""
    seconds = {}
    model.encode(texts[:TEXTS_AT_ONCE], show_progress_bar=False)
    for size in SIZES:
        start = time.perf_counter()
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            model.encode(texts[first : first + TEXTS_AT_ONCE], batch_size=size, show_progress_bar=False)
        seconds[size] = time.perf_counter() - start
    return min(seconds, key=lambda size: seconds[size])


def make_app(batcher: _Batcher) -> FastAPI:
    """The routes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"batch_size": batcher.size}

    @app.post("/v1/embeddings")
    async def embeddings(request: _EmbeddingRequest) -> Response:
        texts = [request.input] if isinstance(request.input, str) else request.input
        rows = await batcher.encode(texts)
        return Response(_answer(rows, request), media_type="application/json")

    return app


def _answer(rows: Any, request: _EmbeddingRequest) -> bytes:
    """OpenAI's answer."""
    if request.encoding_format == "base64":
        found: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in rows]
    else:
        found = rows.tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(found)]
    return json.dumps({"object": "list", "data": data, "model": request.model}).encode()


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    options = parser.parse_args()
    model: Any = SentenceTransformer(options.model, device="cpu", local_files_only=True)
    size = best_size(model, options.texts.read_text(encoding="utf-8").split("\n"))
    uvicorn.run(make_app(_Batcher(model, size)), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
