"""The steps of Gated DeltaNet over long lives and on hostile inputs: emulated briefly, on a GPU at length."""

from typing import Literal

import numpy as np
import pytest
import torch

from tests.cases import GatedDeltaNetCase
from tests.kernels.emulation import Emulator
from tests.ops.driver import Row, relative_error
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver
from tests.ops.test_gated_delta_net import (
    HOSTILE,
    ILL_CONDITIONED,
    Spoil,
    assert_exact_over_length,
    long_life,
    rounded,
    sequential,
    tokens_of,
    values_of_all_sizes_on_nearly_parallel_keys,
)
from trtllm_replayssm import ops

Step = Literal["step", "pipelined_step"]
# 128 x 128, as in the models, for a GPU, where the pipelined step runs where there is one; smaller heads emulated.
MODELS = (
    GatedDeltaNetCase("gdn-2x128-T8", 1, 2, 128, 128, 16, 7),
    GatedDeltaNetCase("gdn-2x128-T8-state_bf16", 1, 2, 128, 128, 16, 7, state="bfloat16"),
    GatedDeltaNetCase("gdn-2x128-T4-W32", 1, 2, 128, 128, 32, 3),
    GatedDeltaNetCase("gdn-2x64-T8-fp32", 1, 2, 64, 64, 16, 7, "float32"),
)
SMALL = (
    GatedDeltaNetCase("gdn-2x64-T8", 1, 2, 64, 64, 16, 7),
    GatedDeltaNetCase("gdn-2x64-T8-state_bf16", 1, 2, 64, 64, 16, 7, state="bfloat16"),
)
by_step = pytest.mark.parametrize("step", ["step", "pipelined_step"])


def by(cases: tuple[GatedDeltaNetCase, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def by_input(cases: tuple[GatedDeltaNetCase, ...]) -> pytest.MarkDecorator:
    """Pair cases and hostile inputs, but for a 16-bit state that held values of 10^4 and shall hold those of 10^-4.

    One rounding of the former is more than all of the latter, whatever the order of the arithmetic.
    """
    pairs = [
        pytest.param(case, spoil, id=f"{case.name}-{spoil.__name__}")
        for case in cases
        for spoil in HOSTILE
        if case.state == "float32" or spoil is not values_of_all_sizes_on_nearly_parallel_keys
    ]
    return pytest.mark.parametrize(("case", "spoil"), pairs)


@by_step
@by(SMALL)
def test_emulated_checkpoints_stay_exact_over_hundreds_of_flushes(
    case: GatedDeltaNetCase, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "gated_delta_net", Emulator(step).gated_delta_net)
    life = long_life(GatedDeltaNetDriver(case, num_slots=1, seed=16), 1200)
    assert len(life.to_fp64) > 80
    assert_exact_over_length(life, case)


@pytest.mark.gpu
@by(MODELS)
def test_checkpoints_after_16k_tokens_are_those_of_the_sequential_recurrence(case: GatedDeltaNetCase) -> None:
    life = long_life(GatedDeltaNetDriver(case, "cuda", num_slots=1, seed=16), 16_384)
    assert len(life.to_fp64) > 500
    assert_exact_over_length(life, case)


@by_step
@by_input(SMALL)
def test_emulated_steps_on_hostile_inputs(
    case: GatedDeltaNetCase, step: Step, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "gated_delta_net", Emulator(step).gated_delta_net)
    require_exactness(GatedDeltaNetDriver(case, num_slots=1, seed=3), spoil, num_steps=16)


@pytest.mark.gpu
@by_input(MODELS)
def test_steps_on_hostile_inputs(case: GatedDeltaNetCase, spoil: Spoil) -> None:
    require_exactness(GatedDeltaNetDriver(case, "cuda", num_slots=1, seed=3), spoil, num_steps=160)


def require_exactness(driver: GatedDeltaNetDriver, spoil: Spoil, num_steps: int) -> None:
    """Stay within the bounds of all inputs and, where those are ill-conditioned, near the plain recurrence in fp32."""
    case = driver.case
    in_fp32, in_fp64 = sequential(driver, np.float32), sequential(driver, np.float64)
    T, output, checkpoint = case.window, 0.0, 0.0
    for step in range(num_steps):
        window, kept = rounded(spoil(driver.make_window([T], T), driver.generator), case), T - step % T
        driver.run([Row(0, T, kept)], T, window)
        found = torch.tensor(in_fp32.run(*tokens_of(window, kept, np.float32)))
        output = max(output, relative_error(found, in_fp64.run(*tokens_of(window, kept, np.float64))))
        checkpoint = max(checkpoint, relative_error(torch.tensor(in_fp32.state)[None], in_fp64.state[None]))
    bound = case.bound("cuda")
    # An output is rounded on top of what its arithmetic costs; a checkpoint in fp32 is not.
    most_of_output = bound.output + ILL_CONDITIONED * output
    most_of_checkpoint = max(bound.checkpoint, ILL_CONDITIONED * checkpoint)
    print(  # noqa: T201
        f"output {driver.output_error:.1e} of {most_of_output:.1e}, "
        f"checkpoint {driver.checkpoint_error:.1e} of {most_of_checkpoint:.1e}"
    )
    assert driver.flushes >= num_steps // 20 + 2
    assert driver.output_error <= most_of_output and driver.checkpoint_error <= most_of_checkpoint
