"""All routes as one application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, RequestError, refused
from weft.jobs.serve.http import cohere, openai, pages, tei
from weft.jobs.serve.http.routes import HttpRoutes
from weft.jobs.serve.service import TextService

_ALL: tuple[HttpRoutes, ...] = (openai.routes, tei.routes, cohere.routes, pages.routes)


def make_app(service: Callable[[], TextService]) -> FastAPI:
    """The application; `service` is there when the first request is."""
    # No page of FastAPI's own: theirs loads scripts from elsewhere.
    app = FastAPI(title="weft serve", docs_url=None, redoc_url=None, openapi_url=None)
    for routes in _ALL:
        routes.join(app, service)
    document = orjson.dumps(_document(app))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        try:
            service().check_key(request)
        except RequestError as refusal:
            return refused(refusal, Dialect.TEI)
        return Response(document, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        problem = Problem.NO_METHOD if error.status_code == 405 else Problem.NO_ROUTE
        dialect = Dialect.OPENAI if request.url.path.startswith("/v1/") else Dialect.TEI
        answer = refused(RequestError(problem, f"{error.detail}; /docs lists the routes"), dialect)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        body = {"error": f"internal error: {type(error).__name__}", "error_type": "Backend"}
        return Response(orjson.dumps(body), 500, media_type="application/json")

    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, and the bodies of requests, which are read without it."""
    document = get_openapi(title="weft serve", version="1", routes=app.routes)
    bodies = [route.takes for routes in _ALL for route in routes.listed if route.takes is not None]
    template = "#/components/schemas/{model}"
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    document["components"]["schemas"].update(found["$defs"])
    return document
