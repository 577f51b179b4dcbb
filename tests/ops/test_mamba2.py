"""``ops.mamba2`` on the CPU against the oracle: random shapes and random lives of slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import DEVICE_CASES, FP32_CASES, SHAPE_CASES, Mamba2Case, on_devices
from tests.ops.driver import Mamba2Driver, Row, bits, drive, int32, make_pools, relative_error
from tests.ops.strategies import all_types, bounded, mamba2_cases, seeds
from trtllm_replayssm import ops


@bounded(60)
@given(case=mamba2_cases(), seed=seeds, accept=st.sampled_from(("random", "all", "none")))
def test_any_shape_and_any_life_of_slots_follows_the_recurrence(case: Mamba2Case, seed: int, accept: str) -> None:
    drive(Mamba2Driver(case, num_slots=1 + seed % 5, seed=seed), 40, accept=accept)


@bounded(30)
@given(case=mamba2_cases(all_types), seed=seeds)
def test_any_type_follows_the_recurrence_to_its_rounding(case: Mamba2Case, seed: int) -> None:
    drive(Mamba2Driver(case, seed=seed), 40)


@pytest.mark.parametrize("accept", ["random", "all", "none"])
@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.name)
def test_errors_do_not_grow_over_hundreds_of_steps(case: Mamba2Case, accept: str) -> None:
    driver = Mamba2Driver(case, seed=11)
    drive(driver, 300, accept=accept)
    assert driver.flushes > 5


@on_devices(DEVICE_CASES)
def test_shapes_of_real_models_follow_the_recurrence(case: Mamba2Case, device: str) -> None:
    driver = Mamba2Driver(case, device, num_slots=3, seed=5)
    for accept in ("random", "all", "none"):
        drive(driver, 25, accept=accept)
    assert driver.flushes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPE_CASES, ids=lambda case: case.name)
def test_every_pair_of_shapes_and_types_follows_the_recurrence(case: Mamba2Case) -> None:
    driver = Mamba2Driver(case, "cuda", num_slots=3, seed=5)
    for accept in ("all", "random"):
        drive(driver, 20, accept=accept)
    assert driver.flushes > 0


@on_devices(DEVICE_CASES[2:3])
def test_pools_with_gaps_between_slots_are_written_in_place(case: Mamba2Case, device: str) -> None:
    wide = {name: torch.cat([pool, pool], 1) for name, pool in make_pools(case, 4, device).items()}
    for pool in wide.values():
        pool.fill_(7.0)
    halves = {name: pool[:, : pool.size(1) // 2].fill_(torch.nan) for name, pool in wide.items()}
    driver = Mamba2Driver(case, device, seed=2, pools=halves)
    drive(driver, 60)
    assert driver.flushes > 0
    for name, pool in wide.items():
        assert (pool[:, pool.size(1) // 2 :] == 7.0).all(), f"{name}: written between the slots"


@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.name)
def test_pools_of_any_strides_are_written_in_place(case: Mamba2Case) -> None:
    dense = make_pools(case, 4, "cpu")
    bases, pools = {}, {}
    for name, pool in dense.items():
        # Every dimension padded, their order reversed in memory: nothing of the layout is the usual one.
        base = torch.full([2 * size + 1 for size in reversed(pool.shape)], 7.0, dtype=pool.dtype)
        view = base[tuple(slice(1, None, 2) for _ in pool.shape)].permute(*reversed(range(pool.dim())))
        view.fill_(torch.nan)
        bases[name], pools[name] = base, view
    gaps = {name: _gap_mask(base) for name, base in bases.items()}
    driver = Mamba2Driver(case, seed=2, pools=pools)
    drive(driver, 60)
    assert driver.flushes > 0
    for name, base in bases.items():
        assert (base[gaps[name]] == 7.0).all(), f"{name}: written beside the pool"
        assert pools[name].data_ptr() == driver.pools[name].data_ptr()


def _gap_mask(base: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(base.shape, dtype=torch.bool)
    mask[tuple(slice(1, None, 2) for _ in base.shape)] = False
    return mask


@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.name)
def test_a_short_chunk_gives_the_same_by_the_step_and_by_the_prefill_path(case: Mamba2Case) -> None:
    T = case.window
    step, prefill = Mamba2Driver(case, num_slots=1, seed=1), Mamba2Driver(case, num_slots=1, seed=1)
    for num_tokens in [T, 1, T, max(1, T - 1), T] * 4:
        window = step.make_window([num_tokens], T + 1)
        row = Row(0, num_tokens, num_tokens)
        y_step = step.run([row], T, type(window)(*(part[:, :T] for part in window)))
        y_prefill = prefill.run([row], T + 1, window)
        assert relative_error(y_step, y_prefill[:, :T].double().numpy()) < 2e-6
    # Folding what is pending brings both to the same checkpoint.
    nothing = step.make_window([0], T + 1)
    for driver in (step, prefill):
        driver.run([Row(0, 0, 0)], T + 1, nothing)
        driver.assert_within_bounds()
    assert relative_error(step.pools["ssm_state"], prefill.pools["ssm_state"].double().numpy()) < 2e-6


@bounded(15)
@given(seed=seeds, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_prompt_in_chunks_gives_what_one_prefill_gives(seed: int, cuts: list[int]) -> None:
    case = FP32_CASES[seed % len(FP32_CASES)]
    whole, chunked = Mamba2Driver(case, num_slots=2, seed=seed), Mamba2Driver(case, num_slots=2, seed=seed)
    window = whole.make_window([200], 200)
    y_whole = whole.run([Row(1, 200, 200)], 200, window)
    edges = [0, *sorted(cuts), 200]
    outputs = []
    for start, stop in zip(edges, edges[1:], strict=False):
        length = stop - start
        piece = type(window)(*(part[:, start:stop] for part in window))
        outputs.append(chunked.run([Row(1, length, length)], length, piece))
    assert relative_error(torch.cat(outputs, 1)[0], y_whole[0].double().numpy()) < 1e-5
    chunked.run([Row(1, 0, 0)], case.window + 1)
    found, expected = (driver.pools["ssm_state"][1:] for driver in (chunked, whole))
    assert relative_error(found, expected.double().numpy()) < 2e-6
    chunked.assert_within_bounds()


def test_a_row_without_tokens_still_flushes_when_due() -> None:
    case = FP32_CASES[1]
    driver = Mamba2Driver(case, num_slots=2, seed=3)
    while not driver.is_due(0):
        driver.run([Row(0, case.window, case.window)], case.window)
    assert driver.flushes == 0
    committed = driver.past[0]
    driver.run([Row(0, 0, 0)], case.window)
    assert (driver.flushes, driver.checkpoint[0], driver.past[0]) == (1, committed, committed)
    driver.assert_within_bounds()


def test_a_prefill_without_tokens_folds_what_is_pending_and_nothing_else() -> None:
    case = FP32_CASES[0]
    driver = Mamba2Driver(case, num_slots=2, seed=3)
    driver.run([Row(0, 0, 0)], 5)
    assert driver.flushes == 0, "a sequence of no tokens has no checkpoint to write"
    driver.run([Row(0, 1, 1)], 1)
    driver.run([Row(0, 0, 0)], 5)
    assert (driver.flushes, driver.checkpoint[0]) == (1, 1)
    driver.run([Row(0, 0, 0)], 5)
    assert driver.flushes == 1, "an unchanged checkpoint is not written again"
    driver.assert_within_bounds()


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


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
def test_a_flush_step_computes_from_the_checkpoint_as_stored(state: str) -> None:
    """Run again after a full rejection, the window sees the same checkpoint, now read from memory: the same bits."""
    case = Mamba2Case("rounded", 4, 8, 16, 2, 8, 3, "float32", state)
    driver = Mamba2Driver(case, num_slots=1, seed=2)
    while not driver.is_due(0):
        driver.run([Row(0, 2, 2)], 4)
    window = driver.make_window([4], 4)
    flushing = driver.run([Row(0, 4, 0)], 4, window)
    assert driver.flushes == 1 and not driver.is_due(0)
    assert torch.equal(bits(driver.run([Row(0, 4, 4)], 4, window)), bits(flushing))


def test_a_single_head_with_single_channels_works() -> None:
    """Few outputs cancel all at once, so the bound is wider here; wrong terms would be off by about 1."""
    driver = Mamba2Driver(Mamba2Case("one", 1, 1, 1, 1, 8, 3, "float32"), num_slots=2, seed=1)
    for step in range(60):
        driver.run([Row(1, 4, step % 5), Row(0, 3, 3 - step % 4)], 4)
    assert driver.flushes > 10 and max(driver.output_error, driver.checkpoint_error) < 1e-3


def test_history_one_is_the_conventional_step() -> None:
    case = Mamba2Case("W1", 6, 8, 16, 2, 1, 0, "float32")
    driver = Mamba2Driver(case, num_slots=3, seed=9)
    snapshots = torch.full((3, 2, case.n_heads, case.head_dim, case.d_state), torch.nan)
    rows = [Row(2, 1, 1), Row(0, 1, 1), Row(1, 1, 1)]
    for _ in range(50):
        x, dt, B, C = window = driver.make_window([1, 1, 1], 1)
        conventional = ops.mamba2_conventional(
            x,
            dt,
            B,
            C,
            driver.weights["A"],
            driver.weights["D"],
            driver.weights["dt_bias"],
            snapshots,
            int32([driver.past[row.slot] for row in rows]),
            int32([1, 1, 1]),
            int32([row.slot for row in rows]),
            max_draft_len=0,
        )
        replayed = driver.run(rows, 1, window)
        assert relative_error(replayed, conventional.double().numpy()) < 1e-6
    driver.assert_within_bounds()


def test_meta_tensors_give_the_shape_without_computing() -> None:
    case = FP32_CASES[0]
    driver = Mamba2Driver(case, device="meta")
    y = driver.call([Row(0, 1, 1)], driver.make_window([1], 1))
    assert y.device.type == "meta" and y.shape == (1, 1, case.n_heads, case.head_dim)


def test_inputs_that_need_gradients_leave_no_graph_in_the_pools() -> None:
    case = FP32_CASES[0]
    driver = Mamba2Driver(case)
    driver.weights = {name: weight.requires_grad_() for name, weight in driver.weights.items()}
    y = driver.call([Row(0, 1, 1)], driver.make_window([1], 1))
    assert not y.requires_grad and not any(pool.requires_grad for pool in driver.pools.values())


def test_an_empty_batch_and_a_batch_of_padding_touch_nothing() -> None:
    case = FP32_CASES[1]
    driver = Mamba2Driver(case)
    for seq_len in (case.window, 20):
        driver.run([], seq_len)
        driver.run([Row(-1, 2, 0), Row(-1, 0, 0)], seq_len)
    poisoned = make_pools(case, 4, "cpu")
    assert all(torch.equal(bits(pool), bits(poisoned[name])) for name, pool in driver.pools.items())
