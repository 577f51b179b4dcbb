"""Mamba-2 as decoders usually run it: the state is rewritten for every token. For comparison with replay.

With speculation a snapshot of the state is kept per window token (``snapshots``), so that a rejection can go back to
one of them.
"""

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops.reference import snapshots
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
    state = snapshots.load(ssm_snapshots, past_lengths, slots)
    if protocol.is_prefill(seq_len, max_draft_len):
        y, state = scan(state, tokens, C, A)
        snapshots.store(state, ssm_snapshots, slots, past_lengths + num_tokens, num_tokens > 0)
    else:
        y, states = _step_by_token(state, tokens, C, A)
        snapshots.store_window(states, ssm_snapshots, slots, past_lengths, num_tokens)
    return add_skip(y, tokens, weights.D, num_tokens)


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
