"""The causal depthwise convolution of a window, with its history in a ring of raw inputs."""

from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.errors import OpArgumentError
from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.reference import causal_conv1d as reference

_OP = "ops.causal_conv1d"

_TABLE = (
    checks.Argument("x", ("batch", "S", "D"), "activation"),
    checks.Argument("weight", ("D", "d_conv"), "activation"),
    checks.Argument("bias", ("D",), "activation", is_optional=True),
    checks.Argument("conv_ring", ("slots", "R_conv", "D"), "activation", is_written=True),
    *checks.per_row("past_lengths", "num_tokens", "slot_ids"),
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_ring: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    activation: Literal["silu"] | None = "silu",
) -> Tensor:
    """Convolve a window of every row with the row's history. In-out: conv_ring.

    ``y_t = act(bias + sum_k weight[:, k] x_{t - d_conv + 1 + k})``; inputs before position 0 are zero and never read.
    Token t of slot s stands in ``conv_ring[s, t mod R_conv]``. A window longer than the ring leaves its last R_conv
    inputs there. Rejecting tokens takes no action: their rows are overwritten.

    Args:
        x: [B, S, D] float32, float16 or bfloat16, raw inputs of the window; may be strided.
        weight: [D, d_conv], x's type; the last tap belongs to the newest token.
        bias: [D], x's type, or None.
        conv_ring: [slots, R_conv, D], x's type, in-out, R_conv >= d_conv (and d_conv - 1 + T to be able to reject).
        past_lengths: [B] int32, committed tokens c.
        num_tokens: [B] int32, window tokens n <= S, at positions c .. c+n-1.
        slot_ids: [B] int32; -1 marks a padding row: nothing is read or written for it.
        activation: "silu" or None.

    Returns:
        y, [B, S, D] of x's type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout; on the CPU also impossible lengths or slots. Nothing has
            been written then.

    Note:
        On the CPU computed in fp32 and rounded once.
    """
    tensors = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "conv_ring": conv_ring,
        "past_lengths": past_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_OP, _TABLE, tensors)
    if activation not in ("silu", None):
        raise OpArgumentError(f"{_OP}: activation: found {activation!r}; needed 'silu' or None.")
    checks.check_at_least(_OP, "weight's taps d_conv", size["d_conv"], 1, "the newest token's tap")
    least = protocol.min_conv_ring_rows(size["d_conv"], 0)
    checks.check_at_least(_OP, "conv_ring's rows R_conv", size["R_conv"], least, "d_conv - 1 + 1 + max_draft_len")
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    checks.check_counters(_OP, tensors, size)
    if x.is_cuda:
        from trtllm_replayssm.plugins import launch

        return launch.causal_conv1d(tensors, activation=activation)
    y = torch.zeros(x.shape, dtype=x.dtype)
    used = (slot_ids >= 0).nonzero().squeeze(1)
    past, num, slots = (t[used].long() for t in (past_lengths, num_tokens, slot_ids))
    y[used] = reference.causal_conv1d(x[used], weight, bias, conv_ring, past, num, slots, silu=activation == "silu").to(
        x.dtype
    )
    return y
