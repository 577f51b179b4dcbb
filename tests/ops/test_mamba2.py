"""``ops.mamba2`` where it differs from the other recurrences: step sizes, and a single channel."""

import pytest

from tests.cases import DEVICE_CASES, FP32_CASES, Mamba2Case, on_devices
from tests.ops.driver import Row
from tests.ops.mamba2_driver import Mamba2Driver


@on_devices([FP32_CASES[1], DEVICE_CASES[9]])
@pytest.mark.parametrize("raw", [25.0, 1e3, 1e6])
def test_a_large_step_size_neither_overflows_nor_blurs_its_neighbours(
    case: Mamba2Case, device: str, raw: float
) -> None:
    driver = Mamba2Driver(case, device, num_slots=1, seed=7)
    for step in range(31):
        seq_len = case.window if step < 30 else 100
        window = driver.make_window([seq_len], seq_len)
        # Its neighbours keep small steps, which a difference of prefix sums would lose. Positive B and C: the state
        # is almost of rank one here, and outputs that cancel would measure the inputs' condition instead.
        window.dt[0, seq_len // 2 * (step % 2)] = raw
        window = window._replace(B=window.B.abs(), C=window.C.abs())
        driver.run([Row(0, seq_len, 1 + step % case.window if step < 30 else seq_len)], seq_len, window)
    driver.assert_within_bounds()


@on_devices([FP32_CASES[1], DEVICE_CASES[9]])
def test_softplus_is_exact_on_both_sides_of_its_guard(case: Mamba2Case, device: str) -> None:
    """Where softplus becomes the identity, log1p(exp(-20)) = 2e-9 is below fp32's resolution; at 10 it is not."""
    driver = Mamba2Driver(case, device, num_slots=1, seed=7)
    driver.weights["dt_bias"].zero_()
    driver.sequences[0] = driver.new_sequence()
    for step in range(40):
        window = driver.make_window([case.window], case.window)
        window.dt.fill_(step - 15.0)
        window = window._replace(B=window.B.abs(), C=window.C.abs())
        driver.run([Row(0, case.window, case.window)], case.window, window)
    driver.assert_within_bounds()


def test_a_single_head_with_single_channels_works() -> None:
    """Few outputs cancel all at once, so the bound is wider here; wrong terms would be off by about 1."""
    driver = Mamba2Driver(Mamba2Case("one", 1, 1, 1, 1, 8, 3, "float32"), num_slots=2, seed=1)
    for step in range(60):
        driver.run([Row(1, 4, step % 5), Row(0, 3, 3 - step % 4)], 4)
    assert driver.flushes > 10 and max(driver.output_error, driver.checkpoint_error) < 1e-3
