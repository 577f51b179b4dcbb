"""Errors as OpenAI's clients expect them: a status, and a body that says what was found and what is needed."""

import re
import reprlib
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.errors import (
    CapacityError,
    ExecutorError,
    QueueFullError,
    ReplaySSMError,
    ShutdownError,
    problem_text,
)

if TYPE_CHECKING:
    from pydantic import ValidationError

_SHOWN_PROBLEMS = 3
_MAX_MESSAGE = 2000
# pydantic's words for JSON's objects.
_PYTHON_OBJECT = re.compile(r"a valid dictionary( or instance of \w+)?")


class ApiError(Exception):
    """What a client is told instead of a result.

    Args:
        status: of HTTP.
        message: a sentence for people.
        code: a word for programs.
        param: the key of the request that is at fault.
        retry_after_s: when the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error of a request that cannot be served as asked."""
    return ApiError(400, message, param=param)


def refused(error: ReplaySSMError, retry_after_s: int) -> ApiError:
    """Return what a client is told when the ``LLM`` did not take its request."""
    if isinstance(error, QueueFullError):
        return ApiError(429, error.message, code="queue_full", retry_after_s=retry_after_s)
    if isinstance(error, ShutdownError):
        return shutting_down(retry_after_s)
    if isinstance(error, ExecutorError):
        return ApiError(503, error.message, code="model_failed")
    if isinstance(error, CapacityError):
        return ApiError(503, error.message, code="no_capacity", retry_after_s=retry_after_s)
    return invalid(error.message)


def failed(error: ReplaySSMError, *, is_guided: bool) -> ApiError:
    """Return what a client is told when its request was taken and did not end well.

    Args:
        error: what ended it.
        is_guided: whether the client's own grammar may be the reason.
    """
    if isinstance(error, ShutdownError):
        return shutting_down(None)
    if is_guided and not isinstance(error, ExecutorError):
        return invalid(error.message, param="response_format")
    return ApiError(500, error.message, code="generation_failed")


def shutting_down(retry_after_s: int | None) -> ApiError:
    """Return the error of a server that takes no more requests, or ends those it has."""
    return ApiError(
        503,
        "server: found it shutting down; needed a running one. Send the request again, to another replica.",
        code="shutting_down",
        retry_after_s=retry_after_s,
    )


def unreadable(error: "ValidationError") -> ApiError:
    """Return the error of a body whose keys or values are wrong: the first few, shortened."""
    problems = error.errors(include_url=False)
    texts = [
        problem_text(
            problem | {"msg": _PYTHON_OBJECT.sub("an object", problem["msg"])},
            shown=shown,
            unknown="found a parameter that this server does not know; needed one that it does, or none",
        )
        for problem in problems[:_SHOWN_PROBLEMS]
    ]
    if len(problems) > _SHOWN_PROBLEMS:
        texts.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    where = problems[0]["loc"]
    return invalid("; ".join(texts) + ".", param=shown(where[0]).strip("'") if where else None)


def shown(value: object) -> str:
    """Return a short text of what a client sent."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number of thousands of digits
        return f"a value of type {type(value).__name__}"
