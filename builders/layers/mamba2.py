"""The Mamba-2 mixer on checkpoint and rings."""

import torch
from torch import nn

from trtllm_replayssm import ops
from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.conv import CausalConv1d
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.norm import GatedGroupRMSNorm
from trtllm_replayssm.builders.layers.per_head import per_head
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import Mamba2Geometry, ReplayGeometry
from trtllm_replayssm.plugins.layouts import split_projection


class Mamba2(nn.Module):
    """in_proj -> convolution over x|B|C -> recurrence -> gated norm -> out_proj.

    States, in order: conv_ring, ssm_state, x_ring, b_ring, dt_ring.

    Args:
        geometry: of the mixer.
        d_model: hidden width.
        replay: history, window and state type.
        eps: of the gated norm.
        dtype: of activations and weights; A, D and dt_bias are fp32.
    """

    num_states = 5

    def __init__(
        self, geometry: Mamba2Geometry, d_model: int, replay: ReplayGeometry, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.replay = replay
        self.in_proj = Linear(d_model, geometry.d_in_proj, dtype)
        self.conv1d = CausalConv1d(geometry.conv_dim, geometry.d_conv, dtype)
        self.A = per_head(geometry.n_heads)
        self.D = per_head(geometry.n_heads)
        self.dt_bias = per_head(geometry.n_heads)
        self.norm = GatedGroupRMSNorm(geometry.d_inner, geometry.n_groups, eps, dtype)
        self.out_proj = Linear(geometry.d_inner, d_model, dtype)

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Mix ``hidden [B, S, d_model]``; ``states`` are in-out. Returns (hidden, present states)."""
        g = self.geometry
        z, xBC, dt = self.in_proj(hidden).split((g.d_inner, g.conv_dim, g.n_heads), dim=-1)
        y, present = self.mix(xBC, dt, step, states)
        return self.out_proj(self.norm(y.flatten(-2), z)), present

    def mix(
        self, xBC: torch.Tensor, dt: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the convolution and the state-space recurrence.

        Args:
            xBC: [B, S, conv_dim], raw: before the convolution.
            dt: [B, S, H], raw: before bias and softplus.
            step: lengths and slots.
            states: in-out, the layer's states.

        Returns:
            (y [B, S, H, P], present states).
        """
        if onnx_ops.is_exporting():
            convolution, constants = (self.conv1d.weight, self.conv1d.bias), (self.A, self.D, self.dt_bias)
            return onnx_ops.mamba2_with_conv(xBC, dt, convolution, constants, states, step, self.replay)
        conv_ring, ssm_state, x_ring, b_ring, dt_ring = states
        y = ops.mamba2_with_conv(
            xBC,
            dt,
            self.conv1d.weight,
            self.conv1d.bias,
            conv_ring,
            self.A,
            self.D,
            self.dt_bias,
            ssm_state,
            x_ring,
            b_ring,
            dt_ring,
            step.past_lengths,
            step.checkpoint_lengths,
            step.num_tokens,
            step.slot_ids,
            history=self.replay.history,
            max_draft_len=self.replay.max_draft_len,
        )
        return y, states


class ConventionalMamba2(Mamba2):
    """The same mixer with the state rewritten for every token: for comparison, never exported.

    States, in order: conv_ring, ssm_snapshots.
    """

    num_states = 2

    def mix(
        self, xBC: torch.Tensor, dt: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the recurrence on ``ssm_snapshots [slots, T + 1, H, P, N]``; see the base class."""
        assert not onnx_ops.is_exporting(), "the conventional decode exists for comparison in torch alone"
        conv_ring, ssm_snapshots = states
        convolved, _ = self.conv1d(xBC, conv_ring, step)
        g = self.geometry
        # Views: nothing is copied.
        x, B, C = split_projection(
            convolved, n_heads=g.n_heads, head_dim=g.head_dim, n_groups=g.n_groups, d_state=g.d_state
        )
        y = ops.mamba2_conventional(
            x,
            dt,
            B,
            C,
            self.A,
            self.D,
            self.dt_bias,
            ssm_snapshots,
            step.past_lengths,
            step.num_tokens,
            step.slot_ids,
            max_draft_len=self.replay.max_draft_len,
        )
        return y, states
