"""Why a request gets no answer, and how each of the three dialects says so.

TEI's routes answer {"error", "error_type"}, OpenAI's {"error": {"message", "type", "param", "code"}}, Cohere's and
Jina's {"message"}. The codes are TEI's; OpenAI's own server has 400 where a field is wrong, and so have its routes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response


class Problem(Enum):
    """(status, TEI's name, OpenAI's type, OpenAI's code)"""

    EMPTY = (400, "Empty", "invalid_request_error", None)
    SYNTAX = (400, "Validation", "invalid_request_error", None)
    FIELDS = (422, "Validation", "invalid_request_error", None)
    UNAUTHORIZED = (401, "Unauthorized", "invalid_request_error", "invalid_api_key")
    UNKNOWN_MODEL = (404, "Validation", "invalid_request_error", "model_not_found")
    NO_ROUTE = (404, "Validation", "invalid_request_error", None)
    NO_METHOD = (405, "Validation", "invalid_request_error", None)
    SLOW = (408, "Validation", "invalid_request_error", None)
    TOO_LARGE = (413, "Validation", "invalid_request_error", None)
    TOKENIZER = (422, "Tokenizer", "invalid_request_error", None)
    BACKEND = (424, "Backend", "server_error", None)
    OVERLOADED = (429, "Overloaded", "requests", "rate_limit_exceeded")
    UNHEALTHY = (503, "Unhealthy", "server_error", None)

    def __init__(self, status: int, name_of_tei: str, type_of_openai: str, code_of_openai: str | None) -> None:
        self.status, self.tei = status, name_of_tei
        self.openai, self.code = type_of_openai, code_of_openai


class Dialect(Enum):
    """Whose body an error has."""

    TEI = "tei"
    OPENAI = "openai"
    COHERE = "cohere"


class RequestError(Exception):
    """What a client is told instead of a result. `param` is the field at fault, if there is one."""

    def __init__(self, problem: Problem, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.problem, self.message, self.param = problem, message, param


def body_of(refusal: RequestError, dialect: Dialect) -> tuple[int, dict[str, Any]]:
    """Status and body."""
    problem = refusal.problem
    if dialect is Dialect.TEI:
        return problem.status, {"error": refusal.message, "error_type": problem.tei}
    status = 400 if problem is Problem.FIELDS else problem.status
    if dialect is Dialect.COHERE:
        return status, {"message": refusal.message}
    error = {"message": refusal.message, "type": problem.openai, "param": refusal.param, "code": problem.code}
    return status, {"error": error}


def refused(refusal: RequestError, dialect: Dialect) -> Response:
    """The response."""
    status, body = body_of(refusal, dialect)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {"retry-after": "1"} if status == 429 else None
    return Response(orjson.dumps(body), status, headers, "application/json")


def invalid(error: ValidationError) -> RequestError:
    """Of a body that is not JSON, or not what the route takes. What was given is not repeated: it may be a text."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return RequestError(Problem.SYNTAX, f"the body is not JSON: {first['msg']}")
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return RequestError(Problem.FIELDS, f"{path or 'the body'}: {first['msg']}{more}", param=param)
