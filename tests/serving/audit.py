"""What this process opens, starts or unpickles while something is tried: Python's audit events."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVENTS = ("open", "os.listdir", "os.scandir", "pickle.find_class", "exec", "subprocess.Popen")
_seen: list[str] = []
_is_watching = threading.Event()
_hooks: list[object] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watching.is_set() and event in _EVENTS:
        _seen.append(f"{event} {arguments[0]!r}")


@contextmanager
def watching() -> Iterator[list[str]]:
    """Give a list that is filled with what happens in any thread; one at a time. That it is filled is tried first."""
    if not _hooks:  # a hook stays for as long as the process
        sys.addaudithook(_watch)
        _hooks.append(_watch)
    _seen.clear()
    _is_watching.set()
    try:
        opened = threading.Thread(target=lambda: open(os.devnull, "rb").close())
        opened.start()
        opened.join()
        assert f"open {os.devnull!r}" in _seen
        yield _seen
    finally:
        _is_watching.clear()


def forbidden(seen: list[str], word: str) -> list[str]:
    """Return what has to do with a word of a request, unpickles or starts a process."""
    return [what for what in seen if word in what or "pickle" in what or "subprocess" in what]
