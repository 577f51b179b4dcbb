"""The states of the conventional decode: rewritten for every token, one snapshot per window token.

Snapshots are addressed by position, as the rings are: the state after t tokens stands in row t mod (T + 1). Nothing
here reads device memory on the host, so that the step can be captured in a CUDA graph.
"""

import torch
from torch import Tensor


def load(ssm_snapshots: Tensor, past_lengths: Tensor, slots: Tensor) -> Tensor:
    """Return the states after ``past_lengths`` tokens in fp32, [b, H, ., .]; zero at position 0, without looking."""
    state = ssm_snapshots[slots, past_lengths % ssm_snapshots.size(1)].float()
    return torch.where((past_lengths > 0)[:, None, None, None], state, 0.0)


def store_window(
    states: Tensor, ssm_snapshots: Tensor, slots: Tensor, past_lengths: Tensor, num_tokens: Tensor
) -> None:
    """Write the state after each window token s < num_tokens; states: [b, S, H, ., .]."""
    seq_len = states.size(1)
    after = 1 + torch.arange(seq_len, device=slots.device)
    store(
        states.flatten(0, 1),
        ssm_snapshots,
        slots.repeat_interleave(seq_len),
        (past_lengths[:, None] + after).flatten(),
        (after <= num_tokens[:, None]).flatten(),
    )


def store(states: Tensor, ssm_snapshots: Tensor, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
    """Write each valid state to the snapshot row of its position.

    An invalid entry repeats the write of a valid one, same place and same bytes; where none is valid, it writes back
    what is there. So the shapes are fixed and no index list has to be read by the host.
    """
    if valid.numel() == 0:
        return
    rows = positions % ssm_snapshots.size(1)
    stand_in = valid.int().argmax(0, keepdim=True)  # of one element: the host would read an index without dimensions
    slots, rows = torch.where(valid, slots, slots[stand_in]), torch.where(valid, rows, rows[stand_in])
    mask = valid[:, None, None, None]
    values = torch.where(mask, states, states[stand_in]).to(ssm_snapshots.dtype)
    ssm_snapshots[slots, rows] = torch.where(valid.any(), values, ssm_snapshots[slots, rows])
