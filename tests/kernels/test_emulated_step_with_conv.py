"""The step that convolves, run on the CPU: the bits of the convolution's kernel and the pipelined step in turn."""

import shutil
from pathlib import Path

import pytest

from tests.cases import Mamba2Case
from tests.kernels.emulation import EmulationError, Emulator
from tests.kernels.raw_steps import assert_same_bits, live_with_conv, random_step, run_in_turn, with_own_pools
from trtllm_replayssm.plugins.build import SOURCE_DIR

CASES = (
    Mamba2Case("P64-T4", 16, 64, 128, 2, 16, 3),
    Mamba2Case("P64-T1-state_bf16", 9, 64, 128, 3, 16, 0, state="bfloat16", spare_ring_rows=1),
    Mamba2Case("P80-T1-state_bf16", 8, 80, 128, 1, 16, 0, state="bfloat16"),
    Mamba2Case("P80-T8-W8-dt_fp32", 8, 80, 128, 8, 8, 7, dt="float32"),
    Mamba2Case("P128-T5-state_bf16", 4, 128, 128, 1, 16, 4, state="bfloat16", spare_ring_rows=3),
    Mamba2Case("P16-T2-state_bf16", 1, 16, 128, 1, 11, 1, state="bfloat16"),
    Mamba2Case("P64-T3-W32", 8, 64, 128, 2, 32, 2),
)


def require_the_bits_of_both(case: Mamba2Case, emulator: Emulator, *, seed: int, has_bias: bool = True) -> None:
    step = random_step(case, num_slots=9, num_paddings=2, seed=seed, has_bias=has_bias)
    found, expected = with_own_pools(step), with_own_pools(step)
    expected_y = run_in_turn(expected, Emulator("step").causal_conv1d, Emulator("pipelined_step").mamba2)
    assert_same_bits(found, emulator.mamba2_with_conv(**found), expected, expected_y)


@pytest.mark.parametrize(("num_multiprocessors", "is_descending"), [(3, False), (132, True)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_gives_the_bits_of_convolution_and_step(
    case: Mamba2Case, num_multiprocessors: int, is_descending: bool
) -> None:
    emulator = Emulator(is_descending=is_descending, num_multiprocessors=num_multiprocessors)
    require_the_bits_of_both(case, emulator, seed=num_multiprocessors, has_bias=not is_descending)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_slots_live_from_their_first_token_on(case: Mamba2Case) -> None:
    live_with_conv(case, "cpu", Emulator(num_multiprocessors=3).mamba2_with_conv)


CONVOLUTION = "mamba2/pipeline/convolution.cuh"
FAULTS = {
    "raw rows are not waited for": (
        CONVOLUTION,
        "      ptx::barrier_wait(shared.is_loaded(X_LOADER, turn.index()), turn.parity());\n",
        "",
    ),
    "the convolution of C is not waited for": (
        "mamba2/pipeline/outputs.cuh",
        "shared.is_ready(BC_LOADER,",
        "shared.is_loaded(BC_LOADER,",
    ),
    "some warps are not waited for": ("common/pipeline/memory.cuh", "kind, buffer), TEAM_WARPS)", "kind, buffer), 1)"),
    "rows before position 0 are read": (CONVOLUTION, "return chunk.lengths.past() >= age;", "return true;"),
    "B and C are not appended": (CONVOLUTION, "return chunk.first_head % HEADS_PER_GROUP == 0;", "return false;"),
    "the rows before the window are reversed": (
        CONVOLUTION,
        "const int age = CONV_HISTORY - k;",
        "const int age = 1 + k;",
    ),
    "the bias is forgotten": (CONVOLUTION, "tensors.has_bias() ? ", "false ? "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    file, text, altered = FAULTS[name]
    shutil.copytree(SOURCE_DIR, tmp_path / "kernels")
    source = tmp_path / "kernels" / file
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, altered))
    with pytest.raises((AssertionError, EmulationError)):
        require_the_bits_of_both(CASES[1], Emulator(num_multiprocessors=3, source_dir=tmp_path / "kernels"), seed=3)
