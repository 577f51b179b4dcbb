"""Counters in device memory, by which the thread blocks of a persistent kernel share out their work.

A counter is 0 before and after each launch. Launches that may run at the same time must not have the same one: those of
one stream run one after the other, and so do those that one capture takes from one stream; but a graph runs on any
stream, beside anything.
"""

import threading
from functools import cache

import torch

from trtllm_replayssm.errors import BackendError
from trtllm_replayssm.plugins.build import cuda_module

_BLOCK = 2**14
# Left before a launch outside of captures adds a block of counters: inside of one no memory may be allocated.
_RESERVE = _BLOCK // 2
_COUNTER_BYTES = 4


class _Counters:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._num_free = 0
        self._of_stream: dict[tuple[int, int], int] = {}
        # Threads that launch on streams of their own must not get one counter.
        self._lock = threading.Lock()

    def of_launch(self) -> int:
        # torch tells the capture of the current device's stream alone.
        with torch.cuda.device(self._device), self._lock:
            return self._of_launch()

    def _of_launch(self) -> int:
        capture = _capture_id(self._device)
        if capture == 0 and self._num_free < _RESERVE:
            self._blocks.append(torch.zeros(_BLOCK, dtype=torch.int32, device=self._device))
            # Other streams will use them.
            torch.cuda.current_stream(self._device).synchronize()
            self._num_free = _BLOCK
        key = (capture, torch.cuda.current_stream(self._device).cuda_stream)
        if key not in self._of_stream:
            self._of_stream[key] = self._new()
        return self._of_stream[key]

    def _new(self) -> int:
        if self._num_free == 0:
            raise BackendError(
                f"found no counter left for a captured launch on {self._device}; needed a launch outside of captures "
                f"after at most {_RESERVE} captures, which makes room for more"
            )
        self._num_free -= 1
        return self._blocks[-1].data_ptr() + self._num_free * _COUNTER_BYTES


def _capture_id(device: torch.device) -> int:
    """Return the number of the capture that torch's current stream is in, 0 for none; no two captures have the same."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    driver = cuda_module("bindings.driver")
    result, _, capture, *_ = driver.cuStreamGetCaptureInfo(torch.cuda.current_stream(device).cuda_stream)
    if int(result):
        raise BackendError(f"cuStreamGetCaptureInfo: found {result.name}; needed the capture of torch's current stream")
    return int(capture)


@cache
def _counters(device_index: int) -> _Counters:
    return _Counters(torch.device("cuda", device_index))


def counter_of_launch(device: torch.device) -> int:
    """Return the address of the counter, an unsigned 32-bit number, for a launch on torch's current stream.

    Args:
        device: the CUDA device, with its index.

    Raises:
        BackendError: too many captures without a launch outside of them.
    """
    assert device.index is not None, "a tensor's device has its index"
    return _counters(device.index).of_launch()
