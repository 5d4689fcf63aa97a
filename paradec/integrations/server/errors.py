"""Errors as OpenAI's endpoints write them."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError

from paradec.batching.slots import Cancelled
from paradec.constraints.automaton import ConstraintSizeError
from paradec.core.checks import shown
from paradec.integrations.server.engine import EngineStopped

MAX_MESSAGE = 2000
"""Characters of a message, which may quote a body."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
FIELD_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
"""Fields of `paradec.Request` that a body calls otherwise."""


class ApiError(Exception):
    """An error for the client.

    Args:
        status: HTTP status. param: the field of the body. retry_after: seconds until the request may succeed.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, retry_after: int | None = None):
        super().__init__(message[:MAX_MESSAGE])
        self.status, self.param = status, param
        self.headers = None if retry_after is None else {"retry-after": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return error_body(self.status, str(self), self.param)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Build the body of an error."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def to_api_error(error: BaseException, param: str | None = None, status: int = 400) -> ApiError:
    """Convert an error of the library: in the names of the body's fields, with the status of its kind.

    Args:
        status: of a ValueError or TypeError, which the client can mend.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error) or f"{type(error).__name__} in the server"
    for inner, outer in FIELD_NAMES.items():
        message = re.sub(rf"\b{inner}\b", outer, message)
    if param is None and (name := re.match(r"(\w+)=", message)):
        param = name[1]
    if isinstance(error, Cancelled):
        return ApiError("the answer was broken off: the server is stopping, or the client has gone", 503)
    if isinstance(error, EngineStopped):
        return ApiError(message, 503, retry_after=5)
    if isinstance(error, ConstraintSizeError):
        return ApiError(message, 422, param)
    if isinstance(error, (ValueError, TypeError, ModuleNotFoundError)):
        return ApiError(message, status, param)
    return ApiError(message, 500)


def from_validation(error: RequestValidationError) -> ApiError:
    """Convert what pydantic found wrong with a body."""
    first = error.errors()[0]
    path = ".".join(map(str, first["loc"][1:]))
    if first["type"] == "json_invalid":
        return ApiError("the body is not JSON")
    if not path:
        return ApiError("the body must be a JSON object (content-type application/json)", 422)
    value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    return ApiError(f"{shown(path)[1:-1]}{value}: {reason}", 422, shown(str(first["loc"][1]))[1:-1])
