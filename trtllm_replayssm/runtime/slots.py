"""Slots: which row of the state pools a request owns, and the two absolute counters of each.

A slot is made ready by setting both counters to 0. There is no memset: a checkpoint at position 0 is never read.
"""

import heapq

import numpy as np
import numpy.typing as npt


class Slots:
    """A free list, and the counters of every slot.

    Attributes:
        past_lengths: int32 [slots], tokens committed (c). Written here, for a slot that is taken, and by ``commit``.
        checkpoint_lengths: int32 [slots], tokens folded into the checkpoint (f). Written as ``past_lengths``.
    """

    def __init__(self, count: int) -> None:
        self.past_lengths: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.checkpoint_lengths: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._free = list(range(count))

    @property
    def num_free(self) -> int:
        """Slots that ``acquire`` can still give."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free slot, so that decode steps stay narrow, and set its counters to 0; one must be free."""
        assert self._free, "the scheduler takes a slot only while one is free"
        slot = heapq.heappop(self._free)
        self.past_lengths[slot] = 0
        self.checkpoint_lengths[slot] = 0
        return slot

    def resume(self, slot: int, past_length: int, checkpoint_length: int) -> None:
        """Set the counters of a slot, just acquired, whose states were copied from elsewhere."""
        self.past_lengths[slot] = past_length
        self.checkpoint_lengths[slot] = checkpoint_length

    def release(self, slot: int) -> None:
        """Give a slot back. Its memory and counters stay as they are until it is taken again."""
        assert slot not in self._free, f"slot {slot} is given back twice"
        heapq.heappush(self._free, slot)
