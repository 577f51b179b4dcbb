"""What a build shows while it runs, and how it is stopped."""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class BuildProgress:
    """The steps of a build, each with its time; inside TensorRT also the phases that it reports.

    Args:
        shown: draw bars, where standard error is a terminal, and remove them at the end; otherwise only the times are
            kept.

    Attributes:
        seconds: step -> time it took.
    """

    def __init__(self, *, shown: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,  # the times are printed at the end, and an error stands alone
            disable=not (shown and sys.stderr.isatty()),
        )

    def __enter__(self) -> "BuildProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show and time one step of the build."""
        started = time.perf_counter()
        task = self._bars.add_task(name, total=None)
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)
        self._bars.update(task, total=1, completed=1)

    def split(self, name: str, parts: Mapping[str, float], rest: str) -> None:
        """Keep the times of a step's parts instead of its own, so that the times add up; ``rest`` is what is left."""
        left = self.seconds.pop(name) - sum(parts.values())
        self.seconds |= {part: round(seconds, 3) for part, seconds in {rest: left, **parts}.items()}

    def monitor(self, trt: ModuleType, cancelled: threading.Event) -> Any:
        """Make TensorRT's progress monitor; the build ends early once ``cancelled`` is set."""
        return _make_monitor(trt, self._bars, cancelled)


def _make_monitor(trt: ModuleType, bars: Progress, cancelled: threading.Event) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc,name-defined]
        """Draws TensorRT's nested phases below the step they belong to."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.tasks: dict[str, TaskID] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            del parent_phase
            self.phase_finish(phase_name)
            self.tasks[phase_name] = bars.add_task(f"  {phase_name}", total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.tasks:
                bars.update(self.tasks[phase_name], completed=step + 1)
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self.tasks:
                bars.remove_task(self.tasks.pop(phase_name))

    return Monitor()


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn an interruption into an event, for the time that TensorRT calls back into Python.

    An exception raised inside a callback would have to pass through C++; instead the monitor asks TensorRT to stop,
    and the signal is delivered again once it has returned.

    Yields:
        The event; set by SIGINT or SIGTERM.
    """
    cancelled = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancelled
        return
    received: list[int] = []

    def cancel(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        cancelled.set()

    previous = {number: signal.signal(number, cancel) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancelled
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
