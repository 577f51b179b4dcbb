"""The Gated DeltaNet mixer on checkpoint and rings."""

import torch
from torch import nn

from trtllm_replayssm import ops
from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.conv import CausalConv1d
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.norm import GatedRMSNorm
from trtllm_replayssm.builders.layers.per_head import per_head
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import GatedDeltaNetGeometry, ReplayGeometry


class GatedDeltaNet(nn.Module):
    """in_proj -> convolution over q|k|v -> recurrence -> norm of every head, gate -> out_proj.

    States, in order: conv_ring, ssm_state, k_ring, u_ring, g_ring.

    Args:
        geometry: of the mixer.
        d_model: hidden width.
        replay: history, window and state type.
        eps: of the gated norm.
        dtype: of activations and weights; A_log and dt_bias are fp32.
    """

    num_states = 5

    def __init__(
        self, geometry: GatedDeltaNetGeometry, d_model: int, replay: ReplayGeometry, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.replay = replay
        self.in_proj = Linear(d_model, geometry.d_in_proj, dtype)
        self.conv1d = CausalConv1d(geometry.conv_dim, geometry.d_conv, dtype)
        self.A_log = per_head(geometry.n_value_heads)
        self.dt_bias = per_head(geometry.n_value_heads)
        self.norm = GatedRMSNorm(geometry.value_dim, eps, dtype)
        self.out_proj = Linear(geometry.d_value, d_model, dtype)

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Mix ``hidden [B, S, d_model]``; ``states`` are in-out. Returns (hidden, present states)."""
        g = self.geometry
        widths = (g.conv_dim, g.d_value, g.n_value_heads, g.n_value_heads)
        qkv, z, b, a = self.in_proj(hidden).split(widths, dim=-1)
        qkv, conv_ring = self.conv1d(qkv, states[0], step)
        # Views into the convolution's output: the kernels take strides, nothing is copied.
        q, k, v = qkv.split((g.d_key, g.d_key, g.d_value), dim=-1)
        q, k = (torch.unflatten(x, -1, (g.n_key_heads, g.key_dim)) for x in (q, k))
        v, z = (torch.unflatten(x, -1, (g.n_value_heads, g.value_dim)) for x in (v, z))
        o, recurrent = self.recurrence(q, k, v, a, b, step, states[1:])
        return self.out_proj(self.norm(o, z).flatten(-2)), (conv_ring, *recurrent)

    def recurrence(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        step: Step,
        states: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the gated delta rule.

        Args:
            q: [B, S, Hk, K], raw: before normalisation and scale.
            k: [B, S, Hk, K], raw.
            v: [B, S, Hv, V].
            a: [B, S, Hv], raw: before bias and softplus.
            b: [B, S, Hv], raw: before the sigmoid.
            step: lengths and slots.
            states: in-out, the layer's states without the convolution ring.

        Returns:
            (o [B, S, Hv, V], present states).
        """
        if onnx_ops.is_exporting():
            return onnx_ops.gated_delta_net((q, k, v, a, b), (self.A_log, self.dt_bias), states, step, self.replay)
        ssm_state, k_ring, u_ring, g_ring = states
        o = ops.gated_delta_net(
            q,
            k,
            v,
            a,
            b,
            self.A_log,
            self.dt_bias,
            ssm_state,
            k_ring,
            u_ring,
            g_ring,
            step.past_lengths,
            step.checkpoint_lengths,
            step.num_tokens,
            step.slot_ids,
            history=self.replay.history,
            max_draft_len=self.replay.max_draft_len,
        )
        return o, states


class ConventionalGatedDeltaNet(GatedDeltaNet):
    """The same mixer with the state rewritten for every token: for comparison, never exported.

    States, in order: conv_ring, ssm_snapshots.
    """

    num_states = 2

    def recurrence(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        step: Step,
        states: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the gated delta rule on ``ssm_snapshots [slots, T + 1, Hv, K, V]``; see the base class."""
        assert not onnx_ops.is_exporting(), "the conventional decode exists for comparison in torch alone"
        (ssm_snapshots,) = states
        o = ops.gated_delta_net_conventional(
            q,
            k,
            v,
            a,
            b,
            self.A_log,
            self.dt_bias,
            ssm_snapshots,
            step.past_lengths,
            step.num_tokens,
            step.slot_ids,
            max_draft_len=self.replay.max_draft_len,
        )
        return o, states
