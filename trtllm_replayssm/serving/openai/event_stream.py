"""A response of server-sent events that ends when its client has left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Wait until a client has left; its request must have been read."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream:
    """An ASGI response.

    Args:
        events: what to send, one event each.
        lifetime: entered when the sending begins, left when it has ended in whatever way.
    """

    def __init__(self, events: AsyncIterator[bytes], lifetime: AbstractContextManager[None]) -> None:
        self._events = events
        self._lifetime = lifetime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client leaves before."""
        with self._lifetime:
            sending = asyncio.ensure_future(self._send_all(send))
            watching = asyncio.ensure_future(until_gone(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, watching):
                    task.cancel()
                outcomes = await asyncio.gather(sending, watching, return_exceptions=True)
            if isinstance(outcomes[0], Exception):
                raise outcomes[0]

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
        async for content in self._events:
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
