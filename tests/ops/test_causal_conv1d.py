"""``ops.causal_conv1d`` against the oracle: rings, wraps, rejections, long windows; on the CPU and on CUDA."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import tolerances
from tests.cases import CONV_DEVICE_CASES, DTYPES
from tests.ops.driver import POISON, Row, bits, int32, random_row, relative_error
from tests.ops.strategies import all_types, bounded, seeds
from tests.oracle.causal_conv1d import causal_conv1d as oracle
from trtllm_replayssm import ops

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@dataclass
class ConvDriver:
    """Runs ``ops.causal_conv1d`` on many slots and compares every step with the oracle of the accepted inputs."""

    channels: int
    d_conv: int
    ring_rows: int
    dtype: str = "float32"
    device: str = "cpu"
    num_slots: int = 4
    seed: int = 0
    silu: bool = True
    has_bias: bool = True
    error: float = 0.0
    ring: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.weight = self.random(self.channels, self.d_conv)
        self.bias = self.random(self.channels)
        self.oracle_weight = self.weight
        if self.ring.numel() == 0:
            self.ring = torch.empty(self.num_slots, self.ring_rows, self.channels, dtype=DTYPES[self.dtype]).to(
                self.device
            )
        self.ring.fill_(torch.nan)
        self.accepted = [self.random(0, self.channels) for _ in range(self.num_slots)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DTYPES[self.dtype])

    def poison_unused(self) -> None:
        for slot, inputs in enumerate(self.accepted):
            c = len(inputs)
            live = {t % self.ring_rows for t in range(max(0, c - self.d_conv + 1), c)}
            for row in set(range(self.ring_rows)) - live:
                self.ring[slot, row] = POISON[row % len(POISON)]

    def run(self, rows: list[Row], seq_len: int) -> Tensor:
        wide = self.random(len(rows), seq_len, self.channels + 8)
        for index, row in enumerate(rows):
            wide[index, row.num_tokens if row.slot >= 0 else 0 :] = torch.nan
        x = wide.to(self.device)[..., 8:]
        before = bits(self.ring)
        y = ops.causal_conv1d(
            x,
            self.weight.to(self.device),
            self.bias.to(self.device) if self.has_bias else None,
            self.ring,
            int32([len(self.accepted[r.slot]) if r.slot >= 0 else -3 for r in rows], self.device),
            int32([r.num_tokens for r in rows], self.device),
            int32([r.slot for r in rows], self.device),
            activation="silu" if self.silu else None,
        ).cpu()
        self._check_ring(before, rows)
        for index, row in enumerate(rows):
            used = row.num_tokens if row.slot >= 0 else 0
            assert (bits(y[index, used:]) == 0).all()
            if row.slot >= 0:
                self._check_row(y[index, :used], wide[index, :used, 8:], row)
        return y

    def _check_row(self, y: Tensor, inputs: Tensor, row: Row) -> None:
        # Of a long sequence only the last d_conv - 1 inputs matter; a short one starts at position 0.
        history = self.accepted[row.slot][-(self.d_conv - 1) :] if self.d_conv > 1 else self.accepted[row.slot][:0]
        bias = self.bias if self.has_bias else torch.zeros_like(self.bias)
        whole = torch.cat([history, inputs]).double().numpy()
        expected = oracle(whole, self.oracle_weight.double().numpy(), bias.double().numpy(), silu=self.silu)
        self.error = max(self.error, relative_error(y, expected[len(history) :]))
        self.accepted[row.slot] = torch.cat([self.accepted[row.slot], inputs[: row.accepted]])

    def _check_ring(self, before: Tensor, rows: list[Row]) -> None:
        may_change = torch.zeros(self.num_slots, self.ring_rows, dtype=torch.bool)
        for slot, n, _ in rows:
            if slot >= 0:
                may_change[slot, [(len(self.accepted[slot]) + t) % self.ring_rows for t in range(n)]] = True
        changed = (bits(self.ring) != before).any(-1)
        assert not (changed & ~may_change).any(), "bytes changed that belong to no window"

    def assert_within_bound(self) -> None:
        bound = tolerances.CAUSAL_CONV1D[self.device, self.dtype]
        assert self.error <= bound.output, f"error {self.error:.2e}; {bound}"


def drive(driver: ConvDriver, num_steps: int, window: int) -> None:
    """Random steps of up to ``window`` tokens, any acceptance, and prefills, which are accepted whole."""
    rng = driver.rng
    for _ in range(num_steps):
        if rng.random() < 0.3:
            driver.poison_unused()
        if rng.random() < 0.03:
            driver.accepted[int(rng.integers(driver.num_slots))] = driver.random(0, driver.channels)
        is_prefill = rng.random() < 0.1
        seq_len = int(rng.integers(1, 3 * driver.ring_rows + 2)) if is_prefill else int(rng.integers(1, window + 1))
        slots = rng.permutation(driver.num_slots)[: rng.integers(1, driver.num_slots + 1)].tolist()
        rows = [random_row(rng, slot, seq_len, "all" if is_prefill else "random") for slot in slots]
        rows.insert(int(rng.integers(0, len(rows) + 1)), Row(-1, seq_len, 0))
        driver.run(rows, seq_len)
    driver.assert_within_bound()


@bounded(60)
@given(
    channels=st.sampled_from((1, 3, 16, 40)),
    d_conv=st.integers(1, 6),
    window=st.integers(1, 8),
    spare=st.sampled_from((0, 0, 1, 5)),
    dtype=st.sampled_from(all_types),
    silu=st.booleans(),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_any_shape_and_any_acceptance_follows_the_convolution_of_the_accepted_sequence(
    channels: int, d_conv: int, window: int, spare: int, dtype: str, silu: bool, has_bias: bool, seed: int
) -> None:
    rows = d_conv - 1 + window + spare
    drive(ConvDriver(channels, d_conv, rows, dtype, seed=seed, silu=silu, has_bias=has_bias), 30, window)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize(("channels", "d_conv", "dtype"), CONV_DEVICE_CASES)
def test_shapes_of_real_models_follow_the_convolution(
    channels: int, d_conv: int, dtype: str, window: int, device: str
) -> None:
    drive(ConvDriver(channels, d_conv, d_conv - 1 + window, dtype, device, seed=window), 150, window)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("channels", "d_conv", "dtype"), CONV_DEVICE_CASES)
def test_rejected_inputs_leave_no_trace(channels: int, d_conv: int, dtype: str, device: str) -> None:
    drafting, plain = (ConvDriver(channels, d_conv, d_conv + 4, dtype, device, seed=3) for _ in range(2))
    for step in range(30):
        kept = 1 + step % 5
        y_drafting, y_plain = (d.run([Row(2, n, kept)], 5) for d, n in ((drafting, 5), (plain, kept)))
        assert torch.equal(bits(y_drafting[:, :kept]), bits(y_plain[:, :kept]))
        c = len(plain.accepted[2])
        live = [t % plain.ring_rows for t in range(max(0, c - d_conv + 1), c)]
        assert torch.equal(bits(drafting.ring[2, live]), bits(plain.ring[2, live]))


def test_a_window_longer_than_the_ring_keeps_its_last_inputs() -> None:
    driver = ConvDriver(8, 4, 5, num_slots=1)
    driver.run([Row(0, 23, 23)], 30)
    for t in range(23 - 5, 23):
        assert torch.equal(driver.ring[0, t % 5], driver.accepted[0][t])
    driver.run([Row(0, 12, 12)], 12)
    driver.assert_within_bound()


def test_a_ring_of_any_strides_is_written_in_place() -> None:
    base = torch.full((17, 15, 9), 7.0)
    ring = base[1::2, 1::2, 1::2].permute(2, 1, 0)  # [4 slots, 7 rows, 8 channels], innermost dimension outermost
    driver = ConvDriver(8, 4, 7, ring=ring)
    drive(driver, 60, window=4)
    gaps = torch.ones(base.shape, dtype=torch.bool)
    gaps[1::2, 1::2, 1::2] = False
    assert (base[gaps] == 7.0).all() and not torch.isnan(ring[:, 0]).all()


def test_a_stale_row_shows_in_the_outputs() -> None:
    driver = ConvDriver(16, 4, 8, num_slots=1)
    driver.run([Row(0, 6, 6)], 6)
    driver.assert_within_bound()
    driver.ring[0, 5] = driver.ring[0, 1]
    driver.run([Row(0, 2, 2)], 4)
    assert driver.error > tolerances.TOOTH * tolerances.CAUSAL_CONV1D["cpu", "float32"].output


def test_taps_in_reverse_order_show_in_the_outputs() -> None:
    driver = ConvDriver(16, 4, 8, num_slots=1)
    driver.run([Row(0, 6, 6)], 6)
    driver.assert_within_bound()
    driver.oracle_weight = driver.weight.flip(1)
    driver.run([Row(0, 2, 2)], 4)
    assert driver.error > tolerances.TOOTH * tolerances.CAUSAL_CONV1D["cpu", "float32"].output
