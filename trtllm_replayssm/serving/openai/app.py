"""The ASGI application: paths, errors in OpenAI's shape, and the gate around it all."""

import logging

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from trtllm_replayssm.serving.openai import metrics
from trtllm_replayssm.serving.openai.endpoints import Endpoints
from trtllm_replayssm.serving.openai.errors import ApiError
from trtllm_replayssm.serving.openai.gate import CLIENT_LEFT, Gate, error_response
from trtllm_replayssm.serving.openai.service import Service

_LOGGER = logging.getLogger(__name__)


def make_app(service: Service) -> ASGIApp:
    """Return the application of a service."""
    registry = CollectorRegistry()
    registry.register(metrics.ServiceMetrics(service))
    endpoints = Endpoints(service)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    app = Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/health", endpoints.health),
            Route("/metrics", show_metrics),
        ],
        exception_handlers={
            ApiError: _of_api,
            HTTPException: _of_http,
            ClientDisconnect: _of_client,
            Exception: _of_server,
        },
    )
    app.router.redirect_slashes = False
    return Gate(app, service, metrics.HttpCounts(registry))


async def _of_api(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it alone"
    return error_response(error)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it alone"
    found = {404: "path: found one that is not served", 405: "method: found one that this path does not have"}
    sentence = found.get(error.status_code, f"request: {error.detail}")
    response = error_response(
        ApiError(
            error.status_code,
            f"{sentence}; needed POST /v1/completions, POST "
            "/v1/chat/completions, GET /v1/models, GET /health or GET /metrics.",
        )
    )
    response.headers.update(error.headers or {})  # the methods that a path has
    return response


async def _of_client(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _of_server(request: Request, error: Exception) -> Response:
    # The error itself goes to the log alone, which uvicorn writes: it may hold what is not the client's.
    _LOGGER.error("request_id=%s met an error of the server: %r", request.state.request_id, error)
    return error_response(ApiError(500, "server: found an error of its own; its log has it under the request's id."))
