"""Rejected drafts leave no trace, and calls repeat: bit for bit, on every device."""

import pytest
import torch
from torch import Tensor

from tests.cases import (
    ALL_FP32_CASES,
    DEVICE_CASES,
    FP32_CASES,
    GATED_DELTA_NET_CASES,
    GATED_DELTA_NET_FP32_CASES,
    ReplayCase,
    on_devices,
)
from tests.ops.driver import Driver, Row, assert_no_later_token_is_read, bits, drive
from tests.ops.drivers import replayed

SPECULATIVE = (
    *FP32_CASES[1:3],
    *DEVICE_CASES[1:6],
    *GATED_DELTA_NET_FP32_CASES[1:3],
    *GATED_DELTA_NET_CASES[1:4],
)

by_case = on_devices(SPECULATIVE)


def live_bits(driver: Driver, slot: int) -> list[Tensor]:
    """Everything of a slot that a later step may read."""
    c, f = driver.past[slot], driver.checkpoint[slot]
    rows = [t % driver.case.ring_rows for t in range(f, c)]
    rings = [bits(driver.pools[name][slot])[rows] for name in driver.rings]
    return [*rings, bits(driver.pools["ssm_state"][slot])] if f > 0 else rings


@by_case
def test_rejected_drafts_leave_no_trace(case: ReplayCase, device: str) -> None:
    """Two slots take the same tokens; one also drafts, and its drafts are rejected."""
    T = case.window
    drafting, plain = (replayed(case, device, num_slots=2, seed=4) for _ in range(2))
    for step in range(40):
        kept = 1 + step % T
        window = drafting.make_window([T], T)
        y_drafting = drafting.run([Row(1, T, kept)], T, window)
        y_plain = plain.run([Row(1, kept, kept)], T, window)
        assert torch.equal(bits(y_drafting[:, :kept]), bits(y_plain[:, :kept])), f"outputs differ at step {step}"
        for left, right in zip(live_bits(drafting, 1), live_bits(plain, 1), strict=True):
            assert torch.equal(left, right), f"states differ after step {step}"
        if step % 7 == 0:
            drafting.poison_unused()


@by_case
def test_a_draft_that_is_not_finite_reaches_no_earlier_output(case: ReplayCase, device: str) -> None:
    assert_no_later_token_is_read(replayed, case, device)


@by_case
def test_a_step_repeated_from_the_same_memory_repeats_every_bit(case: ReplayCase, device: str) -> None:
    driver = replayed(case, device, seed=6)
    drive(driver, 20)
    rows = [Row(3, case.window, 0), Row(-1, 0, 0), Row(1, 1, 0)]
    for seq_len in (case.window, case.window + 40):
        window = driver.make_window([case.window, 0, 1], seq_len)
        memory = {name: pool.clone() for name, pool in driver.pools.items()}
        results = []
        for _ in range(3):
            for name, pool in driver.pools.items():
                pool.copy_(memory[name])
            results.append([bits(driver.call(rows, window)), *(bits(pool) for pool in driver.pools.values())])
        for again in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("case", ALL_FP32_CASES, ids=lambda case: case.name)
def test_a_row_does_not_depend_on_the_rows_beside_it(case: ReplayCase) -> None:
    """The same life alone and among others; batched products may round differently, so to fp32 rounding."""
    T = case.window
    alone, among = replayed(case, num_slots=1, seed=8), replayed(case, num_slots=4, seed=8)
    for step in range(30):
        window = among.make_window([T, T, T, T], T)
        order = [(slot + step) % 4 for slot in range(4)]
        mine = order.index(0)
        y_among = among.run([Row(slot, T, T if slot == 0 else slot % T) for slot in order], T, window)
        y_alone = alone.run([Row(0, T, T)], T, type(window)(*(part[mine : mine + 1] for part in window)))
        torch.testing.assert_close(y_among[mine], y_alone[0], rtol=1e-5, atol=1e-6)
