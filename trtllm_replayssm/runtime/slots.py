"""Slots: which row of the state pools a request owns, and the two absolute counters of each.

A slot is made ready by setting both counters to 0. There is no memset: a checkpoint at position 0 is never read.
"""

import heapq

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.errors import CapacityError


class Slots:
    """A free list, and the counters of every slot.

    Attributes:
        past_lengths: int32 [slots], tokens committed (c). Written here at acquire, and by ``commit`` alone.
        checkpoint_lengths: int32 [slots], tokens folded into the checkpoint (f). Written as ``past_lengths``.
    """

    def __init__(self, count: int) -> None:
        self.past_lengths: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.checkpoint_lengths: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._free = list(range(count))
        self._in_use: set[int] = set()

    @property
    def count(self) -> int:
        """All slots, free ones included."""
        return len(self.past_lengths)

    @property
    def num_free(self) -> int:
        """Slots that ``acquire`` can still give."""
        return len(self._free)

    @property
    def end(self) -> int:
        """One past the highest slot in use: the rows of a decode step."""
        return max(self._in_use, default=-1) + 1

    def acquire(self) -> int:
        """Take the lowest free slot, so that decode steps stay narrow, and set its counters to 0.

        Raises:
            CapacityError: none is free.
        """
        if not self._free:
            raise CapacityError(f"slots: found none free of {self.count}; needed one. Raise max_batch_size.")
        slot = heapq.heappop(self._free)
        self._in_use.add(slot)
        self.past_lengths[slot] = 0
        self.checkpoint_lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Its memory and counters stay as they are until it is taken again."""
        self._in_use.remove(slot)
        heapq.heappush(self._free, slot)
