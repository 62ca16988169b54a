"""OpenAI's routes: `POST /v1/embeddings` and `GET /v1/models`."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, RequestError
from weft.jobs.serve.http.routes import HttpRoutes, answered
from weft.jobs.serve.http.schemas import EmbeddingsAnswer, EmbeddingsRequest, ModelsAnswer, OpenAIErrorAnswer
from weft.jobs.serve.models import Ask, Given, Task
from weft.jobs.serve.service import TextService

routes = HttpRoutes(Dialect.OPENAI, OpenAIErrorAnswer, tag="OpenAI")
_STARTED = int(time.time())


@routes.post("/v1/embeddings", EmbeddingsRequest, EmbeddingsAnswer, also=("/embeddings",))
async def embeddings(service: TextService, request: Request, body: EmbeddingsRequest) -> Response:
    """Embed a text, texts, ids, or lists of ids. The vectors are those of `weft embed`, bit by bit."""
    texts = given_texts(body.input)
    model = service.model(body.model, Task.EMBED)
    service.check_size(len(texts), "input")
    ask = Ask(Task.EMBED, truncate=service.options.auto_truncate, dimensions=body.dimensions)
    answer = await service.compute(request, model, texts, ask, method="batch" if len(texts) > 1 else "single")
    rows: list[Any] = list(answer.results)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode() for row in rows]
    tokens = answer.figures.tokens
    content = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return answered(content, answer)


def given_texts(given: str | Sequence[Any]) -> Sequence[Given]:
    """One text, or the ids of one, are a list of one. Raises where a text has no ids."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if any(not isinstance(one, str) and not len(one) for one in given):
        raise RequestError(Problem.EMPTY, "`input` cannot contain a list without ids", param="input")
    return given


@routes.get("/v1/models", ModelsAnswer)
async def models(service: TextService, request: Request) -> Response:
    """The models that are served."""
    cards = [{"id": name, "object": "model", "created": _STARTED, "owned_by": "weft"} for name in service.models]
    return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")
