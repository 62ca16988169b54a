"""All routes as one application."""

from __future__ import annotations

import logging
from collections.abc import Callable

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, Refusal, refused
from weft.jobs.serve.http import openai
from weft.jobs.serve.http.routes import Routes
from weft.jobs.serve.service import Service

_ALL: tuple[Routes, ...] = (openai.routes,)
_log = logging.getLogger("weft.serve")


def make_app(service: Callable[[], Service]) -> FastAPI:
    """The application; `service` is there when the first request is."""
    # No page of FastAPI's own: theirs loads scripts from elsewhere.
    app = FastAPI(title="weft serve", docs_url=None, redoc_url=None, openapi_url=None)
    for routes in _ALL:
        routes.join(app, service)

    @app.get("/health")
    async def health(request: Request) -> Response:
        if not service().is_healthy:
            return refused(Refusal(Problem.UNHEALTHY, "unhealthy"), Dialect.TEI)
        return Response()

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        problem = Problem.NO_METHOD if error.status_code == 405 else Problem.NO_ROUTE
        dialect = Dialect.OPENAI if request.url.path.startswith("/v1/") else Dialect.TEI
        return refused(Refusal(problem, f"{error.detail}; /docs lists the routes"), dialect)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        body = {"error": f"internal error: {type(error).__name__}", "error_type": "Backend"}
        return Response(orjson.dumps(body), 500, media_type="application/json")

    return app
