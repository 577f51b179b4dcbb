"""Gated DeltaNet of one sequence, token by token in fp64.

``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``; q and k are divided by the root of their sum of
squares plus 1e-6; ``S <- exp(g) S``, ``u = beta (v - S^T k)``, ``S <- S + k u^T``, ``o = K^-1/2 S^T q``; value head h
uses key head h // (Hv / Hk).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softplus(raw: Array) -> Array:
    """log(1 + exp(raw)) without overflow; the exact function, no threshold."""
    return np.logaddexp(0.0, raw)


def sigmoid(raw: Array) -> Array:
    """1 / (1 + exp(-raw)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -raw))


def unit(vector: Array) -> Array:
    """The vector at length 1, unless it is short against 1e-3."""
    return vector / np.sqrt(vector @ vector + 1e-6)


@dataclass
class GatedDeltaNetSequence:
    """The state of one sequence.

    Attributes:
        A_log: [Hv].
        dt_bias: [Hv].
        key_dim: K.
        value_dim: V.
        state: [Hv, K, V] after all tokens so far.
    """

    A_log: Array
    dt_bias: Array
    key_dim: int
    value_dim: int
    state: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if self.state.size == 0:
            self.state = np.zeros((len(self.A_log), self.key_dim, self.value_dim))

    def copy(self) -> "GatedDeltaNetSequence":
        """A sequence that goes on from here on its own."""
        return GatedDeltaNetSequence(self.A_log, self.dt_bias, self.key_dim, self.value_dim, self.state.copy())

    def step(self, q: Array, k: Array, v: Array, a: Array, b: Array) -> Array:
        """Take one token: q and k [Hk, K], v [Hv, V], raw a and b [Hv]; return o [Hv, V]."""
        o = np.empty((len(self.A_log), self.value_dim))
        heads_per_key = len(self.A_log) // len(k)
        decay = np.exp(-np.exp(self.A_log) * softplus(a + self.dt_bias))
        beta = sigmoid(b)
        for h in range(len(self.A_log)):
            query, key = unit(q[h // heads_per_key]), unit(k[h // heads_per_key])
            decayed = decay[h] * self.state[h]
            self.state[h] = decayed + np.outer(key, beta[h] * (v[h] - key @ decayed))
            o[h] = query @ self.state[h] / np.sqrt(self.key_dim)
        return o

    def run(self, q: Array, k: Array, v: Array, a: Array, b: Array) -> Array:
        """Take the tokens of the leading axis one by one; return o [S, Hv, V]."""
        outputs = [self.step(*token) for token in zip(q, k, v, a, b, strict=True)]
        return np.stack(outputs) if outputs else np.zeros((0, len(self.A_log), self.value_dim))
