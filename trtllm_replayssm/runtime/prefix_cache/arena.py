"""One fixed piece of memory, given out in ranges: what is in use never exceeds it."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_replayssm.errors import CapacityError

ALIGNMENT = 256
"""Bytes: ranges begin and end at multiples of it, so that a view of any type is aligned for wide copies."""


@dataclass(frozen=True, order=True)
class Range:
    """Bytes [start, end) of an arena."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self.end - self.start


class Arena:
    """Memory of a fixed size with a first-fit list of what is free.

    Args:
        capacity: bytes; what is over a multiple of ``ALIGNMENT`` is not used.
        device: where.
        is_page_locked: lock the pages of host memory, so that copies from and to a GPU run beside it and at full speed.

    Raises:
        CapacityError: the device has no room for it.
    """

    def __init__(self, capacity: int, device: torch.device, *, is_page_locked: bool = False) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.used_bytes = 0
        self._is_locked = False
        try:
            self._memory = torch.empty(self.capacity, dtype=torch.uint8, device=device)
            if is_page_locked and self.capacity:
                self._lock_pages()
        # torch.OutOfMemoryError or CudaError; a plain RuntimeError on the CPU; a TypeError of what has over 63 bits
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]  # the rest is where in torch's code
            raise CapacityError(
                f"memory of {device}: found no room for a prefix cache of {capacity} bytes ({reason}); needed that. "
                f"Lower device_cache_size or host_cache_size of the KvCacheConfig."
            ) from error
        self._free = [Range(0, self.capacity)] if self.capacity else []

    def allocate(self, num_bytes: int) -> Range | None:
        """Take the first free range that is long enough; None where there is none. An empty one takes a unit, too."""
        needed = range_bytes(num_bytes)
        for index, free in enumerate(self._free):
            if free.num_bytes < needed:
                continue
            taken = Range(free.start, free.start + needed)
            self._free[index : index + 1] = [Range(taken.end, free.end)] if taken.end < free.end else []
            self.used_bytes += needed
            return taken
        return None

    def free(self, taken: Range) -> None:
        """Give a range back."""
        start, end = taken.start, taken.end
        index = bisect_left(self._free, taken)
        assert index == len(self._free) or end <= self._free[index].start, "a range is given back twice"
        first = last = index
        if index < len(self._free) and self._free[index].start == end:
            end, last = self._free[index].end, index + 1
        if index and self._free[index - 1].end == start:
            start, first = self._free[index - 1].start, index - 1
        self._free[first:last] = [Range(start, end)]
        self.used_bytes -= taken.num_bytes

    def view(self, taken: Range) -> torch.Tensor:
        """Return a range's bytes, uint8 and contiguous."""
        return self._memory[taken.start : taken.end]

    def close(self) -> None:
        """Drop the memory; the arena is not used again."""
        if self._is_locked:
            torch.cuda.synchronize()  # copies may still be under way
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._is_locked = False
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._free = []

    def _lock_pages(self) -> None:
        # Not torch's own pinned memory, which rounds up to a power of two: the budget would not hold.
        torch.cuda.check_error(_cudart().cudaHostRegister(self._memory.data_ptr(), self.capacity, 0))
        self._is_locked = True


def range_bytes(num_bytes: int) -> int:
    """Return what so many bytes take of an arena."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
