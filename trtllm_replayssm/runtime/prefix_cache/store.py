"""Chunks of bytes in two tiers, device and host: each keeps within its budget, the least recently used leave first.

A chunk that leaves the device goes to the host, and one that leaves the host is gone. A pinned chunk stays where it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_replayssm.runtime.prefix_cache.arena import Arena, Range


class Tier:
    """An arena and who lives in it.

    Attributes:
        arena: the memory.
        chunks: where each chunk is, the least recently used first.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.chunks: OrderedDict[Chunk, Range] = OrderedDict()


class Chunk:
    """Some bytes of a snapshot.

    Attributes:
        owner: what it belongs to; of no concern here.
        num_bytes: its size.
        tier: where it is; None once it is gone.
        num_pins: how many users need it to stay.
    """

    __slots__ = ("num_bytes", "num_pins", "owner", "tier")

    def __init__(self, owner: Any, num_bytes: int) -> None:
        self.owner = owner
        self.num_bytes = num_bytes
        self.tier: Tier | None = None
        self.num_pins = 0


class Store:
    """The two tiers.

    Args:
        device: memory next to the state pools.
        host: memory that takes what leaves the device.
        on_drop: told of each chunk that is gone because of the budgets; may free others.
    """

    def __init__(self, device: Arena, host: Arena, on_drop: Callable[[Chunk], None]) -> None:
        self.device = Tier(device)
        self.host = Tier(host)
        self._on_drop = on_drop

    @property
    def capacity(self) -> int:
        """Bytes of both tiers together."""
        return self.device.arena.capacity + self.host.arena.capacity

    def add(self, owner: Any, num_bytes: int) -> Chunk | None:
        """Make a chunk, on the device if it fits there; None where everything else would have to be pinned out."""
        for tier in (self.device, self.host):
            taken = self._make_room(tier, num_bytes)
            if taken is not None:
                chunk = Chunk(owner, num_bytes)
                self._place(chunk, tier, taken)
                return chunk
        return None

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the bytes of a chunk, until another is added or promoted."""
        assert chunk.tier is not None, "the chunk is gone"
        return chunk.tier.arena.view(chunk.tier.chunks[chunk])

    def touch(self, chunk: Chunk) -> None:
        """Count a chunk as the most recently used."""
        assert chunk.tier is not None, "the chunk is gone"
        chunk.tier.chunks.move_to_end(chunk)

    def free(self, chunk: Chunk) -> None:
        """Give a chunk's memory back, if it still has some."""
        if chunk.tier is not None:
            chunk.tier.arena.free(chunk.tier.chunks.pop(chunk))
            chunk.tier = None

    def promote(self, chunk: Chunk) -> None:
        """Bring a chunk from the host to the device, where there is room for it beside what is pinned."""
        if chunk.tier is self.host:
            with self.pinned([chunk]):
                taken = self._make_room(self.device, chunk.num_bytes)
            if taken is not None:
                self._move(chunk, self.device, taken)

    @contextmanager
    def pinned(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Keep chunks where they are for a while."""
        held = list(chunks)
        for chunk in held:
            chunk.num_pins += 1
        try:
            yield
        finally:
            for chunk in held:
                chunk.num_pins -= 1

    def _make_room(self, tier: Tier, num_bytes: int) -> Range | None:
        if num_bytes > tier.arena.capacity:
            return None
        while (taken := tier.arena.allocate(num_bytes)) is None:
            victim = next((chunk for chunk in tier.chunks if not chunk.num_pins), None)
            if victim is None:
                return None
            self._evict(victim)
        return taken

    def _evict(self, victim: Chunk) -> None:
        taken = self._make_room(self.host, victim.num_bytes) if victim.tier is self.device else None
        if victim.tier is None:  # making room dropped what it depended on, and it with that
            if taken is not None:
                self.host.arena.free(taken)
        elif taken is not None:
            self._move(victim, self.host, taken)
        else:
            self.free(victim)
            self._on_drop(victim)

    def _move(self, chunk: Chunk, tier: Tier, taken: Range) -> None:
        # Copies of one stream run in order, so the range that becomes free may be written at once by later ones.
        tier.arena.view(taken).copy_(self.view(chunk)[: taken.num_bytes], non_blocking=True)
        self.free(chunk)
        self._place(chunk, tier, taken)

    def _place(self, chunk: Chunk, tier: Tier, taken: Range) -> None:
        tier.chunks[chunk] = taken
        chunk.tier = tier
