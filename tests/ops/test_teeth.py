"""The comparison with the oracle bites: every planted fault exceeds its bound tenfold."""

from collections.abc import Callable

import pytest

from tests.cases import Mamba2Case
from tests.ops.driver import Mamba2Driver, Row
from tests.ops.test_conventional import ConventionalDriver

CASE = Mamba2Case("square", 4, 8, 8, 2, 8, 3, "float32")
T = CASE.window


def run_steps(driver: Mamba2Driver, num_steps: int, kept: int = T) -> None:
    for _ in range(num_steps):
        driver.run([Row(0, T, kept)], T)


def until_due(driver: Mamba2Driver, *, due: bool) -> None:
    while driver.is_due(0) != due:
        run_steps(driver, 1, kept=2)


def skip_a_fold(driver: Mamba2Driver) -> None:
    until_due(driver, due=True)
    kept = driver.pools["ssm_state"].clone()
    run_steps(driver, 1)
    driver.pools["ssm_state"].copy_(kept)


def transpose_the_checkpoint(driver: Mamba2Driver) -> None:
    state = driver.pools["ssm_state"][0]
    state.copy_(state.transpose(-1, -2).clone())


def leave_a_stale_row(driver: Mamba2Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 1, 1)], T)
    newest = (driver.past[0] - 1) % CASE.ring_rows
    driver.pools["x_ring"][0, newest] = driver.pools["x_ring"][0, newest - CASE.window]


def swap_two_rows(driver: Mamba2Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 2, 2)], T)
    last = driver.past[0] - 1
    rows = [last % CASE.ring_rows, (last - 1) % CASE.ring_rows]
    driver.pools["B_ring"][0, rows] = driver.pools["B_ring"][0, rows[::-1]].clone()


def count_a_rejected_draft(driver: Mamba2Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, T, 1)], T)
    driver.past[0] += 1


def advance_twice(driver: Mamba2Driver) -> None:
    until_due(driver, due=True)
    run_steps(driver, 1)
    driver.past[0] += T


def forget_the_pending_rows(driver: Mamba2Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 2, 2)], T)
    driver.checkpoint[0] = driver.past[0]


def fold_a_row_twice(driver: Mamba2Driver) -> None:
    until_due(driver, due=True)
    run_steps(driver, 1, kept=2)
    driver.checkpoint[0] -= 1


def start_a_slot_without_resetting_it(driver: Mamba2Driver) -> None:
    past, checkpoint = driver.past[0], driver.checkpoint[0]
    driver.reuse(0)
    driver.past[0], driver.checkpoint[0] = past, checkpoint


def exchange_the_groups(driver: Mamba2Driver) -> None:
    call = driver.call
    driver.call = lambda rows, window: call(rows, window._replace(B=window.B.flip(2)))  # type: ignore[method-assign]


def halve_the_bias_of_dt(driver: Mamba2Driver) -> None:
    driver.sequences[0].dt_bias = driver.sequences[0].dt_bias * 0.5


FAULTS = (
    skip_a_fold,
    transpose_the_checkpoint,
    leave_a_stale_row,
    swap_two_rows,
    count_a_rejected_draft,
    advance_twice,
    forget_the_pending_rows,
    fold_a_row_twice,
    start_a_slot_without_resetting_it,
    exchange_the_groups,
    halve_the_bias_of_dt,
)


def transpose_the_snapshots(driver: Mamba2Driver) -> None:
    snapshots = driver.pools["snapshots"]
    snapshots.copy_(snapshots.transpose(-1, -2).clone())


def take_the_snapshot_before(driver: Mamba2Driver) -> None:
    snapshots = driver.pools["snapshots"]
    snapshots.copy_(snapshots.roll(1, dims=1))


def miss_the_writes_of_a_step(driver: Mamba2Driver) -> None:
    kept = driver.pools["snapshots"].clone()
    run_steps(driver, 1)
    driver.pools["snapshots"].copy_(kept)


CONVENTIONAL_FAULTS = (
    transpose_the_snapshots,
    take_the_snapshot_before,
    miss_the_writes_of_a_step,
    count_a_rejected_draft,
    start_a_slot_without_resetting_it,
    exchange_the_groups,
    halve_the_bias_of_dt,
)
CASES = [(Mamba2Driver, fault) for fault in FAULTS] + [(ConventionalDriver, fault) for fault in CONVENTIONAL_FAULTS]
by_driver = pytest.mark.parametrize("make", [Mamba2Driver, ConventionalDriver], ids=["replay", "conventional"])


@pytest.mark.parametrize(("make", "plant"), CASES, ids=lambda value: value.__name__)
def test_a_planted_fault_shows_in_the_outputs(make: type[Mamba2Driver], plant: Callable[[Mamba2Driver], None]) -> None:
    driver = make(CASE, num_slots=2, seed=12)
    driver.run([Row(0, 20, 20)], 20)
    run_steps(driver, 4)
    driver.assert_within_bounds()
    plant(driver)
    run_steps(driver, 2)
    assert driver.exceeds_bounds(), f"{plant.__name__}: error only {driver.output_error:.1e}"


@by_driver
def test_without_a_fault_the_same_run_stays_within_its_bounds(make: type[Mamba2Driver]) -> None:
    driver = make(CASE, num_slots=2, seed=12)
    driver.run([Row(0, 20, 20)], 20)
    run_steps(driver, 20)
    driver.assert_within_bounds()
    assert not driver.exceeds_bounds()
