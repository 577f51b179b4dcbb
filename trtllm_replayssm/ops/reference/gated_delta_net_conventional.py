"""Gated DeltaNet as decoders usually run it: the state is rewritten for every token. For comparison with replay.

With speculation a snapshot of the state is kept per window token (``snapshots``), so that a rejection can go back to
one of them.
"""

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops.reference import snapshots
from trtllm_replayssm.ops.reference.gated_delta_net import Inputs, Weights, Window, load_window, mask_outputs, scan


@torch.no_grad()
def gated_delta_net_conventional(
    inputs: Inputs,
    weights: Weights,
    ssm_snapshots: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    max_draft_len: int,
) -> Tensor:
    """Run one step, or a prefill when the window is longer than T; see ``ops.gated_delta_net_conventional``.

    ``ssm_snapshots`` is written in place. Arguments have been checked; counters are int64 [b].

    Returns:
        o, [b, S, H, V] in fp32; zero in padding rows and at tokens s >= num_tokens.
    """
    num_tokens = torch.where(slot_ids >= 0, num_tokens, 0)
    slots = slot_ids.clamp(min=0)
    window = load_window(inputs, weights, num_tokens)
    state = snapshots.load(ssm_snapshots, past_lengths, slots)
    if protocol.is_prefill(inputs.q.size(1), max_draft_len):
        o, state = scan(state, window)
        snapshots.store(state, ssm_snapshots, slots, past_lengths + num_tokens, num_tokens > 0)
    else:
        o, states = _step_by_token(state, window)
        snapshots.store_window(states, ssm_snapshots, slots, past_lengths, num_tokens)
    return mask_outputs(o, num_tokens)


def _step_by_token(state: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Run the recurrence; return o, [b, S, H, V], and the state after each token, [b, S, H, K, V]."""
    outputs, states = [window.v[:, :0]], [state[:, None][:, :0]]
    for q, k, v, g, beta in zip(*(part.unbind(1) for part in window), strict=True):
        state = g.exp()[..., None, None] * state
        u = beta[..., None] * (v - (state * k[..., None]).sum(-2))
        state = state + k[..., None] * u[..., None, :]
        outputs.append((state * q[..., None]).sum(-2)[:, None])
        states.append(state[:, None])
    return torch.cat(outputs, dim=1), torch.cat(states, dim=1)
