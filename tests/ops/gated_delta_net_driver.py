"""The driver of the protocol for ``ops.gated_delta_net``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tests.cases import GatedDeltaNetCase
from tests.ops.driver import Driver, initial_dt_bias
from tests.oracle.gated_delta_net import GatedDeltaNetSequence


class Window(NamedTuple):
    """A step's inputs on the CPU: q and k [b, S, Hk, K], v [b, S, Hv, V], a and b [b, S, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


@dataclass
class GatedDeltaNetDriver(Driver):
    """Runs ``ops.gated_delta_net`` on many slots and compares every step with the oracle."""

    case: GatedDeltaNetCase

    op_name: ClassVar[str] = "gated_delta_net"
    rings: ClassVar[tuple[str, ...]] = ("k_ring", "u_ring", "g_ring")
    saturating: ClassVar[tuple[str, ...]] = ("a", "b")

    def make_pools(self) -> dict[str, Tensor]:
        case, slots = self.case, self.num_slots
        rows, n_keys, n_values = case.ring_rows, case.n_key_heads, case.n_value_heads
        shapes = {
            "ssm_state": ((slots, n_values, case.key_dim, case.value_dim), case.state_dtype),
            "k_ring": ((slots, rows, n_keys, case.key_dim), case.activation_dtype),
            "u_ring": ((slots, rows, n_values, case.value_dim), torch.float32),
            "g_ring": ((slots, rows, n_values), torch.float32),
        }
        return {
            name: torch.full(shape, torch.nan, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    def make_weights(self) -> dict[str, Tensor]:
        uniform = torch.rand(2, self.case.n_value_heads, generator=torch.Generator().manual_seed(self.seed))
        return {"A_log": torch.log(0.01 + 16 * uniform[0]), "dt_bias": initial_dt_bias(uniform[1])}

    def new_sequence(self) -> GatedDeltaNetSequence:
        A_log, dt_bias = (self.weights[name].double().numpy() for name in ("A_log", "dt_bias"))
        return GatedDeltaNetSequence(A_log, dt_bias, self.case.key_dim, self.case.value_dim)

    def make_window(self, num_tokens: Sequence[int], seq_len: int) -> Window:
        """Draw slices of packed projections, as in a model."""
        case, batch = self.case, len(num_tokens)
        d_key, d_value = case.n_key_heads * case.key_dim, case.n_value_heads * case.value_dim
        qkv = torch.randn(batch, seq_len, 2 * d_key + d_value, generator=self.generator)
        ab = torch.randn(batch, seq_len, 2 * case.n_value_heads, generator=self.generator)
        for row, n in enumerate(num_tokens):
            qkv[row, n:] = torch.nan
            ab[row, n:] = torch.nan
        q, k, v = torch.split(qkv.to(case.activation_dtype), [d_key, d_key, d_value], dim=-1)
        a, b = torch.split(ab.to(case.gate_dtype), case.n_value_heads, dim=-1)
        return Window(
            torch.unflatten(q, -1, (case.n_key_heads, case.key_dim)),
            torch.unflatten(k, -1, (case.n_key_heads, case.key_dim)),
            torch.unflatten(v, -1, (case.n_value_heads, case.value_dim)),
            a,
            b,
        )

    def like_output(self, window: Window) -> Tensor:
        return window.v
