"""What the server holds its clients to."""

from typing import Annotated

from pydantic import Field

from trtllm_replayssm.config import PositiveInt, UserOptions

Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class ServerSettings(UserOptions):
    """Limits and times of the server.

    Attributes:
        model_name: what clients call the model.
        api_keys: one of them is asked for in ``Authorization: Bearer <key>``; empty lets everybody in.
        max_body_bytes: of a request.
        max_concurrent_requests: HTTP requests that are worked on at a time, waiting ones included; more are refused
            with status 503.
        max_sequences: most sequences that one request may ask for: prompts times n.
        body_timeout_s: in which a request's body must have come.
        send_timeout_s: in which a client must take some of what waits for it; one that takes nothing is cut off.
        request_timeout_s: after which a request ends with status 504; None for never.
        shutdown_timeout_s: how long requests may go on after SIGTERM.
        retry_after_s: told to clients that were refused because the server is busy.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: PositiveInt = 2**20
    max_concurrent_requests: PositiveInt = 1024
    max_sequences: PositiveInt = 128
    body_timeout_s: Seconds = 30.0
    send_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds | None = None
    shutdown_timeout_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 30.0
    retry_after_s: PositiveInt = 1
