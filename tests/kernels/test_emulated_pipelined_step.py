"""The pipelined steps, run on the CPU with late copies and counted arrivals, against the fp64 oracle."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.cases import GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.kernels.emulation import EmulationError, Emulator
from tests.ops import driver as protocol_driver
from tests.ops.driver import Driver, Row, bits
from tests.ops.drivers import replayed
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR

# Every window class, history, head size class, state and gate type; heads of a group in one chunk (one, two or three of
# them), in several, and one alone; odd numbers of heads, with which raw dt and gates stand at any 2 bytes.
CASES: tuple[ReplayCase, ...] = (
    Mamba2Case("P64-T4", 16, 64, 128, 2, 16, 3),
    Mamba2Case("P64-T1-state_bf16", 9, 64, 128, 3, 16, 0, state="bfloat16", spare_ring_rows=1),
    Mamba2Case("P80-T5-dt_fp32", 8, 80, 128, 1, 16, 4, dt="float32"),
    Mamba2Case("P80-T8-W8-state_bf16", 8, 80, 128, 8, 8, 7, state="bfloat16"),
    Mamba2Case("P128-T8", 4, 128, 128, 2, 16, 7),
    Mamba2Case("P48-T2-W8", 5, 48, 128, 5, 8, 1, spare_ring_rows=3),
    Mamba2Case("P16-T2-state_bf16", 1, 16, 128, 1, 11, 1, state="bfloat16"),
    Mamba2Case("P64-T4-W32", 8, 64, 128, 2, 32, 3),
    Mamba2Case("P80-T8-W27-state_bf16", 4, 80, 128, 1, 27, 7, state="bfloat16"),
    GatedDeltaNetCase("gdn-T4", 2, 4, 128, 128, 16, 3),
    GatedDeltaNetCase("gdn-T1-gate_fp32", 1, 4, 128, 128, 16, 0, gate="float32", spare_ring_rows=1),
    GatedDeltaNetCase("gdn-T1-state_bf16", 3, 9, 128, 128, 16, 0, state="bfloat16"),
    GatedDeltaNetCase("gdn-T8-W8", 2, 2, 128, 128, 8, 7),
    GatedDeltaNetCase("gdn-T6-state_bf16", 1, 3, 128, 128, 16, 5, state="bfloat16", spare_ring_rows=3),
    GatedDeltaNetCase("gdn-3x9-T7", 3, 9, 128, 128, 16, 6),
    GatedDeltaNetCase("gdn-K128-V64-T5", 1, 2, 128, 64, 16, 4),
    GatedDeltaNetCase("gdn-K64-V128-T3-state_bf16", 2, 4, 64, 128, 13, 2, state="bfloat16"),
    GatedDeltaNetCase("gdn-K64-V64-T2-state_bf16", 1, 1, 64, 64, 11, 1, state="bfloat16"),
)
BY_NAME = {case.name: case for case in CASES}
# One of each recurrence.
FEW_HEADS = (BY_NAME["P16-T2-state_bf16"], BY_NAME["gdn-K64-V64-T2-state_bf16"])
MAIN = (BY_NAME["P64-T4"], BY_NAME["gdn-T4"])


def by(cases: Sequence[ReplayCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def use(monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int, *, is_descending: bool = False) -> None:
    """Have the drivers of the ops' tests run the emulated steps."""
    use_emulator(
        monkeypatch,
        Emulator("pipelined_step", is_descending=is_descending, num_multiprocessors=num_multiprocessors),
    )


def use_emulator(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    monkeypatch.setattr(ops, "mamba2", emulator.mamba2)
    monkeypatch.setattr(ops, "gated_delta_net", emulator.gated_delta_net)


def at_many_places(case: ReplayCase, num_slots: int, seed: int) -> Driver:
    """Bring slots to any number of pending rows, behind a prefill or from the start, by the CPU reference."""
    driver = replayed(case, num_slots=num_slots, seed=seed)
    slots = range(0, num_slots, 2)
    seq_len = case.window + 11
    driver.run([protocol_driver.random_row(driver.rng, slot, seq_len, "random") for slot in slots], seq_len)
    num_steps = -(-(case.history - case.window + 1) // case.window)  # then the next one folds
    for step in range(num_steps):
        tokens = [case.window if 3 * step < num_steps * (slot // 2 % 4) else 0 for slot in range(num_slots)]
        driver.run([Row(slot, n, n) for slot, n in enumerate(tokens)], case.window)
    driver.flushes = 0
    return driver


def run_steps(driver: Driver, num_steps: int, num_paddings: int) -> None:
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
@by(CASES)
def test_every_shape_class_follows_the_recurrence(
    case: ReplayCase, num_multiprocessors: int, is_descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = at_many_places(case, num_slots=8, seed=num_multiprocessors)
    use(monkeypatch, num_multiprocessors, is_descending=is_descending)
    run_steps(driver, 3, 2)
    assert driver.flushes >= 2


@pytest.mark.parametrize("num_multiprocessors", [1, 7, 132])
@by(MAIN)
def test_the_heads_of_a_single_row_are_shared_out(
    case: ReplayCase, num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = at_many_places(case, num_slots=1, seed=4)
    use(monkeypatch, num_multiprocessors)
    for _ in range(5):
        driver.run([Row(0, 4, 4)], 4)
    driver.assert_within_bounds()
    assert driver.flushes >= 1


@pytest.mark.parametrize(("num_rows", "num_multiprocessors"), [(40, 13), (40, 132), (700, 5)])
@by(FEW_HEADS)
def test_many_rows_are_guessed_and_taken(
    case: ReplayCase, num_rows: int, num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the wait lengths are any numbers: prefetches must stay within tensors. Chunks are whole and in parts."""
    driver = at_many_places(case, num_slots=num_rows, seed=6)
    use(monkeypatch, num_multiprocessors, is_descending=num_rows == 40)
    run_steps(driver, 2 if num_rows > 512 else 5, num_rows // 8)
    assert driver.flushes >= 10


@pytest.mark.parametrize("is_spread", [False, True], ids=["one_live", "all_idle"])
@by(FEW_HEADS)
def test_rows_without_work_give_zeros(case: ReplayCase, is_spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 132)
    driver = replayed(case, num_slots=2, seed=6)
    live = [] if is_spread else [Row(1, 2, 2)]
    driver.run([Row(-1, 2, 0)] * 35 + live + [Row(0, 0, 0)], 2)
    driver.assert_within_bounds()


@by((*MAIN, BY_NAME["gdn-T6-state_bf16"]))
def test_a_draft_that_is_not_finite_reaches_no_earlier_output(
    case: ReplayCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 3)
    protocol_driver.assert_no_later_token_is_read(replayed, case)


@by(CASES)
def test_results_do_not_depend_on_the_order_of_threads_or_on_who_takes_a_chunk(
    case: ReplayCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for num_multiprocessors, is_descending in ((2, False), (11, True)):
        use(monkeypatch, num_multiprocessors, is_descending=is_descending)
        driver = replayed(case, num_slots=2, seed=8)
        generator = torch.Generator().manual_seed(0)
        for pool in driver.pools.values():
            pool.copy_(torch.rand(pool.shape, generator=generator))
        driver.past, driver.checkpoint = [case.history + 3, 5], [3, 5]
        window = driver.make_window([case.window, 1], case.window)
        y = driver.call([Row(0, case.window, 0), Row(1, 1, 0)], window)
        results.append([bits(y), *(bits(pool) for pool in driver.pools.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@by((*MAIN, *FEW_HEADS, BY_NAME["P48-T2-W8"]))
def test_positions_up_to_the_largest_number_wrap_like_small_ones(
    case: ReplayCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 3)
    generator = torch.Generator().manual_seed(0)
    driver = replayed(case, num_slots=1, seed=9)
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
@by(FEW_HEADS)
def test_lengths_that_break_the_protocol_stay_within_the_pools(
    case: ReplayCase, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 5)
    driver = replayed(case, num_slots=3, seed=1)
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
    """An alteration of the sources, and what finds it: an error's words, or nothing: the results."""

    file: str
    text: str
    altered: str
    found: str = ""


def with_altered_sources(folder: Path, fault: Fault) -> Path:
    """Return a copy of the kernels' sources with an alteration."""
    sources = folder / "kernels"
    shutil.copytree(SOURCE_DIR, sources)
    source = sources / fault.file
    text = source.read_text()
    assert text.count(fault.text) == 1
    source.write_text(text.replace(fault.text, fault.altered))
    return sources


COMMON_FAULTS = {
    "token rows come unannounced": Fault(
        "common/pipeline/loading.cuh", "barrier_arrive_after_copies(", "barrier_arrive("
    ),
    "a buffer is free too early": Fault(
        "common/pipeline/memory.cuh", "NUM_CONSUMERS + TEAM_WARPS);", "NUM_CONSUMERS);", "phase|deadlock"
    ),
    "barriers are not waited for": Fault(
        "common/pipeline/memory.cuh",
        "    if (warp != LAST_WARP) ptx::meet(1, BLOCK_THREADS - WARP_SIZE);\n",
        "",
        "barriers are initialised",
    ),
    "a guess leads anywhere": Fault(
        "common/pipeline/row_lengths.cuh",
        "slot < params.num_slots ? slot : -1",
        "slot",
        "outside of every tensor",
    ),
    "a block draws on after the end": Fault(
        "common/pipeline/chunks.cuh", "is_drawing = index < plan.num_chunks;", "is_drawing = true;", "counter"
    ),
    "a chunk is taken twice": Fault(
        "common/pipeline/chunks.cuh", "plan.num_chunks - 1));", "plan.num_chunks - 2));", "counter"
    ),
}
WAIT = "  wait_for_previous();\n"
FAULTS = {
    MAIN[0]: COMMON_FAULTS
    | {
        "a tile is not waited for": Fault(
            "mamba2/pipeline/outputs.cuh", "    turn.wait(shared);\n    if", "    if", "arrivals"
        ),
        "weights are not waited for": Fault(
            "mamba2/pipeline/outputs.cuh", "    ptx::barrier_wait(is_weighed, parity);\n", ""
        ),
        "x is not waited for": Fault("mamba2/pipeline/outputs.cuh", "    ptx::barrier_wait(is_x_ready, parity);\n", ""),
        "the first phase is waited for": Fault(
            "mamba2/pipeline/producer.cuh", "stage.parity_before()", "stage.parity()", "deadlock"
        ),
        "the kernel before is not waited for": Fault(
            "mamba2/pipeline/run.cuh", WAIT, "", "outside of every tensor|too early"
        ),
    },
    MAIN[1]: COMMON_FAULTS
    | {
        "a tile is not waited for": Fault(
            "gated_delta_net/pipeline/outputs.cuh", "    turn.wait(shared);\n    if", "    if", "arrivals"
        ),
        "a stage is free too early": Fault(
            "common/pipeline/memory.cuh",
            "is_stage_free(stage), STAGE_WARPS)",
            "is_stage_free(stage), 1)",
            "phase|deadlock",
        ),
        "weights are not waited for": Fault(
            "gated_delta_net/pipeline/outputs.cuh", "    ptx::barrier_wait(is_weighed, parity);\n", ""
        ),
        "values are not waited for": Fault(
            "gated_delta_net/pipeline/outputs.cuh", "    ptx::barrier_wait(are_values_loaded, parity);\n", ""
        ),
        "keys that are not pending are folded": Fault(
            "gated_delta_net/pipeline/loader.cuh", "  if (!lengths.is_flush()) return;\n", "  return;\n"
        ),
        "the first phase is waited for": Fault(
            "gated_delta_net/pipeline/producer.cuh", "stage.parity_before()", "stage.parity()", "deadlock"
        ),
        "the kernel before is not waited for": Fault(
            "gated_delta_net/pipelined_step.cu", WAIT, "", "outside of every tensor|too early"
        ),
    },
}


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(case, fault, id=f"{case.name}-{name}")
        for case, faults in FAULTS.items()
        for name, fault in faults.items()
    ],
)
def test_a_planted_fault_is_found(
    case: ReplayCase, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = with_altered_sources(tmp_path, fault)
    driver = at_many_places(case, num_slots=5, seed=2)
    use_emulator(monkeypatch, Emulator("pipelined_step", num_multiprocessors=3, source_dir=altered))

    def live() -> None:
        for _ in range(3):
            driver.run([Row(0, 4, 4), *[Row(-1, 0, 0)] * 32, *(Row(slot, 4, 3) for slot in range(1, 5))], 4)

    if fault.found:
        with pytest.raises(EmulationError, match=fault.found):
            live()
    else:
        live()
        assert driver.exceeds_bounds()


@by(MAIN)
def test_what_racecheck_runs_follows_the_recurrence(
    case: ReplayCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_lane = Fault("common/warp_barrier.cuh", "#ifdef REPLAY_EVERY_LANE_ARRIVES", "#if 1")
    driver = at_many_places(case, num_slots=8, seed=3)
    use_emulator(monkeypatch, Emulator("pipelined_step", source_dir=with_altered_sources(tmp_path, every_lane)))
    run_steps(driver, 3, 2)
    assert driver.flushes >= 2
