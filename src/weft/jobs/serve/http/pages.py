"""What is neither a model's answer nor an error: health, figures, documents, and the page that shows it live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, RequestError
from weft.jobs.serve.http.routes import HttpRoutes
from weft.jobs.serve.http.schemas import TeiErrorAnswer
from weft.jobs.serve.service import TextService

routes = HttpRoutes(Dialect.TEI, TeiErrorAnswer, tag="the server")
_HERE = Path(__file__).parent


@routes.get("/health", None, also=("/ping",), is_open=True)
async def health(service: TextService, request: Request) -> Response:
    """Liveness: 200 while the engine runs, 503 where it is dead or stuck, and only a new start helps."""
    if not service.is_healthy:
        raise RequestError(Problem.UNHEALTHY, "unhealthy")
    return Response()


@routes.get("/ready", None)
async def ready(service: TextService, request: Request) -> Response:
    """Readiness: 503 also while the server stops. It does not listen before its models are loaded and warm."""
    if service.is_draining or not service.is_healthy:
        raise RequestError(Problem.UNHEALTHY, "not ready: stopping, or unhealthy")
    return Response()


@routes.get("/metrics", "text/plain")
async def metrics(service: TextService, request: Request) -> Response:
    """Figures of all workers, for Prometheus, by TEI's names."""
    return Response(service.board.prometheus(), media_type="text/plain; version=0.0.4")


@routes.get("/stats", dict[str, Any])
async def stats(service: TextService, request: Request) -> Response:
    """What the page shows, of all workers."""
    options = service.options
    content = {
        "models": list(service.models), "max_batch_tokens": options.max_batch_tokens,
        "is_draining": service.is_draining, **service.board.summary(),
    }  # fmt: skip
    return Response(orjson.dumps(content), media_type="application/json")


@routes.get("/", "text/html")
async def page(service: TextService, request: Request) -> Response:
    """Queue, tokens a second, latencies and batch fill, live."""
    return _html("page.html")


@routes.get("/docs", "text/html")
async def docs(service: TextService, request: Request) -> Response:
    """The routes, and a form to try each."""
    return _html("docs.html")


def _html(name: str) -> Response:
    # Nothing from elsewhere, and nothing to elsewhere.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {"content-security-policy": policy, "cache-control": "no-cache"}
    return Response((_HERE / name).read_bytes(), headers=headers, media_type="text/html")
