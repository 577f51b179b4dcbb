"""The CUDA sources of the causal convolution, run on the CPU, against the fp64 oracle; no GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests import tolerances
from tests.cases import DTYPES
from tests.kernels.emulation import Emulator
from tests.ops.driver import bits, int32, relative_error
from tests.oracle import causal_conv1d as oracle
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.specializations import Role

# None: as launched, with the one-token step for windows of one.
by_role = pytest.mark.parametrize("role", ["step", "prefill", None])


@dataclass
class Sequences:
    """Two slots fed window by window through the kernel, and what they have been fed."""

    emulator: Emulator
    conv_dim: int
    d_conv: int
    dtype: str
    ring_rows: int
    activation: str | None = "silu"
    has_bias: bool = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.conv_dim)
        dtype = DTYPES[self.dtype]
        self.weight = torch.randn(self.conv_dim, self.d_conv, generator=self.generator).to(dtype)
        self.bias = torch.randn(self.conv_dim, generator=self.generator).to(dtype) if self.has_bias else None
        # Two slots with a gap between them; slot 1 holds the sequence, slot 0 must stay as it is.
        self.base = torch.full((3, self.ring_rows * self.conv_dim + 32), torch.nan, dtype=dtype)
        self.ring = self.base[:, : self.ring_rows * self.conv_dim].view(3, self.ring_rows, self.conv_dim)
        self.committed = torch.zeros(0, self.conv_dim, dtype=dtype)

    def run(self, num_tokens: int, accepted: int, seq_len: int) -> float:
        """Run a window of slot 1 beside a padding row; return the error of y and commit."""
        window = torch.full((2, seq_len, self.conv_dim + 3), torch.nan, dtype=self.committed.dtype)
        window[1, :num_tokens] = torch.randn(num_tokens, self.conv_dim + 3, generator=self.generator)
        # Channels from the first or from the third on: the vector path of aligned inputs and the other one.
        x = window[..., : self.conv_dim] if accepted % 2 else window[..., 3:]
        x = x.clone() if accepted % 3 == 0 else x
        before = bits(self.base)
        y = self.emulator.causal_conv1d(
            x=x,
            weight=self.weight,
            bias=self.bias,
            conv_ring=self.ring,
            past_lengths=int32([-9, len(self.committed)]),
            num_tokens=int32([seq_len, num_tokens]),
            slot_ids=int32([-1, 1]),
            activation=self.activation,
        )
        self._check_ring(before, x[1], num_tokens)
        assert (bits(y[0]) == 0).all() and (bits(y[1, num_tokens:]) == 0).all()
        fed = torch.cat([self.committed, x[1, :num_tokens]])
        expected = oracle.causal_conv1d(
            fed.double().numpy(),
            self.weight.double().numpy(),
            (torch.zeros(self.conv_dim) if self.bias is None else self.bias).double().numpy(),
            silu=self.activation == "silu",
        )[len(self.committed) :]
        self.committed = fed[: len(self.committed) + accepted]
        return relative_error(y[1, :num_tokens], expected)

    def _check_ring(self, before: Tensor, x: Tensor, num_tokens: int) -> None:
        """The window's last rows are x bit by bit; everything else is as before."""
        expected = before.clone()
        rows = expected[:, : self.ring_rows * self.conv_dim].view(self.ring.shape)
        for token in range(max(0, num_tokens - self.ring_rows), num_tokens):
            rows[1, (len(self.committed) + token) % self.ring_rows] = bits(x[token])
        assert torch.equal(bits(self.base), expected)


@by_role
@pytest.mark.parametrize(
    ("conv_dim", "d_conv", "dtype", "activation", "has_bias"),
    [
        (1032, 4, "bfloat16", "silu", True),
        (20, 2, "float16", None, True),
        (7, 3, "float32", "silu", False),
    ],
)
def test_any_windows_give_the_convolution_of_the_whole_sequence(
    role: Role | None, conv_dim: int, d_conv: int, dtype: str, activation: str | None, has_bias: bool
) -> None:
    sequences = Sequences(Emulator(role), conv_dim, d_conv, dtype, d_conv + 4, activation, has_bias)
    # Windows shorter than the kernel, rejected, empty, as long as the ring, longer, and over several tiles.
    windows = [(1, 1, 1), (3, 2, 5), (0, 0, 2), (5, 0, 5), (2, 1, 2), (d_conv + 4, 4, 9), (40, 40, 41), (4, 3, 4)]
    windows += [(150, 149, 150), (1, 1, 1), (5, 5, 5), (1, 0, 1), (0, 0, 1), (1, 1, 1)]
    bound = tolerances.CAUSAL_CONV1D["cpu", dtype].output
    for window in windows:
        assert sequences.run(*window) <= bound, f"window {window}"


def test_both_roles_and_any_order_of_threads_give_the_same_bits() -> None:
    results = []
    for emulator in (Emulator(), Emulator("step"), Emulator("prefill"), Emulator("prefill", is_descending=True)):
        sequences = Sequences(emulator, 264, 4, "bfloat16", 8)
        for window in ((3, 3, 3), (1, 1, 1), (70, 69, 70), (1, 1, 1), (2, 2, 2)):
            sequences.run(*window)
        results.append(bits(sequences.base))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("seq_len", [1, 2, 4, 9])
def test_every_row_is_run_and_none_beyond_the_last(num_rows: int, seq_len: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, ring = (torch.randn(n, s, 264, generator=generator) for n, s in ((num_rows, seq_len), (9, 4 + seq_len)))
    weight, bias = torch.randn(264, 4, generator=generator), torch.randn(264, generator=generator)
    rows = {
        "past_lengths": int32([5 * row for row in range(num_rows)]),
        "num_tokens": int32([max(seq_len - row, 0) for row in range(num_rows)]),
        "slot_ids": int32([8 - row if row != 1 else -1 for row in range(num_rows)]),
    }
    results = []
    for run in (Emulator().causal_conv1d, ops.causal_conv1d):
        own_ring = ring.clone()
        y = run(x=x, weight=weight, bias=bias, conv_ring=own_ring, **rows, activation="silu")
        results.append((y, own_ring))
    (found, found_ring), (expected, expected_ring) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(bits(found_ring), bits(expected_ring))
