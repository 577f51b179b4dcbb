"""The process: a socket, uvicorn, and an orderly end."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.serving.openai.app import make_app
from trtllm_replayssm.serving.openai.connection import Connection
from trtllm_replayssm.serving.openai.service import Service

_LOGGER = logging.getLogger(__name__)
# Behind a proxy: longer than the time for which proxies keep connections, so that it is they who close them.
_KEEP_ALIVE_S = 75
# After requests were told to end, for what is still to be sent.
_LAST_WORDS_S = 5


class Server(uvicorn.Server):
    """uvicorn's server with an end of our own.

    At SIGTERM or SIGINT it is not ready any more, takes no more requests and lets those it has go on for a time; then
    they end with an error that says why. A second SIGINT ends the process at once.

    Args:
        service: what is served.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        limit = int(service.settings.shutdown_timeout_s) + _LAST_WORDS_S

        class TimedConnection(Connection):
            send_timeout_s = service.settings.send_timeout_s

        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=TimedConnection,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=limit,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let signals end the server, and not be raised again afterwards: an orderly end is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, by themselves or after their time."""
        self._service.is_draining = True
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._service.settings.shutdown_timeout_s, self._service.end_all)
        await super().shutdown(sockets)
        ending.cancel()
        if self.force_exit:  # then nothing was waited for: requests end as if their clients had left
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that clients can connect to; with port 0, at a free port.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"host, port: found {host!r} and {port}; needed an address of this machine and a free port ({error}). Name "
            f"others with --host and --port; --port 0 takes a free one."
        ) from error


def serve(service: Service, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not service.settings.api_keys and host not in ("127.0.0.1", "::1"):
        _LOGGER.warning("anyone who reaches %s can use the model: no API keys were given", shown)
    _LOGGER.info("%s is served at http://%s:%d/v1", service.settings.model_name, shown, port)
    server = Server(service)
    server.run([listener])
    _LOGGER.info("served; %s", "ended at once" if server.force_exit else "all requests have ended")
