"""The CUDA sources of the recurrences, run on the CPU, against the fp64 oracles: every shape class, no GPU."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.cases import ALL_CASES, GATED_DELTA_NET_CASES, ReplayCase
from tests.kernels.emulation import Emulator
from tests.ops import driver as protocol_driver
from tests.ops.driver import Row, bits, live
from tests.ops.drivers import conventional, replayed
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.specializations import Role

CASES = {case.name: case for case in ALL_CASES}
SMALL = [
    CASES[name]
    for name in ("W2-T2-fp32", "T7-W8-fp32-state_bf16", "N256-T2-W8", "gdn-T3-fp32", "gdn-W1-fp32", "gdn-state_bf16")
]

# Those that share head_dim, d_state and types with another run on a GPU alone, to keep this file fast.
SHAPE_CLASSES = [
    CASES[name]
    for name in (
        "nemotron_h-T5",
        "nemotron_3-T4",
        "mamba2-G1-T4",
        "N256-T2-W8",
        "P80-T8-W8-fp16",
        "W1-fp32",
        "state_bf16",
        "T6-W32-fp16-state_fp16",
        "W2-N256-P80",
        "W32-decode-fp16",
        *(case.name for case in GATED_DELTA_NET_CASES),
    )
]

ONE_OF_EACH = [CASES["W2-T2-fp32"], CASES["gdn-T3-fp32"]]

by_small_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
by_role = pytest.mark.parametrize("role", ["step", "prefill"])


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of the ops' tests then runs the emulated kernels where it would run the CPU reference."""
    use(monkeypatch, Emulator())


def use(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    monkeypatch.setattr(ops, "mamba2", emulator.mamba2)
    monkeypatch.setattr(ops, "gated_delta_net", emulator.gated_delta_net)


@pytest.mark.parametrize("case", SHAPE_CLASSES, ids=lambda case: case.name)
def test_every_shape_class_follows_the_recurrence(case: ReplayCase) -> None:
    driver = replayed(case, num_slots=2, seed=3)
    live(driver)
    driver.assert_within_bounds()
    assert driver.flushes >= 4, "two prefills and a flush of each slot at least"


@by_small_case
def test_random_lives_of_slots_follow_the_recurrence(case: ReplayCase) -> None:
    protocol_driver.drive(replayed(case, num_slots=3, seed=5), 30)


@by_small_case
def test_a_draft_that_is_not_finite_reaches_no_earlier_output(case: ReplayCase) -> None:
    protocol_driver.assert_no_later_token_is_read(replayed, case)


@by_role
@by_small_case
def test_results_do_not_depend_on_the_order_of_threads(
    case: ReplayCase, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for is_descending in (False, True):
        use(monkeypatch, Emulator(role, is_descending=is_descending))
        driver = replayed(case, num_slots=2, seed=8)
        window = driver.make_window([case.window, 1], case.window)
        driver.past, driver.checkpoint = [case.history + 3, 5], [3, 4]
        generator = torch.Generator().manual_seed(0)
        for pool in driver.pools.values():
            pool.copy_(torch.rand(pool.shape, generator=generator))
        y = driver.call([Row(1, case.window, 0), Row(0, 1, 0)], window)
        outputs.append([bits(y), *(bits(pool) for pool in driver.pools.values())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@by_small_case
def test_inputs_of_any_alignment_and_pools_with_gaps_give_the_same(case: ReplayCase) -> None:
    dense = replayed(case, num_slots=2, seed=9)
    gapped = replayed(case, num_slots=2, seed=9)
    # Slots 48 elements apart from each other: still 16-byte aligned.
    bases = {name: torch.full((2, pool[0].numel() + 48), 7.0, dtype=pool.dtype) for name, pool in dense.pools.items()}
    for name, pool in dense.make_pools().items():
        gapped.pools[name] = bases[name][:, : pool[0].numel()].view(pool.shape)
        gapped.pools[name].fill_(torch.nan)
    for seq_len in (case.window + 5, case.window, case.window, case.window):
        n = min(seq_len, 2)
        window = dense.make_window([n, seq_len], seq_len)
        rows = [Row(0, n, n), Row(1, seq_len, seq_len)]
        odd = type(window)(*(_shifted_by_one(part) for part in window))
        assert torch.equal(bits(dense.run(rows, seq_len, window)), bits(gapped.run(rows, seq_len, odd)))
    for name, base in bases.items():
        assert (base[:, -48:] == 7.0).all(), f"{name}: written between the slots"


def _shifted_by_one(part: torch.Tensor) -> torch.Tensor:
    """The same values, one element off any alignment."""
    return torch.cat([torch.zeros(1, dtype=part.dtype), part.reshape(-1)])[1:].view(part.shape)


@by_role
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_lengths_that_break_the_protocol_stay_within_the_pools(
    case: ReplayCase, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device nobody checks the lengths; whatever they are, no other memory may be touched."""
    use(monkeypatch, Emulator(role))
    driver = replayed(case, num_slots=3, seed=1)
    guard = {name: bits(pool[2]) for name, pool in driver.pools.items()}
    driver.past, driver.checkpoint = [100, 3, 0], [0, 9, 0]
    driver.call([Row(0, 99, 0), Row(1, -5, 0)], driver.make_window([1, 1], 1))
    for name, pool in driver.pools.items():
        assert torch.equal(bits(pool[2]), guard[name])


BARRIERS = [
    ("W2-T2-fp32", "mamba2/step.cu", "__syncthreads();  // every warp has written its weights"),
    ("gdn-T3-fp32", "gated_delta_net/step.cu", "__syncthreads();  // every warp has written its weights"),
    ("gdn-T3-fp32", "gated_delta_net/window.cuh", "__syncwarp();  // the next tokens read this one's u"),
    ("gdn-T3-fp32", "gated_delta_net/prefill.cu", "__syncthreads();  // the chunk is staged"),
]


@pytest.mark.parametrize(("name", "file", "barrier"), BARRIERS)
def test_a_kernel_without_a_barrier_is_found_out(
    name: str, file: str, barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "kernels"
    shutil.copytree(SOURCE_DIR, altered)
    source = altered / file
    text = source.read_text()
    assert barrier in text
    source.write_text(text.replace(barrier, ""))
    use(monkeypatch, Emulator(source_dir=altered))
    driver = replayed(CASES[name], num_slots=1, seed=2)
    for seq_len in (driver.case.window, 40):
        driver.run([Row(0, seq_len, seq_len)], seq_len)
    assert driver.exceeds_bounds()


W1_CASES = [case for case in ALL_CASES if case.history == 1]


@pytest.mark.parametrize("case", W1_CASES, ids=lambda case: case.name)
def test_a_call_without_speculation_and_history_equals_the_conventional_step(case: ReplayCase) -> None:
    """history=1, max_draft_len=0: every step folds the token before it."""
    driver, stepwise = replayed(case, num_slots=1, seed=6), conventional(case, num_slots=1, seed=6)
    for _ in range(5):
        window = driver.make_window([1], 1)
        found, expected = (one.run([Row(0, 1, 1)], 1, window) for one in (driver, stepwise))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
