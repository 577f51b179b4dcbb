"""Which launches share a counter, on a stand-in for torch's streams and captures; on a device: test_counters_gpu.py."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from trtllm_replayssm.errors import BackendError
from trtllm_replayssm.plugins import counters


class Streams:
    """What each thread's current stream and device are, and the capture that the stream is in."""

    def __init__(self) -> None:
        self.of_thread = threading.local()
        self.num_syncs = 0

    def set(self, stream: int, capture: int = 0) -> None:
        self.of_thread.stream, self.of_thread.capture = stream, capture

    @property
    def cuda_stream(self) -> int:
        stream: int = self.of_thread.stream
        return stream

    def synchronize(self) -> None:
        self.num_syncs += 1
        time.sleep(0.01)  # as torch does, it lets other threads run

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.of_thread.device = device
        yield
        del self.of_thread.device

    def capture_id(self, device: torch.device) -> int:
        assert self.of_thread.device == device, "asked about the stream of another device"
        capture: int = self.of_thread.capture
        return capture


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(counters, "_capture_id", found.capture_id)
    return found


def new_counters() -> counters._Counters:
    return counters._Counters(torch.device("cpu"))


def test_a_stream_keeps_its_counter_and_each_stream_of_each_capture_has_another(streams: Streams) -> None:
    made = new_counters()
    found: dict[tuple[int, int], int] = {}
    for _ in range(2):
        for stream, capture in itertools.product((0, 8), (0, 1, 2)):
            streams.set(stream, capture)
            address = made.of_launch()
            assert found.setdefault((stream, capture), address) == address
    assert len(set(found.values())) == 6
    assert streams.num_syncs == 1, "other streams must not see the counters before they are zero"


def test_threads_get_counters_of_their_own(streams: Streams) -> None:
    made, num_threads = new_counters(), 8
    start = threading.Barrier(num_threads)

    def launch(stream: int) -> int:
        streams.set(stream)
        start.wait()
        return made.of_launch()

    with ThreadPoolExecutor(num_threads) as pool:
        assert len(set(pool.map(launch, range(num_threads)))) == num_threads


def test_captures_without_a_launch_outside_of_them_run_out_and_a_launch_makes_room(streams: Streams) -> None:
    made = new_counters()
    streams.set(0)
    found = {made.of_launch()}
    captures = itertools.count(1)
    with pytest.raises(BackendError, match="found no counter left for a captured launch"):
        for capture in captures:
            streams.set(0, capture)
            found.add(made.of_launch())
    assert next(captures) > counters._RESERVE
    streams.set(0)
    assert made.of_launch() in found
    streams.set(0, next(captures))
    assert made.of_launch() not in found


def test_a_first_launch_within_a_capture_is_refused(streams: Streams) -> None:
    streams.set(0, 1)
    with pytest.raises(BackendError, match="needed a launch outside of captures"):
        new_counters().of_launch()
