"""What of a slot's states makes a snapshot, and its copies: pools -> flat bytes -> pools, and slot -> slot.

A snapshot at position p is taken where f = c = p. It is the checkpoint, the convolution's rows of the last d_conv - 1
tokens, and the key/value rows [0, p), these block by block. Ring rows are left out: none is pending.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.runtime.pools import State

_ALIGNMENT = 16  # bytes: every part of a snapshot begins at a multiple, for wide copies

# A part of a slot's states, and where it stands among the bytes of a snapshot.
_Piece = tuple[torch.Tensor, int]


class SlotStates:
    """Copies of slots.

    Args:
        geometry: the model.
        states: every state of the executor. Their addresses stay as they are.
    """

    def __init__(self, geometry: ModelGeometry, states: Sequence[State]) -> None:
        self._num_conv_rows = 0 if geometry.recurrence is None else geometry.recurrence.d_conv - 1
        self._caches = [state.pool for state in states if state.spec.is_cache]
        self._slot_pools = [state.pool for state in states if not state.spec.is_cache]
        self._parts: list[Callable[[int, int], Iterator[_Piece]]] = []
        self.state_bytes = 0
        for state in states:
            if not state.spec.is_cache:
                self._add_part(state)

    def rows_bytes(self, num_rows: int) -> int:
        """Return what the key/value rows of so many tokens take."""
        return sum(_aligned(cache[0, :, :num_rows].nbytes) for cache in self._caches)

    @torch.inference_mode()
    def save_state(self, slot: int, position: int, into: torch.Tensor) -> None:
        """Copy a slot's checkpoint and convolution rows at f = c = position to flat bytes."""
        for part, at in self._state_pieces(slot, position):
            _viewed(into, at, part).copy_(part, non_blocking=True)

    @torch.inference_mode()
    def load_state(self, slot: int, position: int, from_bytes: torch.Tensor) -> None:
        """Copy what ``save_state`` wrote to a slot."""
        for part, at in self._state_pieces(slot, position):
            part.copy_(_viewed(from_bytes, at, part), non_blocking=True)

    @torch.inference_mode()
    def save_rows(self, slot: int, start: int, end: int, into: torch.Tensor) -> None:
        """Copy the key/value rows of tokens [start, end) to flat bytes."""
        for part, at in self._row_pieces(slot, start, end):
            _viewed(into, at, part).copy_(part, non_blocking=True)

    @torch.inference_mode()
    def load_rows(self, slot: int, start: int, end: int, from_bytes: torch.Tensor) -> None:
        """Copy what ``save_rows`` wrote to a slot."""
        for part, at in self._row_pieces(slot, start, end):
            part.copy_(_viewed(from_bytes, at, part), non_blocking=True)

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int, past_length: int) -> None:
        """Make one slot's states those of another, pending rows included.

        Args:
            source: the slot to copy.
            target: the slot to overwrite; it takes over the source's counters, too, which the caller sees to.
            past_length: committed tokens c of the source: no key/value row beyond is copied.
        """
        for pool in self._slot_pools:
            pool[target].copy_(pool[source])
        for cache in self._caches:
            cache[target, :, :past_length].copy_(cache[source, :, :past_length])

    def close(self) -> None:
        """Let go of the pools: their memory would stay as long as this does."""
        self._caches, self._slot_pools, self._parts = [], [], []

    def _add_part(self, state: State) -> None:
        kind, pool, at = state.spec.name.rpartition("_")[0], state.pool, self.state_bytes
        if kind in ("ssm_state", "last_hidden"):  # the latter of a multi-token prediction head
            self._parts.append(lambda slot, position: iter([(pool[slot], at)]))
            self.state_bytes = at + _aligned(pool[0].nbytes)
        elif kind == "ssm_snapshots":  # of the conventional decode: the state after t tokens is in row t mod rows
            self._parts.append(lambda slot, position: iter([(pool[slot, position % pool.shape[1]], at)]))
            self.state_bytes = at + _aligned(pool[0, 0].nbytes)
        elif kind == "conv_ring":
            self._parts.append(lambda slot, position: self._conv_pieces(pool, slot, position, at))
            self.state_bytes = at + _aligned(self._num_conv_rows * pool[0, 0].nbytes)
        else:
            assert kind.endswith("_ring"), f"a snapshot does not know the state {state.spec.name}"

    def _conv_pieces(self, pool: torch.Tensor, slot: int, position: int, at: int) -> Iterator[_Piece]:
        """Yield rows [position - (d_conv - 1), position) of a ring, those before position 0 left out."""
        num_rows, row_bytes = pool.shape[1], pool[0, 0].nbytes
        first = position - self._num_conv_rows
        start = max(first, 0)
        while start < position:
            row = start % num_rows
            end = min(position, start + num_rows - row)
            yield pool[slot, row : row + end - start], at + (start - first) * row_bytes
            start = end

    def _state_pieces(self, slot: int, position: int) -> Iterator[_Piece]:
        for part in self._parts:
            yield from part(slot, position)

    def _row_pieces(self, slot: int, start: int, end: int) -> Iterator[_Piece]:
        at = 0
        for cache in self._caches:
            rows = cache[slot, :, start:end]
            yield rows, at
            at += _aligned(rows.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _viewed(flat: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes from ``at`` on as a tensor of another's type and shape."""
    return flat[at : at + like.nbytes].view(like.dtype).view(like.shape)
