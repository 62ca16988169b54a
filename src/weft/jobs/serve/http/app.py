"""All routes as one application.

Starlette serves them; FastAPI only writes the document. Its own way of serving would cost a short request a tenth of a
millisecond of the core that computes, for checks that are made here already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.jobs.serve.errors import Dialect, Problem, RequestError, refused
from weft.jobs.serve.http import cohere, openai, pages, tei
from weft.jobs.serve.http.routes import HttpRoutes
from weft.jobs.serve.service import TextService

_ALL: tuple[HttpRoutes, ...] = (openai.routes, tei.routes, cohere.routes, pages.routes)


def make_app(service: Callable[[], TextService]) -> Starlette:
    """The application; `service` is there when the first request is."""
    document = orjson.dumps(openapi_document())

    async def openapi(request: Request) -> Response:
        try:
            service().check_key(request)
        except RequestError as refusal:
            return refused(refusal, Dialect.TEI)
        return Response(document, media_type="application/json")

    listed = [route for routes in _ALL for route in routes.served(service)]
    handlers: dict[Any, Any] = {HTTPException: _not_found, Exception: _failed}
    return Starlette(routes=[*listed, Route("/openapi.json", openapi)], exception_handlers=handlers)


async def _not_found(request: Request, error: HTTPException) -> Response:
    problem = Problem.NO_METHOD if error.status_code == 405 else Problem.NO_ROUTE
    dialect = Dialect.OPENAI if request.url.path.startswith("/v1/") else Dialect.TEI
    answer = refused(RequestError(problem, f"{error.detail}; /docs lists the routes"), dialect)
    answer.headers.update(error.headers or {})
    return answer


async def _failed(request: Request, error: Exception) -> Response:
    body = {"error": f"internal error: {type(error).__name__}", "error_type": "Backend"}
    return Response(orjson.dumps(body), 500, media_type="application/json")


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, and the bodies of requests, which are read without it."""
    app = FastAPI()
    for routes in _ALL:
        routes.describe(app)
    document = get_openapi(title="weft serve", version="1", routes=app.routes)
    bodies = [route.takes for routes in _ALL for route in routes.listed if route.takes is not None]
    template = "#/components/schemas/{model}"
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    document["components"]["schemas"].update(found["$defs"])
    return document
