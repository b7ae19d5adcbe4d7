"""Errors in the format of OpenAI's, {"error": {"message", "type", "param", "code"}}, with a status
that clients act on.

https://platform.openai.com/docs/guides/error-codes
"""

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from shardwise.serve.engine_client import EngineDied, QueueFull
from shardwise.serve.request import ContextLengthExceeded

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
WRONG_BODY = "the body must be a JSON object, sent with the header content-type: application/json"
RETRY_LATER = {"retry-after": "5"}
"""Headers of errors that pass by themselves, such as a restart of the engine."""


class ApiError(Exception):
    """A request that ends in an error.

    `code` is a word for programs, `param` the field of the request that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, default_type),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client sees; an unexpected one becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return from_validation_error(error)
        case ContextLengthExceeded():
            return ApiError(400, str(error), "context_length_exceeded", error.param)
        case ValueError():
            return ApiError(400, str(error), "invalid_value", leading_field(str(error)))
        case QueueFull():
            headers = {"retry-after": str(error.retry_after_s)}
            return ApiError(429, str(error), "queue_full", headers=headers)
        case EngineDied():
            return ApiError(503, str(error), "engine_died", headers=RETRY_LATER)
        case HTTPException():
            codes = {404: "not_found", 405: "method_not_allowed"}
            code = codes.get(error.status_code, "invalid_request")
            return ApiError(error.status_code, error.detail, code, headers=error.headers)
    return ApiError(500, "internal server error; see the server's log", "internal_error")


def from_validation_error(error: RequestValidationError) -> ApiError:
    """Return the first validation error, by the path of its field: `messages.0.role: ...`."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]  # loc[0] is "body"
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", "invalid_json")
    cause = first.get("ctx", {}).get("error")
    if not path and isinstance(cause, ValueError):
        return to_api_error(cause)
    if not path:
        return ApiError(400, WRONG_BODY, "invalid_body")
    if isinstance(cause, ValueError):
        reason = str(cause)
    else:
        reason = first["msg"].replace("Input should be", "must be")
    message = f"{'.'.join(path)}: {reason[:1].lower()}{reason[1:]}"
    return ApiError(400, message, "invalid_type", path[0])


def leading_field(message: str) -> str | None:
    """Return the field that a message such as "temperature is -1, but ..." begins with, or None."""
    word, _, rest = message.partition(" ")
    is_field = word.isidentifier() and word.islower()
    return word if is_field and rest.startswith(("is ", "must ", "of ")) else None
