"""Projections without bias."""

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """``x @ weight.T``; unlike torch's own it never fills its weight with random numbers.

    Args:
        n_in: width of the input.
        n_out: width of the output.
        dtype: of the weight.
    """

    def __init__(self, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project ``x [..., n_in]`` to [..., n_out]."""
        return functional.linear(x, self.weight)
