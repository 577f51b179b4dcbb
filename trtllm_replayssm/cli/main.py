"""The ``trtllm-replayssm`` command.

Each command lives in a module of its own and is imported when it is called, so that a missing optional package stops
that command alone. A user's mistake is one line on stderr and exit code 2, never a traceback.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, Final, NamedTuple

import typer
from pydantic import ValidationError

from trtllm_replayssm import __version__
from trtllm_replayssm.errors import BackendError, ReplaySSMError, validation_text

EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 2
# What shells report for a process ended by SIGINT, SIGPIPE and SIGTERM.
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE
EXIT_TERMINATED: Final = 128 + signal.SIGTERM


class Command(NamedTuple):
    """Where a command is, its line in ``--help``, and those of its options that take several values.

    The module has a function ``command``, or, for a group of commands, a ``typer.Typer`` named ``app``. typer knows an
    option of several values only as one that is given several times.
    """

    module: str
    summary: str
    list_options: tuple[str, ...] = ()


COMMANDS: Final[dict[str, Command]] = {
    "convert": Command("trtllm_replayssm.cli.convert", "Convert a Hugging Face folder to a rank checkpoint."),
    "build": Command(
        "trtllm_replayssm.cli.build", "Build a TensorRT engine from a rank checkpoint.", ("--compute_capability",)
    ),
    "run": Command("trtllm_replayssm.cli.run", "Generate text with an engine, a checkpoint or a model folder."),
    "inspect": Command("trtllm_replayssm.cli.inspect", "Show what a model or engine folder holds."),
    "serve": Command("trtllm_replayssm.cli.serve", "Serve a model over HTTP, to OpenAI's clients."),
    "triton": Command(
        "trtllm_replayssm.cli.triton", "Write a model repository for Triton Inference Server.", ("--gpus",)
    ),
    "bench": Command(
        "trtllm_replayssm.cli.bench",
        "Measure kernels and whole models on this machine's GPU.",
        (
            *("--shape", "--batch_sizes", "--state_dtype", "--max_draft_len", "--prefill_batch_sizes"),
            *("--level", "--mode"),
        ),
    ),
}


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
    _mend_streams()
    try:
        with _sigterm_raises():
            code = _run(arguments)
            sys.stdout.flush()
        if code == EXIT_INTERRUPTED:  # typer turns an interruption into this code
            return _fail("interrupted", EXIT_INTERRUPTED)
        return code if isinstance(code, int) else EXIT_OK
    except ValidationError as error:
        return _fail(f"{validation_text(error)}.")
    except ReplaySSMError as error:
        return _fail(str(error))
    except typer.TyperException as error:
        # A choice's checker is pydantic, whose words begin so.
        message = error.format_message().replace("Value error, ", "")
        end = "" if message.endswith("?") else "."  # it may ask whether another name was meant
        return _fail(f"{message.rstrip('.')}{end} Try --help.")
    except BrokenPipeError:
        # The reader of our output has left; a flush at exit would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name)
        return _fail(f"{names}: {error.strerror}" if names else str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except _Terminated:
        return _fail("terminated", EXIT_TERMINATED)


def _mend_streams() -> None:
    """Let any text be printed: a terminal of another encoding shows escapes, and a closed stream swallows it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str]) -> object:
    try:
        return _make_app(arguments)(args=_spread(arguments), prog_name="trtllm-replayssm", standalone_mode=False)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("trtllm_replayssm"):
            raise
        missing = f"{arguments[0]}: the Python package {error.name!r} is missing. Install it with pip."
        raise BackendError(missing) from error
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer makes an exit of it
            raise error.__context__ from None
        raise


def _fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _make_app(arguments: Sequence[str]) -> typer.Typer:
    """Register every command's name and summary, and the body of the one that is called."""
    # --max-tokens is taken for --max_tokens, and so is a choice's name.
    settings = {"token_normalize_func": lambda name: name.replace("-", "_")}
    # No markup: plain help pages have every name in full, however narrow the terminal.
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings=settings, rich_markup_mode=None
    )
    app.callback()(_options)
    called = _called(arguments)
    for name, command in COMMANDS.items():
        if name != called:
            app.command(name, help=command.summary)(_not_called)
            continue
        module = importlib.import_module(command.module)
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def _called(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _spread(arguments: Sequence[str]) -> list[str]:
    """Name a list option again before each of its further values."""
    called = COMMANDS.get(_called(arguments) or "")
    options = called.list_options if called else ()
    spread: list[str] = []
    for argument in arguments:
        option = spread[-2].replace("-", "_").replace("__", "--", 1) if spread[-2:-1] else ""
        if not argument.startswith("-") and option in options:
            spread.append(spread[-2])
        spread.append(argument)
    return spread


def _not_called() -> None:
    """Stand in for the commands that this call does not run."""


def _print_version(shown: bool) -> None:
    if shown:
        print(__version__)
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """ReplaySSM for TensorRT: convert, build, run, inspect and measure hybrid state-space language models."""


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
