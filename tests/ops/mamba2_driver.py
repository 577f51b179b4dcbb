"""The driver of the protocol for ``ops.mamba2``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tests.cases import Mamba2Case
from tests.ops.driver import Driver, initial_dt_bias
from tests.oracle.mamba2 import Mamba2Sequence


class Window(NamedTuple):
    """A step's inputs on the CPU: x [b, S, H, P], dt [b, S, H], B and C [b, S, G, N]."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


def make_pools(case: Mamba2Case, num_slots: int, device: str) -> dict[str, Tensor]:
    """Allocate the state of all slots, every byte poisoned."""
    h, p, n, g, r = case.n_heads, case.head_dim, case.d_state, case.n_groups, case.ring_rows
    shapes = {
        "ssm_state": ((num_slots, h, p, n), case.state_dtype),
        "x_ring": ((num_slots, r, h, p), case.activation_dtype),
        "B_ring": ((num_slots, r, g, n), case.activation_dtype),
        "dt_ring": ((num_slots, r, h), torch.float32),
    }
    return {name: torch.full(shape, torch.nan, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


def make_weights(case: Mamba2Case, seed: int) -> dict[str, Tensor]:
    """Draw A, D and dt_bias as Mamba-2 is initialised: A in [-16, -1], softplus(dt_bias) in [0.001, 0.1]."""
    uniform = torch.rand(3, case.n_heads, generator=torch.Generator().manual_seed(seed))
    return {"A": -1 - 15 * uniform[1], "D": 2 * uniform[2] - 1, "dt_bias": initial_dt_bias(uniform[0])}


@dataclass
class Mamba2Driver(Driver):
    """Runs ``ops.mamba2`` on many slots and compares every step with the oracle."""

    case: Mamba2Case

    op_name: ClassVar[str] = "mamba2"
    rings: ClassVar[tuple[str, ...]] = ("x_ring", "B_ring", "dt_ring")

    def make_pools(self) -> dict[str, Tensor]:
        return make_pools(self.case, self.num_slots, self.device)

    def make_weights(self) -> dict[str, Tensor]:
        return make_weights(self.case, self.seed)

    def new_sequence(self) -> Mamba2Sequence:
        A, D, dt_bias = (self.weights[name].double().numpy() for name in ("A", "D", "dt_bias"))
        return Mamba2Sequence(A, D, dt_bias, self.case.head_dim, self.case.d_state)

    def make_window(self, num_tokens: Sequence[int], seq_len: int) -> Window:
        """Draw slices of packed projections, as in a model."""
        case, batch = self.case, len(num_tokens)
        d_inner, d_bc = case.n_heads * case.head_dim, case.n_groups * case.d_state
        packed = torch.randn(batch, seq_len, d_inner + 2 * d_bc, generator=self.generator)
        wide_dt = torch.randn(batch, seq_len, d_inner + case.n_heads, generator=self.generator)
        for row, n in enumerate(num_tokens):
            packed[row, n:] = torch.nan
            wide_dt[row, n:] = torch.nan
        x, B, C = torch.split(packed.to(case.activation_dtype), [d_inner, d_bc, d_bc], dim=-1)
        return Window(
            torch.unflatten(x, -1, (case.n_heads, case.head_dim)),
            wide_dt.to(case.dt_dtype)[..., d_inner:],
            torch.unflatten(B, -1, (case.n_groups, case.d_state)),
            torch.unflatten(C, -1, (case.n_groups, case.d_state)),
        )

    def like_output(self, window: Window) -> Tensor:
        return window.x
