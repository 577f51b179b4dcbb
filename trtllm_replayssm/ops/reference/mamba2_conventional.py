"""Mamba-2 as decoders usually run it: the state is rewritten for every token. For comparison with replay.

With speculation a snapshot of the state is kept per window token, so that a rejection can go back to one of them.
Snapshots are addressed by position, as the rings are: the state after t tokens stands in row t mod (T + 1).
Nothing here reads device memory on the host, so that the step can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops.reference.mamba2 import Inputs, Rows, Weights, add_skip, load_window, scan


@torch.no_grad()
def mamba2_conventional(
    inputs: Inputs,
    weights: Weights,
    ssm_snapshots: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    max_draft_len: int,
) -> Tensor:
    """Run one step, or a prefill when the window is longer than 1 + max_draft_len; see ``ops.mamba2_conventional``.

    ``ssm_snapshots`` is written in place. Arguments have been checked; counters are int64 [b].

    Returns:
        y, [b, S, H, P] in fp32; zero in padding rows and at tokens s >= num_tokens.
    """
    A, seq_len = weights.A, inputs.x.size(1)
    num_tokens = torch.where(slot_ids >= 0, num_tokens, 0)
    slots = slot_ids.clamp(min=0)
    tokens, C = load_window(inputs, weights.dt_bias, num_tokens)
    state = _load_snapshot(ssm_snapshots, past_lengths, slots)
    if protocol.is_prefill(seq_len, max_draft_len):
        y, state = scan(state, tokens, C, A)
        _store_snapshots(state, ssm_snapshots, slots, past_lengths + num_tokens, num_tokens > 0)
    else:
        y, states = _step_by_token(state, tokens, C, A)
        after = 1 + torch.arange(seq_len, device=slots.device)
        _store_snapshots(
            states.flatten(0, 1),
            ssm_snapshots,
            slots.repeat_interleave(seq_len),
            (past_lengths[:, None] + after).flatten(),
            (after <= num_tokens[:, None]).flatten(),
        )
    return add_skip(y, tokens, weights.D, num_tokens)


def _load_snapshot(ssm_snapshots: Tensor, past_lengths: Tensor, slots: Tensor) -> Tensor:
    """Return the states after ``past_lengths`` tokens in fp32, [b, H, P, N]; zero at position 0, without looking."""
    state = ssm_snapshots[slots, past_lengths % ssm_snapshots.size(1)].float()
    return torch.where((past_lengths > 0)[:, None, None, None], state, 0.0)


def _step_by_token(state: Tensor, tokens: Rows, C: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence; return y without ``D x``, [b, S, H, P], and the state after each token, [b, S, H, P, N]."""
    heads_per_group = tokens.x.size(2) // C.size(2)
    outputs, states = [tokens.x[:, :0]], [state[:, None][:, :0]]
    for x, dt, B, C_now in zip(*(part.unbind(1) for part in (*tokens, C)), strict=True):
        B_of_head, C_of_head = (part.repeat_interleave(heads_per_group, dim=1)[:, :, None] for part in (B, C_now))
        state = (A * dt).exp()[..., None, None] * state + (dt[..., None] * x)[..., None] * B_of_head
        outputs.append((state * C_of_head).sum(-1)[:, None])
        states.append(state[:, None])
    return torch.cat(outputs, dim=1), torch.cat(states, dim=1)


def _store_snapshots(states: Tensor, ssm_snapshots: Tensor, slots: Tensor, positions: Tensor, valid: Tensor) -> None:
    """Write each valid state to the snapshot row of its position.

    An invalid entry repeats the write of a valid one, same place and same bytes; where none is valid, it writes back
    what is there. So the shapes are fixed and no index list has to be read by the host.
    """
    if valid.numel() == 0:
        return
    rows = positions % ssm_snapshots.size(1)
    stand_in = valid.int().argmax()
    slots, rows = torch.where(valid, slots, slots[stand_in]), torch.where(valid, rows, rows[stand_in])
    mask = valid[:, None, None, None]
    values = torch.where(mask, states, states[stand_in]).to(ssm_snapshots.dtype)
    ssm_snapshots[slots, rows] = torch.where(valid.any(), values, ssm_snapshots[slots, rows])
