"""Mamba-2 of one sequence, token by token in fp64.

``dt_t = softplus(raw_t + dt_bias)``, ``S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T``, ``y_t = S_t C_t + D x_t``; head h
uses group h // (H / G) of B and C.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softplus(raw: Array) -> Array:
    """log(1 + exp(raw)) without overflow; the exact function, no threshold."""
    return np.maximum(raw, 0.0) + np.log1p(np.exp(-np.abs(raw)))


@dataclass
class Mamba2Sequence:
    """The state of one sequence.

    Attributes:
        A: [H], negative.
        D: [H].
        dt_bias: [H].
        head_dim: P.
        d_state: N.
        state: [H, P, N] after all tokens so far.
    """

    A: Array
    D: Array
    dt_bias: Array
    head_dim: int
    d_state: int
    state: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if self.state.size == 0:
            self.state = np.zeros((len(self.A), self.head_dim, self.d_state))

    def copy(self) -> "Mamba2Sequence":
        """A sequence that goes on from here on its own."""
        return Mamba2Sequence(self.A, self.D, self.dt_bias, self.head_dim, self.d_state, self.state.copy())

    def step(self, x: Array, dt: Array, B: Array, C: Array) -> Array:
        """Take one token: x [H, P], raw dt [H], B and C [G, N]; return y [H, P]."""
        y = np.empty((len(self.A), self.head_dim))
        heads_per_group = len(self.A) // len(B)
        step_size = softplus(dt + self.dt_bias)
        for h in range(len(self.A)):
            group = h // heads_per_group
            self.state[h] = np.exp(self.A[h] * step_size[h]) * self.state[h] + np.outer(step_size[h] * x[h], B[group])
            y[h] = self.state[h] @ C[group] + self.D[h] * x[h]
        return y

    def run(self, x: Array, dt: Array, B: Array, C: Array) -> Array:
        """Take the tokens of the leading axis one by one; return y [S, H, P]."""
        outputs = [self.step(*token) for token in zip(x, dt, B, C, strict=True)]
        return np.stack(outputs) if outputs else np.zeros((0, len(self.A), self.head_dim))
