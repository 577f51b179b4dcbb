"""The causal depthwise convolution in front of a recurrence."""

import torch
from torch import nn

from trtllm_replayssm import ops
from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.step import Step


class CausalConv1d(nn.Module):
    """A short causal convolution per channel, followed by SiLU; earlier inputs come from a ring.

    Args:
        conv_dim: channels D.
        d_conv: taps K.
        dtype: of weight and bias.
    """

    def __init__(self, conv_dim: int, d_conv: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(conv_dim, d_conv, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(conv_dim, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor, conv_ring: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve ``x [B, S, D]``; ``conv_ring [slots, R_conv, D]`` is in-out. Returns (y [B, S, D], ring)."""
        if onnx_ops.is_exporting():
            return onnx_ops.causal_conv1d(x, self.weight, self.bias, conv_ring, step, activation="silu")
        y = ops.causal_conv1d(
            x,
            self.weight,
            self.bias,
            conv_ring,
            step.past_lengths,
            step.num_tokens,
            step.slot_ids,
            activation="silu",
        )
        return y, conv_ring
