"""The protocol in plain torch, for every recurrence: which memory of a slot is read, and which is written.

What no token stands for is left out by selection, never by a factor of 0: dead memory may hold anything.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Cursors(NamedTuple):
    """Counters of the rows that have a slot, int64 [b]."""

    past_lengths: Tensor
    checkpoint_lengths: Tensor
    num_tokens: Tensor
    slots: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], used: Tensor) -> "Cursors":
        """Take the counters of the rows ``used`` from an op's arguments."""
        names = ("past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids")
        return cls(*(tensors[name][used].long() for name in names))

    def at(self, rows: Tensor) -> "Cursors":
        """Return the counters of some of the rows."""
        return Cursors(*(counter[rows] for counter in self))


def window_mask(num_tokens: Tensor, seq_len: int) -> Tensor:
    """Return [b, S] bool: the tokens s < num_tokens."""
    return torch.arange(seq_len, device=num_tokens.device) < num_tokens[:, None]


def load_checkpoint(ssm_state: Tensor, cursors: Cursors) -> Tensor:
    """Return the checkpoints in fp32, [b, H, ., .]; at position 0 that is zero, whatever the memory holds."""
    written = (cursors.checkpoint_lengths > 0)[:, None, None, None]
    return torch.where(written, ssm_state[cursors.slots].float(), 0.0)


def store_checkpoint(state: Tensor, ssm_state: Tensor, slots: Tensor) -> Tensor:
    """Write checkpoints and return them as a later step will read them, rounded to the pool's type."""
    rounded = state.to(ssm_state.dtype)
    ssm_state[slots] = rounded
    return rounded.float()


def load_ring(ring: Tensor, cursors: Cursors, end: Tensor, num_rows: int) -> Tensor:
    """Return the rows of tokens [checkpoint_lengths, end) in fp32, at most ``num_rows``; the rest is zero.

    Args:
        ring: [slots, R, ...].
        cursors: of b rows.
        end: [b], the first token that is not wanted.
        num_rows: J.

    Returns:
        [b, J, ...].
    """
    positions = cursors.checkpoint_lengths[:, None] + torch.arange(num_rows, device=end.device)
    live = (positions < end[:, None]).view(*positions.shape, *(1 for _ in ring.shape[2:]))
    return torch.where(live, ring[cursors.slots[:, None], positions % ring.size(1)].float(), 0.0)


def store_ring(rows: Tensor, ring: Tensor, cursors: Cursors) -> None:
    """Write the window's tokens s < num_tokens to their ring rows.

    Args:
        rows: [b, S, ...], as they are to be stored.
        ring: [slots, R, ...], written.
        cursors: of the b rows.
    """
    row, token = window_mask(cursors.num_tokens, rows.size(1)).nonzero(as_tuple=True)
    ring[cursors.slots[row], (cursors.past_lengths[row] + token) % ring.size(1)] = rows[row, token]
