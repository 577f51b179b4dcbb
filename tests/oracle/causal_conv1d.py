"""The causal depthwise convolution of one whole sequence, fp64: no state, no ring."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def causal_conv1d(x: Array, weight: Array, bias: Array, *, silu: bool) -> Array:
    """Convolve from position 0: x [S, D], weight [D, K] (last tap: newest token), bias [D]; return y [S, D]."""
    y = np.empty_like(x)
    d_conv = weight.shape[1]
    for t in range(len(x)):
        total = bias.copy()
        for age in range(min(d_conv, t + 1)):
            total += weight[:, d_conv - 1 - age] * x[t - age]
        y[t] = total / (1.0 + np.exp(-total)) if silu else total
    return y
