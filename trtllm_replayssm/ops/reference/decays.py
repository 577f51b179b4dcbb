"""Decays between tokens, as exponents: *sums* of the per-token terms between two positions, never differences.

The terms are all <= 0, so a sum loses no digits however large the decay of other tokens was.
"""

import torch
from torch import Tensor
from torch.nn import functional


def sum_after(log_decay: Tensor) -> Tensor:
    """Return [b, J, H]: the sum over the rows i > j."""
    from_here = log_decay.flip(1).cumsum(1).flip(1)
    return functional.pad(from_here[:, 1:], (0, 0, 0, min(1, log_decay.size(1))))


def sum_between(log_decay: Tensor) -> Tensor:
    """Return [b, S, S, H]: at [t, j] the sum over tokens j < i <= t; 0 where there is none."""
    seq_len = log_decay.size(1)
    index = torch.arange(seq_len, device=log_decay.device)
    later = index[:, None] > index
    return torch.where(later[..., None], log_decay[:, :, None], 0.0).cumsum(1)


def window_decays(pending: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponents of what a window's tokens see: the state, and each row that may stand before them.

    Args:
        pending: [b, J, H], log decays of the rows between the state and the window.
        window: [b, S, H], log decays of the window's tokens.

    Returns:
        Since the state, [b, S, H]; since each pending row and window token, [b, S, J + S, H], 0 for later tokens.
    """
    since_window = window.cumsum(1)
    since_state = since_window + pending.sum(1, keepdim=True)
    since_pending = since_window[:, :, None] + sum_after(pending)[:, None]
    return since_state, torch.cat([since_pending, sum_between(window)], dim=2)
