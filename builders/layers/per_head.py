"""The constants of a recurrence: one fp32 number per head."""

import torch
from torch import nn


def per_head(n_heads: int) -> nn.Parameter:
    """Return [n_heads], fp32 whatever the activations' type, for the checkpoint to fill."""
    return nn.Parameter(torch.empty(n_heads, dtype=torch.float32), requires_grad=False)
