"""The causal convolution and Mamba-2 behind it as one op: on devices that have the kernel, one launch of a step."""

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.causal_conv1d import causal_conv1d
from trtllm_replayssm.ops.mamba2 import POOL_TABLE, WEIGHT_TABLE, mamba2
from trtllm_replayssm.plugins.layouts import split_projection

_OP = "ops.mamba2_with_conv"

_TABLE = (
    checks.Argument("xBC", ("batch", "S", "conv_dim"), "activation"),
    checks.Argument("dt", ("batch", "S", "H"), "activation or float32"),
    checks.Argument("conv_weight", ("conv_dim", "d_conv"), "activation"),
    checks.Argument("conv_bias", ("conv_dim",), "activation", is_optional=True),
    checks.Argument("conv_ring", ("slots", "R_conv", "conv_dim"), "activation", is_written=True),
    *WEIGHT_TABLE,
    *POOL_TABLE,
    *checks.per_row("past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids"),
)


def mamba2_with_conv(
    xBC: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_ring: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    x_ring: Tensor,
    B_ring: Tensor,
    dt_ring: Tensor,
    past_lengths: Tensor,
    checkpoint_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    history: int,
    max_draft_len: int,
) -> Tensor:
    """Run ``causal_conv1d`` with SiLU, then ``mamba2`` on what it made. In-out: conv_ring and the pools of ``mamba2``.

    Bit by bit what the two ops give. The heads H of P channels and the groups G of N columns are those of the pools.

    Args:
        xBC: [B, S, H P + 2 G N], raw: x, B and C side by side, as ``in_proj`` makes them; may be strided.
        dt: [B, S, H], xBC's type or float32; raw, before bias and softplus.
        conv_weight: [H P + 2 G N, d_conv], xBC's type; the last tap belongs to the newest token.
        conv_bias: [H P + 2 G N], xBC's type, or None.
        conv_ring: [slots, R_conv, H P + 2 G N], xBC's type, in-out, R_conv >= d_conv - 1 + T.
        A: [H] float32, negative.
        D: [H] float32.
        dt_bias: [H] float32.
        ssm_state: [slots, H, P, N] float32, float16 or bfloat16, in-out: the checkpoints.
        x_ring: [slots, R, H, P], xBC's type, in-out; x after the convolution.
        B_ring: [slots, R, G, N], xBC's type, in-out; B after the convolution.
        dt_ring: [slots, R, H] float32, in-out; after softplus.
        past_lengths: [B] int32, committed tokens c.
        checkpoint_lengths: [B] int32, folded tokens f, f <= c.
        num_tokens: [B] int32, window tokens n <= S, at positions c .. c+n-1.
        slot_ids: [B] int32; -1 marks a padding row: nothing is read or written for it.
        history: most pending rows W >= T.
        max_draft_len: most draft tokens of a window, T - 1; R >= W + T.

    Returns:
        y, [B, S, H, P] of xBC's type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout, W < T, too few ring rows; on the CPU also impossible
            lengths or slots. Nothing has been written then.
        UnsupportedError: no kernel for these shapes on CUDA.
    """
    tensors = {
        "xBC": xBC,
        "dt": dt,
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "conv_ring": conv_ring,
        "A": A,
        "D": D,
        "dt_bias": dt_bias,
        "ssm_state": ssm_state,
        "x_ring": x_ring,
        "B_ring": B_ring,
        "dt_ring": dt_ring,
        "past_lengths": past_lengths,
        "checkpoint_lengths": checkpoint_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_OP, _TABLE, tensors)
    _check_sizes(size, history, max_draft_len)
    if xBC.is_meta:
        return torch.empty((*xBC.shape[:2], *x_ring.shape[2:]), dtype=xBC.dtype, device="meta")
    checks.check_counters(_OP, tensors, size, history=history)
    if xBC.is_cuda:
        from trtllm_replayssm.plugins import launch_with_conv

        return launch_with_conv.mamba2_with_conv(tensors, history=history, max_draft_len=max_draft_len)
    convolved = causal_conv1d(xBC, conv_weight, conv_bias, conv_ring, past_lengths, num_tokens, slot_ids)
    x, B, C = split_projection(convolved, n_heads=size["H"], head_dim=size["P"], n_groups=size["G"], d_state=size["N"])
    return mamba2(
        x,
        dt,
        B,
        C,
        A,
        D,
        dt_bias,
        ssm_state,
        x_ring,
        B_ring,
        dt_ring,
        past_lengths,
        checkpoint_lengths,
        num_tokens,
        slot_ids,
        history=history,
        max_draft_len=max_draft_len,
    )


def _check_sizes(size: dict[str, int], history: int, max_draft_len: int) -> None:
    checks.check_multiple(_OP, "the heads H", size["H"], size["G"], "the groups G of B_ring")
    checks.check_equal(
        _OP, "xBC's channels", size["conv_dim"], size["H"] * size["P"] + 2 * size["G"] * size["N"], "H P + 2 G N"
    )
    checks.check_at_least(_OP, "conv_weight's taps d_conv", size["d_conv"], 1, "the newest token's tap")
    checks.check_ring(_OP, "x_ring, B_ring and dt_ring", size["R"], history=history, max_draft_len=max_draft_len)
    least = protocol.min_conv_ring_rows(size["d_conv"], max_draft_len)
    checks.check_at_least(_OP, "conv_ring's rows R_conv", size["R_conv"], least, "d_conv - 1 + 1 + max_draft_len")
