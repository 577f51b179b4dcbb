"""What every HTTP request passes: its number, its key, the limit of concurrent ones, and one line of the log."""

import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtllm_replayssm.serving.openai.errors import ApiError, shutting_down
from trtllm_replayssm.serving.openai.metrics import HttpCounts
from trtllm_replayssm.serving.openai.results import usage
from trtllm_replayssm.serving.openai.service import Service

_LOGGER = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PROBES = ("/health", "/metrics")
_PATHS = (*_PROBES, "/v1/completions", "/v1/chat/completions", "/v1/models")
CLIENT_LEFT = 499
"""Logged where a client has not waited for its response; nobody is sent it."""


class Gate:
    """An ASGI application around the server's own.

    Probes pass without a key and are neither counted against the limit nor logged.

    Args:
        app: the server's.
        service: whose limits hold.
        counts: of HTTP requests.
    """

    def __init__(self, app: ASGIApp, service: Service, counts: HttpCounts) -> None:
        self._app = app
        self._service = service
        self._counts = counts
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        # Never a path as it came: anything could be written into the log and the metrics with it.
        path = scope["path"] if scope["path"] in _PATHS else "other"
        status, is_counted, started = CLIENT_LEFT, False, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_counted
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                # Before the last of it leaves: who has the whole response finds it in the metrics.
                self._counts.add(path, status)
                is_counted = True
            await send(message)

        is_probe = scope["path"] in _PROBES
        self._num_running += not is_probe
        try:
            app = self._app if is_probe else self._refusal(headers) or self._app
            await app(scope, receive, send_with_id)
        finally:
            self._num_running -= not is_probe
            if not is_counted:
                self._counts.add(path, status)
            if not is_probe:
                generation = state.get("generation")
                numbers = usage(generation.outputs) if generation is not None else {}
                _LOGGER.info(
                    "request_id=%s path=%s status=%d prompt_tokens=%d completion_tokens=%d seconds=%.3f",
                    *(request_id, path, status),
                    *(numbers.get("prompt_tokens", 0), numbers.get("completion_tokens", 0)),
                    time.perf_counter() - started,
                )

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        """Return the answer to a request that is not let in."""
        settings = self._service.settings
        error = None
        if settings.api_keys and not self._has_key(headers):
            error = ApiError(
                401, "authorization: found no valid key; needed 'Bearer <key>' with one.", code="invalid_api_key"
            )
        elif self._service.is_draining:
            error = shutting_down(settings.retry_after_s)
        elif self._num_running > settings.max_concurrent_requests:
            error = ApiError(
                503,
                f"server: found {settings.max_concurrent_requests} requests at work; needed fewer. Try again later.",
                code="too_many_requests",
                retry_after_s=settings.retry_after_s,
            )
        return None if error is None else error_response(error)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.encode("latin-1").strip()  # the bytes as they came; in UTF-8 one of them may look like a space
        # All keys are compared, each in constant time.
        matches = [hmac.compare_digest(given, own.encode()) for own in self._service.settings.api_keys]
        return scheme.lower() == "bearer" and any(matches)


def error_response(error: ApiError) -> JSONResponse:
    """Return what a client is sent for an error."""
    return JSONResponse(error.body(), error.status, error.headers())
