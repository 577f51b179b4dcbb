"""The MLPs: two matrices with a squared ReLU, or three with a SiLU gate."""

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.builders.layers.fused import fused
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import MlpGeometry


class Mlp(nn.Module):
    """``down(relu(up(x)) ** 2)``.

    Args:
        geometry: of the MLP.
        d_model: hidden width.
        dtype: of the weights.
    """

    num_states = 0

    def __init__(self, geometry: MlpGeometry, d_model: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(d_model, geometry.d_ff, dtype)
        self.down_proj = Linear(geometry.d_ff, d_model, dtype)

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Map ``hidden [B, S, d_model]`` to the same shape; there is no state."""
        del step, states
        return self.down_proj(squared_relu(self.up_proj(hidden))), ()


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix, the gate's rows first.

    Args:
        geometry: of the MLP.
        d_model: hidden width.
        dtype: of the weights.
    """

    num_states = 0

    def __init__(self, geometry: MlpGeometry, d_model: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(d_model, 2 * geometry.d_ff, dtype)
        self.down_proj = Linear(geometry.d_ff, d_model, dtype)

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Map ``hidden [B, S, d_model]`` to the same shape; there is no state."""
        del step, states
        return self.down_proj(gated_silu(self.gate_up_proj(hidden))), ()


@fused
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x) ** 2``."""
    return functional.relu(x).square()


@fused
def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``; the gate is the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
