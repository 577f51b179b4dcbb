"""The causal depthwise convolution over a ring of raw inputs, in plain torch: the specification of the CUDA kernels."""

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_ring: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slots: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """Convolve a window with its history, then keep the window's inputs; see ``ops.causal_conv1d``.

    ``conv_ring`` is written in place. All rows have a slot; arguments have been checked; counters are int64 [b].

    Returns:
        y, [b, S, D] in fp32; zero at tokens s >= num_tokens.
    """
    seq_len, d_conv = x.size(1), weight.size(1)
    valid = torch.arange(seq_len, device=x.device) < num_tokens[:, None]
    inputs = torch.cat([_load_history(conv_ring, past_lengths, slots, d_conv - 1), x.float()], dim=1)
    taps = weight.float()
    y = inputs[:, :seq_len] * taps[:, 0]
    for k in range(1, d_conv):
        y = y + inputs[:, k : k + seq_len] * taps[:, k]
    if bias is not None:
        y = y + bias.float()
    _store_window(x, valid, conv_ring, past_lengths, num_tokens, slots)
    return torch.where(valid[..., None], functional.silu(y) if silu else y, 0.0)


def _load_history(conv_ring: Tensor, past_lengths: Tensor, slots: Tensor, num_rows: int) -> Tensor:
    """Return the inputs of tokens [c - num_rows, c) in fp32, [b, num_rows, D]; zero before position 0."""
    positions = past_lengths[:, None] + torch.arange(-num_rows, 0, device=slots.device)
    rows = conv_ring[slots[:, None], positions % conv_ring.size(1)].float()
    return torch.where((positions >= 0)[..., None], rows, 0.0)


def _store_window(
    x: Tensor, valid: Tensor, conv_ring: Tensor, past_lengths: Tensor, num_tokens: Tensor, slots: Tensor
) -> None:
    """Write the window's inputs to their ring rows; of a window longer than the ring, its last rows."""
    ring_rows = conv_ring.size(1)
    token = torch.arange(x.size(1), device=x.device)
    row, token = (valid & (token >= num_tokens[:, None] - ring_rows)).nonzero(as_tuple=True)
    conv_ring[slots[row], (past_lengths[row] + token) % ring_rows] = x[row, token]
