"""The comparison with the oracle bites: every planted fault exceeds its bound tenfold."""

from collections.abc import Callable

import pytest

from tests.cases import GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.ops.driver import Driver, Row
from tests.ops.drivers import conventional, replayed

MAMBA2 = Mamba2Case("mamba2", 4, 8, 8, 2, 8, 3, "float32")
GATED_DELTA_NET = GatedDeltaNetCase("gated_delta_net", 2, 4, 8, 8, 8, 3, "float32")
T = MAMBA2.window


def run_steps(driver: Driver, num_steps: int, kept: int = T) -> None:
    for _ in range(num_steps):
        driver.run([Row(0, T, kept)], T)


def until_due(driver: Driver, *, due: bool) -> None:
    while driver.is_due(0) != due:
        run_steps(driver, 1, kept=2)


def skip_a_fold(driver: Driver) -> None:
    until_due(driver, due=True)
    kept = driver.pools["ssm_state"].clone()
    run_steps(driver, 1)
    driver.pools["ssm_state"].copy_(kept)


def transpose_the_checkpoint(driver: Driver) -> None:
    state = driver.pools["ssm_state"][0]
    state.copy_(state.transpose(-1, -2).clone())


def leave_a_stale_row(driver: Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 1, 1)], T)
    newest = (driver.past[0] - 1) % driver.case.ring_rows
    # x of Mamba-2, u of Gated DeltaNet: what is written into the state.
    values = driver.pools["x_ring" if "x_ring" in driver.pools else "u_ring"][0]
    values[newest] = values[newest - T]


def swap_two_rows(driver: Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 2, 2)], T)
    last = driver.past[0] - 1
    rows = [last % driver.case.ring_rows, (last - 1) % driver.case.ring_rows]
    # B of Mamba-2, k of Gated DeltaNet: where in the state it is written.
    keys = driver.pools["B_ring" if "B_ring" in driver.pools else "k_ring"][0]
    keys[rows] = keys[rows[::-1]].clone()


def count_a_rejected_draft(driver: Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, T, 1)], T)
    driver.past[0] += 1


def advance_twice(driver: Driver) -> None:
    until_due(driver, due=True)
    run_steps(driver, 1)
    driver.past[0] += T


def forget_the_pending_rows(driver: Driver) -> None:
    until_due(driver, due=False)
    driver.run([Row(0, 2, 2)], T)
    driver.checkpoint[0] = driver.past[0]


def fold_a_row_twice(driver: Driver) -> None:
    until_due(driver, due=True)
    run_steps(driver, 1, kept=2)
    driver.checkpoint[0] -= 1


def start_a_slot_without_resetting_it(driver: Driver) -> None:
    past, checkpoint = driver.past[0], driver.checkpoint[0]
    driver.reuse(0)
    driver.past[0], driver.checkpoint[0] = past, checkpoint


def exchange_the_groups(driver: Driver) -> None:
    call, name = driver.call, "B" if driver.case is MAMBA2 else "k"
    driver.call = lambda rows, window: call(  # type: ignore[method-assign]
        rows, window._replace(**{name: getattr(window, name).flip(2)})
    )


def halve_the_bias_of_dt(driver: Driver) -> None:
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


def transpose_the_snapshots(driver: Driver) -> None:
    snapshots = driver.pools["ssm_snapshots"]
    snapshots.copy_(snapshots.transpose(-1, -2).clone())


def take_the_snapshot_before(driver: Driver) -> None:
    snapshots = driver.pools["ssm_snapshots"]
    snapshots.copy_(snapshots.roll(1, dims=1))


def miss_the_writes_of_a_step(driver: Driver) -> None:
    kept = driver.pools["ssm_snapshots"].clone()
    run_steps(driver, 1)
    driver.pools["ssm_snapshots"].copy_(kept)


CONVENTIONAL_FAULTS = (
    transpose_the_snapshots,
    take_the_snapshot_before,
    miss_the_writes_of_a_step,
    count_a_rejected_draft,
    start_a_slot_without_resetting_it,
    exchange_the_groups,
    halve_the_bias_of_dt,
)
Make = Callable[..., Driver]
MAKES = (replayed, conventional)
by_case = pytest.mark.parametrize("case", [MAMBA2, GATED_DELTA_NET], ids=lambda case: case.name)


@by_case
@pytest.mark.parametrize(
    ("make", "plant"),
    [(replayed, fault) for fault in FAULTS] + [(conventional, fault) for fault in CONVENTIONAL_FAULTS],
    ids=lambda value: value.__name__,
)
def test_a_planted_fault_shows_in_the_outputs(case: ReplayCase, make: Make, plant: Callable[[Driver], None]) -> None:
    driver = make(case, num_slots=2, seed=12)
    driver.run([Row(0, 20, 20)], 20)
    run_steps(driver, 4)
    driver.assert_within_bounds()
    plant(driver)
    run_steps(driver, 2)
    assert driver.exceeds_bounds(), f"{plant.__name__}: error only {driver.output_error:.1e}"


@by_case
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_without_a_fault_the_same_run_stays_within_its_bounds(case: ReplayCase, make: Make) -> None:
    driver = make(case, num_slots=2, seed=12)
    driver.run([Row(0, 20, 20)], 20)
    run_steps(driver, 20)
    driver.assert_within_bounds()
    assert not driver.exceeds_bounds()
