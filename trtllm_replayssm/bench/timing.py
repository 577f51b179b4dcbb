"""Times on a CUDA device: graphs of many launches between events, and the bandwidth of a plain copy."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

WARM_UPS = 2
RUNS = 7
_COPY_BYTES = 2**30
_COPIES = 8


class Timing(NamedTuple):
    """Seconds of one launch.

    Attributes:
        seconds: median over the runs.
        spread: slowest run minus fastest, as a share of the median.
    """

    seconds: float
    spread: float


def time_graph(launch_all: Callable[[], object], num_launches: int, *, runs: int = RUNS) -> Timing:
    """Capture launches in one CUDA graph and time its replays.

    Replaying a graph runs the same launches with the same lengths again. For the protocol that would be a fault (a step
    runs once per commit), for a time it is not: the arithmetic and the traffic are those of the first run.

    Args:
        launch_all: makes the launches on the current stream; everything is compiled and loaded already.
        num_launches: how many they are.
        runs: replays that are timed.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    return _timed(graph.replay, num_launches, runs)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read plus written, of torch's copy of 1 GiB within the device."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    return 2 * _COPY_BYTES / _timed(copy, _COPIES).seconds


def _timed(run: Callable[[], None], num_launches: int, runs: int = RUNS) -> Timing:
    """Time runs that are queued without a pause, so that the device never waits for the host between two events."""
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(runs + 1)
    ]
    for _ in range(WARM_UPS):
        run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    times = [start.elapsed_time(end) / 1e3 / num_launches for start, end in pairwise(events)]
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median)
