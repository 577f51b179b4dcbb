"""The pipelined Mamba-2 step, run on the CPU with late copies and counted arrivals, against the fp64 oracle."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.cases import Mamba2Case
from tests.kernels.emulation import EmulationError, Emulator
from tests.ops import driver as protocol_driver
from tests.ops.driver import Row, bits
from tests.ops.mamba2_driver import Mamba2Driver
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR

# Every window class, history, head_dim class, state and dt type; heads of a group in one chunk, in several, and one
# alone; odd numbers of heads, with which dt stands at any 2 bytes.
CASES = (
    Mamba2Case("P64-T4", 16, 64, 128, 2, 16, 3),
    Mamba2Case("P64-T1-state_bf16", 9, 64, 128, 3, 16, 0, state="bfloat16", spare_ring_rows=1),
    Mamba2Case("P80-T5-dt_fp32", 8, 80, 128, 1, 16, 4, dt="float32"),
    Mamba2Case("P80-T8-W8-state_bf16", 8, 80, 128, 8, 8, 7, state="bfloat16"),
    Mamba2Case("P128-T8", 4, 128, 128, 2, 16, 7),
    Mamba2Case("P48-T2-W8", 5, 48, 128, 5, 8, 1, spare_ring_rows=3),
    Mamba2Case("P16-T2-state_bf16", 1, 16, 128, 1, 11, 1, state="bfloat16"),
    Mamba2Case("P64-T4-W32", 8, 64, 128, 2, 32, 3),
    Mamba2Case("P80-T8-W27-state_bf16", 4, 80, 128, 1, 27, 7, state="bfloat16"),
)
BY_NAME = {case.name: case for case in CASES}
FEW_HEADS, MAIN = BY_NAME["P16-T2-state_bf16"], BY_NAME["P64-T4"]

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def use(monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int, *, is_descending: bool = False) -> None:
    """Have the driver of the ops' tests run the emulated step."""
    emulator = Emulator("pipelined_step", is_descending=is_descending, num_multiprocessors=num_multiprocessors)
    monkeypatch.setattr(ops, "mamba2", emulator.mamba2)


def at_many_places(case: Mamba2Case, num_slots: int, seed: int) -> Mamba2Driver:
    """Bring slots to any number of pending rows, behind a prefill or from the start, by the CPU reference."""
    driver = Mamba2Driver(case, num_slots=num_slots, seed=seed)
    slots = range(0, num_slots, 2)
    seq_len = case.window + 11
    driver.run([protocol_driver.random_row(driver.rng, slot, seq_len, "random") for slot in slots], seq_len)
    num_steps = -(-(case.history - case.window + 1) // case.window)  # then the next one folds
    for step in range(num_steps):
        tokens = [case.window if 3 * step < num_steps * (slot // 2 % 4) else 0 for slot in range(num_slots)]
        driver.run([Row(slot, n, n) for slot, n in enumerate(tokens)], case.window)
    driver.flushes = 0
    return driver


def run_steps(driver: Mamba2Driver, num_steps: int, num_paddings: int) -> None:
    """Run all slots in every step, in any order, windows and acceptances uneven, with padding rows between them."""
    rng, T = driver.rng, driver.case.window
    for step in range(num_steps):
        driver.poison_unused()
        seq_len = T if step % 4 != 3 else max(1, T - 1)
        slots = rng.permutation(driver.num_slots).tolist()
        rows = [protocol_driver.random_row(rng, slot, seq_len, "random") for slot in slots]
        for _ in range(num_paddings):
            rows.insert(int(rng.integers(0, len(rows) + 1)), Row(-1, int(rng.integers(0, seq_len + 1)), 0))
        driver.run(rows, seq_len)
    driver.assert_within_bounds()


@pytest.mark.parametrize(("num_multiprocessors", "is_descending"), [(3, False), (132, True)])
@by_case
def test_every_shape_class_follows_the_recurrence(
    case: Mamba2Case, num_multiprocessors: int, is_descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = at_many_places(case, num_slots=8, seed=num_multiprocessors)
    use(monkeypatch, num_multiprocessors, is_descending=is_descending)
    run_steps(driver, 3, 2)
    assert driver.flushes >= 2


@pytest.mark.parametrize("num_multiprocessors", [1, 7, 132])
def test_the_heads_of_a_single_row_are_shared_out(num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = at_many_places(MAIN, num_slots=1, seed=4)
    use(monkeypatch, num_multiprocessors)
    for _ in range(5):
        driver.run([Row(0, 4, 4)], 4)
    driver.assert_within_bounds()
    assert driver.flushes >= 1


@pytest.mark.parametrize(("num_rows", "num_multiprocessors"), [(40, 13), (40, 132), (700, 5)])
def test_many_rows_are_guessed_and_taken(
    num_rows: int, num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the wait lengths are any numbers: prefetches must stay within tensors. Chunks are whole and in parts."""
    driver = at_many_places(FEW_HEADS, num_slots=num_rows, seed=6)
    use(monkeypatch, num_multiprocessors, is_descending=num_rows == 40)
    run_steps(driver, 2 if num_rows > 512 else 5, num_rows // 8)
    assert driver.flushes >= 10


@pytest.mark.parametrize("is_spread", [False, True], ids=["one_live", "all_idle"])
def test_rows_without_work_give_zeros(is_spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 132)
    driver = Mamba2Driver(FEW_HEADS, num_slots=2, seed=6)
    live = [] if is_spread else [Row(1, 2, 2)]
    driver.run([Row(-1, 2, 0)] * 35 + live + [Row(0, 0, 0)], 2)
    driver.assert_within_bounds()


def test_a_draft_that_is_not_finite_reaches_no_earlier_output(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 3)
    protocol_driver.assert_no_later_token_is_read(Mamba2Driver, MAIN)


@by_case
def test_results_do_not_depend_on_the_order_of_threads_or_on_who_takes_a_chunk(
    case: Mamba2Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for num_multiprocessors, is_descending in ((2, False), (11, True)):
        use(monkeypatch, num_multiprocessors, is_descending=is_descending)
        driver = Mamba2Driver(case, num_slots=2, seed=8)
        generator = torch.Generator().manual_seed(0)
        for pool in driver.pools.values():
            pool.copy_(torch.rand(pool.shape, generator=generator))
        driver.past, driver.checkpoint = [case.history + 3, 5], [3, 5]
        window = driver.make_window([case.window, 1], case.window)
        y = driver.call([Row(0, case.window, 0), Row(1, 1, 0)], window)
        results.append([bits(y), *(bits(pool) for pool in driver.pools.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("case", [MAIN, FEW_HEADS, BY_NAME["P48-T2-W8"]], ids=lambda case: case.name)
def test_positions_up_to_the_largest_number_wrap_like_small_ones(
    case: Mamba2Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 3)
    generator = torch.Generator().manual_seed(0)
    driver = Mamba2Driver(case, num_slots=1, seed=9)
    start = {name: torch.rand(pool.shape, generator=generator).to(pool.dtype) for name, pool in driver.pools.items()}
    window = driver.make_window([case.window], case.window)
    farthest = (np.iinfo(np.int32).max - case.history - 2 * case.ring_rows) // case.ring_rows * case.ring_rows
    results = []
    for turn in (case.ring_rows, 12345678 * case.ring_rows, farthest):
        for name, pool in driver.pools.items():
            pool.copy_(start[name])
        driver.past, driver.checkpoint = [turn + case.ring_rows - 2 + case.history // 2], [turn + case.ring_rows - 2]
        y = driver.call([Row(0, case.window, 0)], window)
        results.append([bits(y), *(bits(pool) for pool in driver.pools.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("num_rows", [2, 40])
def test_lengths_that_break_the_protocol_stay_within_the_pools(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 5)
    driver = Mamba2Driver(FEW_HEADS, num_slots=3, seed=1)
    guard = {name: bits(pool[2]) for name, pool in driver.pools.items()}
    most, least = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    for past, checkpoint in (
        ([100, 3, 0], [0, 9, 0]),
        ([most, least, 0], [least, most, 0]),
        ([5, most, 0], [-5, 0, 0]),
    ):
        driver.past, driver.checkpoint = past, checkpoint
        driver.call([Row(0, 99, 0), Row(1, -5, 0)] * (num_rows // 2), driver.make_window([2, 2] * (num_rows // 2), 2))
    for name, pool in driver.pools.items():
        assert torch.equal(bits(pool[2]), guard[name])


class Fault(NamedTuple):
    """An alteration of the sources under mamba2/, and what finds it: an error's words, or nothing: the results."""

    file: str
    text: str
    altered: str
    found: str = ""


FAULTS = {
    "a tile is not waited for": Fault("pipeline/outputs.cuh", "    turn.wait(shared);\n    if", "    if", "arrivals"),
    "weights are not waited for": Fault("pipeline/outputs.cuh", "    ptx::barrier_wait(is_weighed, parity);\n", ""),
    "x is not waited for": Fault("pipeline/outputs.cuh", "    ptx::barrier_wait(is_x_loaded, parity);\n", ""),
    "token rows come unannounced": Fault("pipeline/loader.cuh", "barrier_arrive_after_copies(", "barrier_arrive("),
    "the first phase is waited for": Fault(
        "pipeline/producer.cuh", "stage.parity_before()", "stage.parity()", "deadlock"
    ),
    "a buffer is free too early": Fault(
        "pipeline/layout.cuh", "NUM_CONSUMERS + TEAM_WARPS);", "NUM_CONSUMERS);", "phase|deadlock"
    ),
    "a guess leads anywhere": Fault(
        "pipeline/work.cuh", "slot < params.num_slots ? slot : -1", "slot", "outside of every tensor"
    ),
    "the kernel before is not waited for": Fault(
        "pipelined_step.cu", "  wait_for_previous();\n", "", "outside of every tensor|too early"
    ),
    "a block draws on after the end": Fault(
        "pipeline/work.cuh", "is_drawing = index < plan.num_chunks;", "is_drawing = true;", "counter"
    ),
    "a chunk is taken twice": Fault("pipeline/work.cuh", "plan.num_chunks - 1));", "plan.num_chunks - 2));", "counter"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    shutil.copytree(SOURCE_DIR, tmp_path / "kernels")
    source = tmp_path / "kernels" / "mamba2" / fault.file
    text = source.read_text()
    assert text.count(fault.text) == 1
    source.write_text(text.replace(fault.text, fault.altered))
    driver = at_many_places(MAIN, num_slots=5, seed=2)
    emulator = Emulator("pipelined_step", num_multiprocessors=3, source_dir=tmp_path / "kernels")
    monkeypatch.setattr(ops, "mamba2", emulator.mamba2)

    def live() -> None:
        for _ in range(3):
            driver.run([Row(0, 4, 4), *[Row(-1, 0, 0)] * 32, *(Row(slot, 4, 3) for slot in range(1, 5))], 4)

    if fault.found:
        with pytest.raises(EmulationError, match=fault.found):
            live()
    else:
        live()
        assert driver.exceeds_bounds()
