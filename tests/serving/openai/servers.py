"""The server as a process of its own, and what tests ask it without a client library."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from openai import OpenAI

from tests.meta.repository import ROOT

MODEL = ROOT / "examples" / "tiny_hybrid" / "model"
START_S = 120.0
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """What an HTTP request got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The sentence of an error in OpenAI's shape."""
        error = self.content["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"].endswith((".", "..."))
        return str(error["message"])


class ServerProcess:
    """``trtllm-replayssm serve`` on the shipped model, at a port of its own.

    Args:
        options: of the command.
        log: where its standard error goes.
    """

    def __init__(self, options: Sequence[str], log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "trtllm_replayssm", "serve", str(MODEL), "--dtype", "float32"]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", *(["--port", "0"] if "--port" not in options else []), *options],
                stdout=subprocess.DEVNULL,
                stderr=stream,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.port = self._wait_for_port()
        self._wait_until_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def client(self, **options: Any) -> OpenAI:
        """Return a client that does not try again by itself."""
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=0, **({"api_key": "any"} | options))

    def ask(
        self,
        path: str,
        content: Any = None,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = JSON,
        method: str | None = None,
    ) -> Answer:
        """Send one request, a POST where there is a body."""
        return ask(self.port, path, content, body=body, headers=headers, method=method)

    def metric(self, name: str) -> float:
        """Return a number of ``/metrics``; 0 where it is not there yet."""
        return metric(self.port, name)

    def wait_for_metric(self, name: str, wanted: float) -> None:
        """Wait until a number of ``/metrics`` is there."""
        wait_until(lambda: self.metric(name) == wanted, f"{name} to be {wanted}; {self.metric(name)}")

    def terminate(self) -> None:
        """Ask for an orderly end."""
        self.process.send_signal(signal.SIGTERM)

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log):
                return int(found[1])
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.log}")

    def _wait_until_ready(self) -> None:
        wait_until(lambda: self.ask("/health").status == 200, "the server to be ready")


def wait_until(condition: Any, what: str, timeout_s: float = 30.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def ask(
    port: int,
    path: str,
    content: Any = None,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] = JSON,
    method: str | None = None,
) -> Answer:
    """Send one request on a connection of its own."""
    data = json.dumps(content).encode() if content is not None else body
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    """Return a number of ``/metrics``, labels as they are printed included."""
    text = ask(port, "/metrics").body.decode()
    found = re.search(rf"^trtllm_replayssm_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


class InBackground(threading.Thread):
    """Runs something in a thread; ``outcome`` waits for what became of it."""

    def __init__(self, work: Any) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - told to who waits
            self._error = error

    def outcome(self, timeout_s: float = 60.0) -> Any:
        """Return the result or the exception."""
        self.join(timeout_s)
        assert not self.is_alive(), "it has not ended"
        return self._error if self._error is not None else self._result
