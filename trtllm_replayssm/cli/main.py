"""The ``trtllm-replayssm`` command.

Each command lives in a module of its own and is imported when it is called, so that a missing optional package stops
that command alone. A user's mistake is one line on stderr and exit code 2, never a traceback.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, Final, NamedTuple

import typer
from pydantic import ValidationError

from trtllm_replayssm.errors import BackendError, ReplaySSMError

EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 2
# What shells report for a process ended by SIGINT, SIGPIPE and SIGTERM.
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE
EXIT_TERMINATED: Final = 128 + signal.SIGTERM


class Command(NamedTuple):
    """Where a command is, and its line in ``--help``."""

    module: str
    summary: str


COMMANDS: Final[dict[str, Command]] = {
    "convert": Command("trtllm_replayssm.cli.convert", "Convert a Hugging Face folder to a rank checkpoint."),
    "build": Command("trtllm_replayssm.cli.build", "Build a TensorRT engine from a rank checkpoint."),
    "run": Command("trtllm_replayssm.cli.run", "Generate text with an engine, a rank checkpoint or a model folder."),
    "inspect": Command("trtllm_replayssm.cli.inspect", "Show what a model or engine folder holds."),
}

# typer carries its own copy of click since 0.2x and the library before: this is the base of usage errors in either.
_UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[2]


class _Terminated(BaseException):
    """SIGTERM as an exception, so that unfinished outputs are removed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; by default the process's.

    Returns:
        The exit code: 0, 2 for a user's mistake, 128 + signal when interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with _sigterm_raises():
            code = _make_app(arguments)(args=arguments, prog_name="trtllm-replayssm", standalone_mode=False)
            sys.stdout.flush()
        if code == EXIT_INTERRUPTED:  # typer turns an interruption into this code, click into Abort
            return _fail("interrupted", EXIT_INTERRUPTED)
        return code if isinstance(code, int) else EXIT_OK
    except ValidationError as error:
        return _fail("; ".join(_describe(detail) for detail in error.errors()))
    except ReplaySSMError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(f"{error.format_message()} Try --help.")  # type: ignore[attr-defined]
    except BrokenPipeError:
        # The reader of our output has left; a flush at exit would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except _Terminated:
        return _fail("terminated", EXIT_TERMINATED)


def _fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _describe(detail: Any) -> str:
    """Turn one entry of a pydantic error into ``name: found x; needed ...``."""
    name = ".".join(str(part) for part in detail["loc"]) or "options"
    if detail["type"] == "extra_forbidden":
        return f"{name}: unknown option"
    return f"{name}: found {detail['input']!r}; {detail['msg'].removeprefix('Value error, ')}"


def _make_app(arguments: Sequence[str]) -> typer.Typer:
    """Register every command's name and summary, and the body of the one that is called."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        function = _load(name, command) if name == called else _not_called
        app.command(name, help=None if name == called else command.summary)(function)
    return app


def _load(name: str, command: Command) -> Callable[..., None]:
    try:
        function: Callable[..., None] = importlib.import_module(command.module).command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("trtllm_replayssm"):
            raise
        raise BackendError(f"{name}: the Python package {error.name!r} is missing. Install it with pip.") from error
    return function


def _not_called() -> None:
    """Stand in for the commands that this call does not run."""


def _print_version(shown: bool) -> None:
    if shown:
        print(version("trtllm-replayssm"))
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """ReplaySSM for TensorRT: convert, build, run and inspect hybrid state-space language models."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack. Signals can be handled in the main thread alone; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
