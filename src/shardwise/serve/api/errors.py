"""Errors in the shape of OpenAI's, {"error": {"message", "type", "param", "code"}}, under a status
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

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
WRONG_BODY = "the body must be a JSON object, sent with the header content-type: application/json"


class Refused(Exception):
    """A request that ends in an error. `code` is a word that programs can act on, `param` the field
    at fault."""

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
        kind = TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_refused(error: Exception) -> Refused:
    """The error that a client sees; what is not about its request is a 500 that tells nothing of
    the inside."""
    match error:
        case Refused():
            return error
        case RequestValidationError():
            return from_validation(error)
        case ContextLengthExceeded():
            return Refused(400, str(error), "context_length_exceeded", error.param)
        case ValueError():
            return Refused(400, str(error), "invalid_value", first_word(str(error)))
        case QueueFull():
            return Refused(
                429, str(error), "queue_full", headers={"retry-after": str(error.retry_after_s)}
            )
        case EngineDied():
            return Refused(503, str(error), "engine_died")
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(
                error.status_code, "invalid_request"
            )
            return Refused(error.status_code, error.detail, code, headers=error.headers)
    return Refused(500, "the server failed on this request; its log says more", "internal_error")


def from_validation(error: RequestValidationError) -> Refused:
    """The first thing that is wrong, by the name of its field: `messages.0.role: ...`."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # the first is "body"
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not valid JSON: {first['ctx']['error']}", "invalid_json")
    if not place:
        return Refused(400, WRONG_BODY, "invalid_body")
    cause = first.get("ctx", {}).get("error")
    says = (
        str(cause)
        if isinstance(cause, ValueError)
        else first["msg"].replace("Input should be", "must be")
    )
    return Refused(
        400, f"{'.'.join(place)}: {says[:1].lower()}{says[1:]}", "invalid_type", place[0]
    )


def first_word(sentence: str) -> str | None:
    """The field that a sentence such as "temperature is -1, but ..." is about; None if it does not
    begin with one."""
    word, _, rest = sentence.partition(" ")
    return (
        word
        if rest.startswith(("is ", "must ", "of ")) and word.isidentifier() and word.islower()
        else None
    )
