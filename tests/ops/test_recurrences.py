"""The replayed ops on the CPU against their oracles: random shapes and random lives of slots."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import (
    ALL_CASES,
    ALL_FP32_CASES,
    DEVICE_CASES,
    GATED_DELTA_NET_CASES,
    GATED_DELTA_NET_SHAPE_CASES,
    SHAPE_CASES,
    T4_CASES,
    ReplayCase,
    on_devices,
)
from tests.ops.driver import Row, bits, drive, relative_error
from tests.ops.drivers import conventional, replayed
from tests.ops.strategies import all_types, bounded, cases, seeds

by_fp32_case = pytest.mark.parametrize("case", ALL_FP32_CASES, ids=lambda case: case.name)
DECODE_CASES = [case for case in ALL_FP32_CASES if case.name.endswith("decode")]
by_t4_case = pytest.mark.parametrize("case", T4_CASES, ids=lambda case: case.name)


@bounded(90)
@given(case=cases(), seed=seeds, accept=st.sampled_from(("random", "all", "none")))
def test_any_shape_and_any_life_of_slots_follows_the_recurrence(case: ReplayCase, seed: int, accept: str) -> None:
    drive(replayed(case, num_slots=1 + seed % 5, seed=seed), 40, accept=accept)


@bounded(45)
@given(case=cases(all_types), seed=seeds)
def test_any_type_follows_the_recurrence_to_its_rounding(case: ReplayCase, seed: int) -> None:
    drive(replayed(case, seed=seed), 40)


@pytest.mark.parametrize("accept", ["random", "all", "none"])
@by_fp32_case
def test_errors_do_not_grow_over_hundreds_of_steps(case: ReplayCase, accept: str) -> None:
    driver = replayed(case, seed=11)
    drive(driver, 300, accept=accept)
    assert driver.flushes > 5


@on_devices(ALL_CASES)
def test_shapes_of_real_models_follow_the_recurrence(case: ReplayCase, device: str) -> None:
    driver = replayed(case, device, num_slots=3, seed=5)
    for accept in ("random", "all", "none"):
        drive(driver, 25, accept=accept)
    assert driver.flushes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SHAPE_CASES, *GATED_DELTA_NET_SHAPE_CASES], ids=lambda case: case.name)
def test_every_pair_of_shapes_and_types_follows_the_recurrence(case: ReplayCase) -> None:
    driver = replayed(case, "cuda", num_slots=3, seed=5)
    for accept in ("all", "random"):
        drive(driver, 20, accept=accept)
    assert driver.flushes > 0


@on_devices([DEVICE_CASES[2], GATED_DELTA_NET_CASES[1]])
def test_pools_with_gaps_between_slots_are_written_in_place(case: ReplayCase, device: str) -> None:
    wide = {name: torch.cat([pool, pool], 1) for name, pool in replayed(case, device).make_pools().items()}
    for pool in wide.values():
        pool.fill_(7.0)
    halves = {name: pool[:, : pool.size(1) // 2].fill_(torch.nan) for name, pool in wide.items()}
    driver = replayed(case, device, seed=2, pools=halves)
    drive(driver, 60)
    assert driver.flushes > 0
    for name, pool in wide.items():
        assert (pool[:, pool.size(1) // 2 :] == 7.0).all(), f"{name}: written between the slots"


@by_fp32_case
def test_pools_of_any_strides_are_written_in_place(case: ReplayCase) -> None:
    dense = replayed(case).make_pools()
    bases, pools = {}, {}
    for name, pool in dense.items():
        # Every dimension padded, their order reversed in memory: nothing of the layout is the usual one.
        base = torch.full([2 * size + 1 for size in reversed(pool.shape)], 7.0, dtype=pool.dtype)
        view = base[tuple(slice(1, None, 2) for _ in pool.shape)].permute(*reversed(range(pool.dim())))
        view.fill_(torch.nan)
        bases[name], pools[name] = base, view
    gaps = {name: _gap_mask(base) for name, base in bases.items()}
    driver = replayed(case, seed=2, pools=pools)
    drive(driver, 60)
    assert driver.flushes > 0
    for name, base in bases.items():
        assert (base[gaps[name]] == 7.0).all(), f"{name}: written beside the pool"
        assert pools[name].data_ptr() == driver.pools[name].data_ptr()


def _gap_mask(base: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(base.shape, dtype=torch.bool)
    mask[tuple(slice(1, None, 2) for _ in base.shape)] = False
    return mask


@by_fp32_case
def test_a_short_chunk_gives_the_same_by_the_step_and_by_the_prefill_path(case: ReplayCase) -> None:
    T = case.window
    step, prefill = replayed(case, num_slots=1, seed=1), replayed(case, num_slots=1, seed=1)
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
    case = ALL_FP32_CASES[seed % len(ALL_FP32_CASES)]
    whole, chunked = replayed(case, num_slots=2, seed=seed), replayed(case, num_slots=2, seed=seed)
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


@by_t4_case
def test_a_row_without_tokens_still_flushes_when_due(case: ReplayCase) -> None:
    driver = replayed(case, num_slots=2, seed=3)
    while not driver.is_due(0):
        driver.run([Row(0, case.window, case.window)], case.window)
    assert driver.flushes == 0
    committed = driver.past[0]
    driver.run([Row(0, 0, 0)], case.window)
    assert (driver.flushes, driver.checkpoint[0], driver.past[0]) == (1, committed, committed)
    driver.assert_within_bounds()


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_a_prefill_without_tokens_folds_what_is_pending_and_nothing_else(case: ReplayCase) -> None:
    driver = replayed(case, num_slots=2, seed=3)
    driver.run([Row(0, 0, 0)], 5)
    assert driver.flushes == 0, "a sequence of no tokens has no checkpoint to write"
    driver.run([Row(0, 1, 1)], 1)
    driver.run([Row(0, 0, 0)], 5)
    assert (driver.flushes, driver.checkpoint[0]) == (1, 1)
    driver.run([Row(0, 0, 0)], 5)
    assert driver.flushes == 1, "an unchanged checkpoint is not written again"
    driver.assert_within_bounds()


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
@by_t4_case
def test_a_flush_step_computes_from_the_checkpoint_as_stored(case: ReplayCase, state: str) -> None:
    """Run again after a full rejection, the window sees the same checkpoint, now read from memory: the same bits."""
    driver = replayed(replace(case, state=state), num_slots=1, seed=2)  # type: ignore[type-var]
    while not driver.is_due(0):
        driver.run([Row(0, 2, 2)], 4)
    window = driver.make_window([4], 4)
    flushing = driver.run([Row(0, 4, 0)], 4, window)
    assert driver.flushes == 1 and not driver.is_due(0)
    assert torch.equal(bits(driver.run([Row(0, 4, 4)], 4, window)), bits(flushing))


@by_t4_case
def test_history_one_is_the_conventional_step(case: ReplayCase) -> None:
    case = replace(case, history=1, max_draft_len=0)  # type: ignore[type-var]
    driver, stepwise = replayed(case, num_slots=3, seed=9), conventional(case, num_slots=3, seed=9)
    rows = [Row(2, 1, 1), Row(0, 1, 1), Row(1, 1, 1)]
    for _ in range(50):
        window = driver.make_window([1, 1, 1], 1)
        found, expected = driver.run(rows, 1, window), stepwise.run(rows, 1, window)
        assert relative_error(found, expected.double().numpy()) < 1e-6
    driver.assert_within_bounds()


@by_t4_case
def test_meta_tensors_give_the_shape_without_computing(case: ReplayCase) -> None:
    driver = replayed(case, "meta")
    window = driver.make_window([1], 1)
    y = driver.call([Row(0, 1, 1)], window)
    like = driver.like_output(window)
    assert (y.device.type, y.shape, y.dtype) == ("meta", like.shape, like.dtype)


@by_t4_case
def test_inputs_that_need_gradients_leave_no_graph_in_the_pools(case: ReplayCase) -> None:
    driver = replayed(case)
    driver.weights = {name: weight.requires_grad_() for name, weight in driver.weights.items()}
    y = driver.call([Row(0, 1, 1)], driver.make_window([1], 1))
    assert not y.requires_grad and not any(pool.requires_grad for pool in driver.pools.values())


@by_t4_case
def test_an_empty_batch_and_a_batch_of_padding_touch_nothing(case: ReplayCase) -> None:
    driver = replayed(case)
    for seq_len in (case.window, 20):
        driver.run([], seq_len)
        driver.run([Row(-1, 2, 0), Row(-1, 0, 0)], seq_len)
    poisoned = replayed(case).make_pools()
    assert all(torch.equal(bits(pool), bits(poisoned[name])) for name, pool in driver.pools.items())
