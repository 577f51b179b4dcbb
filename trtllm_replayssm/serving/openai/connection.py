"""A client's connection: uvicorn's, which would wait for ever for a client that does not read; this one does not."""

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

_LOGGER = logging.getLogger(__name__)


class Connection(H11Protocol):
    """HTTP/1.1 on one socket, which is cut off when its client takes nothing of what waits for it.

    That ends a stream's request as if the client had left. It also ends what no request waits for any more: an
    orderly close keeps the socket, and the rest of its response in memory, until the last byte has gone.

    Attributes:
        send_timeout_s: in which the client must take something.
    """

    send_timeout_s = 60.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; uvicorn calls this and the next three."""
        super().connection_made(transport)
        # ``pause_writing`` is to come whenever something waits in this process, however little.
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """All that waited has gone."""
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.send_timeout_s, self._look_again, num_waiting)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self, num_before: int) -> None:
        if self.transport.get_write_buffer_size() < num_before:
            self._watch()
            return
        _LOGGER.warning("a client took nothing of its response for %g s and was cut off", self.send_timeout_s)
        self.transport.abort()
