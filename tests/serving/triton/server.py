"""A real ``tritonserver`` as a process: started on free ports, waited for, stopped.

``python -m tests.serving.triton.server REPOSITORY`` serves a repository until it is interrupted.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.meta.repository import ROOT
from tests.serving.triton.install_server import FOLDER, site_packages

TIMEOUT_S = 120.0
HOST = "127.0.0.1"


class NotStartedError(RuntimeError):
    """The server has no models to serve, or could not read them; its own words are in the message."""


def obstacle() -> str | None:
    """Return why there is no server to start; None where there is one."""
    if not _binary().is_file():
        return f"no Triton server in {FOLDER}; `make env` installs it where its wheels are to be had"
    return None


@dataclass
class Server:
    """A running server.

    Attributes:
        process: the server.
        http: its HTTP port.
        grpc: its gRPC port.
        metrics: its metrics port.
        log: what it writes.
    """

    process: "subprocess.Popen[bytes]"
    http: int
    grpc: int
    metrics: int
    log: Path

    @property
    def url(self) -> str:
        """The HTTP address."""
        return f"http://{HOST}:{self.http}"

    def read_metrics(self) -> str:
        """Return the page of the metrics endpoint."""
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics}/metrics", timeout=TIMEOUT_S) as response:
            return bytes(response.read()).decode()


@contextmanager
def running(repository: Path, scratch: Path, *options: str) -> Iterator[Server]:
    """Start a server, wait until its models are ready, and stop it at the end.

    Args:
        repository: the models.
        scratch: an empty folder for the server's log and its folder of backends.
        options: further ones of ``tritonserver``.
    """
    backends = _backends(scratch)
    server = _start(repository, backends, scratch / "server.log", options)
    try:
        while not _is_ready(server):  # another process has taken a port of it meanwhile
            server = _start(repository, backends, server.log, options)
        yield server
    finally:
        stop(server)


def _start(repository: Path, backends: Path, log: Path, options: Sequence[str]) -> Server:
    http, grpc, metrics = _free_ports(3)
    command = [
        str(_binary()),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *(f"--{name}-address={HOST}" for name in ("http", "grpc", "metrics")),
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        f"--metrics-port={metrics}",
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
        "--exit-timeout-secs=10",
        *options,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(), cwd=ROOT)
    return Server(process, http, grpc, metrics, log)


def stop(server: Server) -> None:
    """End a server as an operator does, and wait; one that does not end is killed."""
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(30)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def _binary() -> Path:
    return _tritonserver() / "bin" / "tritonserver"


def _tritonserver() -> Path:
    return site_packages() / "pytriton" / "tritonserver"


def _backends(scratch: Path) -> Path:
    """Return a folder of backends: the Python backend, and its stub of this Python version."""
    folder = scratch / "backends" / "python"
    folder.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = _tritonserver() / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(_tritonserver() / "backends" / "python").iterdir(), stub):
        (folder / file.name).symlink_to(file)
    return folder.parent


def _environment() -> dict[str, str]:
    """Let the stub find the interpreter's library, and by the first python3 on the path the server's environment."""
    return {
        **os.environ,
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
    }


def _free_ports(count: int) -> list[int]:
    with_sockets = [socket.socket() for _ in range(count)]
    for each in with_sockets:
        each.bind((HOST, 0))
    ports = [int(each.getsockname()[1]) for each in with_sockets]
    for each in with_sockets:
        each.close()
    return ports


def _is_ready(server: Server) -> bool:
    """Wait until a server is ready; say no where it ended because a port of it was taken."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            log = server.log.read_text()
            if "already in use" not in log:
                raise NotStartedError(f"the server ended:\n{_complaints(log)}")
            return False
        try:
            with urllib.request.urlopen(f"{server.url}/v2/health/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise NotStartedError(f"the server was not ready within {TIMEOUT_S} s:\n{_complaints(server.log.read_text())}")


def _complaints(log: str) -> str:
    """Return the errors in a server's log, which stand among tables of its settings; else the log's end."""
    errors = [line for line in log.splitlines() if re.match(r"E\d{4} |error: ", line)]
    return "\n".join(errors)[:4000] or log[-4000:]


def main(arguments: Sequence[str]) -> None:
    """Serve a repository until an interrupt."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.exit(
            f"error: found {' '.join(arguments) or 'no arguments'}; needed the folder of a model repository, "
            "such as `trtllm-replayssm triton` writes"
        )
    reason = obstacle()
    if reason is not None:
        sys.exit(f"error: {reason}")
    try:
        _serve(Path(arguments[0]).resolve())
    except NotStartedError as error:
        sys.exit(f"error: {error}")


def _serve(repository: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, running(repository, Path(scratch)) as server:
        sys.stdout.write(
            f"HTTP {server.url}, gRPC {HOST}:{server.grpc}, metrics http://{HOST}:{server.metrics}/metrics\n"
        )
        sys.stdout.write(f"log {server.log}; Ctrl-C ends it\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
