"""What all routes have in common: the key, the body, errors in the words of their dialect, and a document of it all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, RequestError, refused
from weft.jobs.serve.service import Answer, TextService

BodyT = TypeVar("BodyT", bound=BaseModel)
_REASONS = {
    400: "Empty, or no JSON", 401: "No key", 404: "No such model", 408: "The body came too slowly",
    413: "Too many texts, or too large", 422: "Wrong fields, or cannot be tokenized",
    424: "The model cannot do this, or failed", 429: "Overloaded", 503: "Stopping, or not well",
}  # fmt: skip
_GONE = Response(status_code=499)  # nobody reads it


@dataclass(frozen=True)
class HttpRoute:
    """A path, what is called, and what its document says."""

    path: str
    method: str
    call: Callable[..., Awaitable[Response]]
    takes: type[BaseModel] | None
    gives: Any
    is_open: bool  # without a key


class HttpRoutes:
    """The routes of one dialect."""

    def __init__(self, dialect: Dialect, error: type[BaseModel], *, tag: str) -> None:
        self.dialect, self._error, self._tag = dialect, error, tag
        self.listed: list[HttpRoute] = []

    def post(
        self, path: str, takes: type[BodyT], gives: Any, *, also: tuple[str, ...] = ()
    ) -> Callable[[Callable[[TextService, Request, BodyT], Awaitable[Response]]], Any]:
        """A function of the service, the request and its body."""

        def add(call: Callable[[TextService, Request, BodyT], Awaitable[Response]]) -> Any:
            self.listed += [HttpRoute(each, "POST", call, takes, gives, False) for each in (path, *also)]
            return call

        return add

    def get(
        self, path: str, gives: Any, *, also: tuple[str, ...] = (), is_open: bool = False
    ) -> Callable[[Callable[[TextService, Request], Awaitable[Response]]], Any]:
        """A function of the service and the request."""

        def add(call: Callable[[TextService, Request], Awaitable[Response]]) -> Any:
            self.listed += [HttpRoute(each, "GET", call, None, gives, is_open) for each in (path, *also)]
            return call

        return add

    def join(self, app: FastAPI, service: Callable[[], TextService]) -> None:
        """Adds them to an application; `service` is there when the first request is."""
        for route in self.listed:
            extra = {} if route.takes is None else {"requestBody": _document(route.takes)}
            codes = _REASONS if route.takes is not None else {k: _REASONS[k] for k in (401, 503)}
            app.add_api_route(
                route.path, self._endpoint(route, service), methods=[route.method], tags=[self._tag],
                response_class=Response, name=route.call.__name__, description=route.call.__doc__,
                operation_id=f"{route.call.__name__}{route.path.replace('/', '_')}", openapi_extra=extra,
                responses={
                    200: _good(route.gives),
                    **{code: {"model": self._error, "description": text} for code, text in codes.items()},
                },
            )  # fmt: skip

    def _endpoint(self, route: HttpRoute, find: Callable[[], TextService]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            service = find()
            try:
                if not route.is_open:
                    service.check_key(request)
                if route.takes is None:
                    return await route.call(service, request)
                return await route.call(service, request, await service.body(request, route.takes))
            except RequestError as refusal:
                service.figures.count("te_request_failure", refusal.problem.name.lower())
                return refused(refusal, self.dialect)
            except ClientDisconnect:
                return _GONE

        return endpoint


def answered(content: Any, answer: Answer) -> Response:
    """JSON with TEI's headers. Numbers of float32 arrays are written so that they are read as the same bits."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), headers=answer.headers, media_type="application/json"
    )


def _good(gives: Any) -> dict[str, Any]:
    """An answer in a document: a type that is written as JSON, the media type of a text, or nothing."""
    if isinstance(gives, str):
        return {"description": "As asked", "content": {gives: {"schema": {"type": "string"}}}}
    return {"description": "As asked", "model": gives} if gives else {"description": "Well"}


def _document(body: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"required": True, "content": {"application/json": {"schema": reference}}}
