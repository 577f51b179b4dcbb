"""The conventional ops: the decode that replay is compared with, held to the same oracles."""

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.cases import ALL_FP32_CASES, T4_CASES, ReplayCase
from tests.ops.driver import Driver, Row, bits, random_row
from tests.ops.drivers import conventional, replayed
from tests.ops.strategies import all_types, bounded, cases, seeds

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
by_t4_case = pytest.mark.parametrize("case", T4_CASES, ids=lambda case: case.name)


def drive(driver: Driver, num_steps: int) -> None:
    rng = driver.rng
    for _ in range(num_steps):
        if rng.random() < 0.3:
            driver.poison_unused()
        if rng.random() < 0.03:
            driver.reuse(int(rng.integers(driver.num_slots)))
        is_prefill = rng.random() < 0.08
        T = driver.case.window
        seq_len = int(rng.integers(T + 1, T + 90)) if is_prefill else int(rng.integers(1, T + 1))
        slots = rng.permutation(driver.num_slots)[: rng.integers(0, driver.num_slots + 1)].tolist()
        rows = [random_row(rng, slot, seq_len, "all" if is_prefill else "random") for slot in slots]
        rows.insert(int(rng.integers(0, len(rows) + 1)), Row(-1, int(rng.integers(0, seq_len + 1)), 0))
        driver.run(rows, seq_len)
    driver.assert_within_bounds()


@bounded(40)
@given(case=cases(), seed=seeds)
def test_any_shape_and_any_life_of_slots_follows_the_recurrence(case: ReplayCase, seed: int) -> None:
    drive(conventional(case, seed=seed), 30)


@bounded(15)
@given(case=cases(all_types), seed=seeds)
def test_any_type_follows_the_recurrence_to_its_rounding(case: ReplayCase, seed: int) -> None:
    driver = conventional(case, seed=seed)
    for _ in range(4):  # a 16-bit state that is rounded per token drifts; few tokens keep within the flush bound
        driver.run([Row(slot, case.window, 1) for slot in range(4)], case.window)
    driver.assert_within_bounds()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("case", ALL_FP32_CASES, ids=lambda case: case.name)
def test_errors_do_not_grow_over_hundreds_of_steps(case: ReplayCase, device: str) -> None:
    drive(conventional(case, device, seed=21), 200)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@by_t4_case
def test_a_batch_of_padding_changes_no_byte(case: ReplayCase, device: str) -> None:
    driver = conventional(case, device)
    driver.pools["ssm_snapshots"][0] = torch.inf
    before = bits(driver.pools["ssm_snapshots"])
    for seq_len in (driver.case.window, 40):
        driver.run([Row(-1, 3, 0), Row(-1, 0, 0)], seq_len)
    assert torch.equal(bits(driver.pools["ssm_snapshots"]), before)


@by_t4_case
def test_replay_and_the_conventional_decode_agree_over_rejections(case: ReplayCase) -> None:
    replaying, stepwise = replayed(case, seed=31), conventional(case, seed=31)
    rng = np.random.default_rng(31)
    for _ in range(60):
        rows = [random_row(rng, slot, case.window, "random") for slot in rng.permutation(4).tolist()]
        window = replaying.make_window([row.num_tokens for row in rows], case.window)
        left, right = replaying.run(rows, case.window, window), stepwise.run(rows, case.window, window)
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
