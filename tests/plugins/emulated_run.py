"""Runs plugins beside a driver that executes kernels compiled for the CPU; a process of its own, one case each.

``python -m tests.plugins.emulated_run <library> <harness> <case>``: a name of ``tests.cases.ALL_CASES``,
``conv-<channels>-<d_conv>-<window>-<type>``, or a name of ``WITH_CONV``. It ends with an assertion's message when
results differ.
"""

import sys
import tempfile
from pathlib import Path

import torch

from tests.cases import ALL_CASES, Mamba2Case
from tests.harness.plugin_harness import Harness
from tests.kernels.emulation import Emulator
from tests.ops.driver import Driver, Row, drive
from tests.plugins.plugin_ops import (
    ConvolutionPair,
    emulated_image,
    emulated_image_with_conv,
    plugin_driver,
    specialization_of_case,
)
from tests.plugins.with_conv_driver import WithConvDriver, specialization_with_conv
from trtllm_replayssm.plugins.specializations import CausalConv1dSpecialization

WITH_CONV = {
    "with_conv-one_token": (Mamba2Case("", 4, 16, 128, 2, 3, 0, state="bfloat16"), 4),
    "with_conv-window": (Mamba2Case("", 2, 64, 128, 1, 8, 2, spare_ring_rows=1), 4),
    "with_conv-two_kernels": (Mamba2Case("", 4, 24, 32, 2, 5, 1, "float16"), 3),
}
"""Cases and taps; the first two have a kernel for both."""


def run_with_conv(harness: Harness, name: str, folder: Path) -> None:
    """Live as below; steps of few rows by one kernel where there is one, prefills and others by two."""
    case, d_conv = WITH_CONV[name]
    specialization = specialization_with_conv(case, d_conv)
    image = emulated_image_with_conv(specialization, folder)
    emulator = Emulator("pipelined_step" if specialization.pipeline else "step")
    in_turn = (Emulator().causal_conv1d, emulator.mamba2)
    live(WithConvDriver(harness, case, d_conv, image, "cpu", in_turn, num_slots=3, seed=6), 12)


def run_recurrence(harness: Harness, name: str, folder: Path) -> None:
    """Compare with the oracle."""
    case = next(case for case in ALL_CASES if case.name == name)
    image = emulated_image(specialization_of_case(case), folder)
    live(plugin_driver(harness, case, image, "cpu", num_slots=3, seed=6), 25)


def live(driver: Driver, num_steps: int) -> None:
    """Live as a sequence does: prompts, then windows past flushes and wraps with rejections, padding and idle rows."""
    window = driver.case.window
    driver.run([Row(1, 3, 3), Row(-1, 2, 0), Row(0, window + 33, window + 33)], window + 33)
    drive(driver, num_steps)
    assert driver.flushes > 2, "too few folds to see anything"


def run_convolution(harness: Harness, name: str, folder: Path) -> None:
    """Compare with the op."""
    _, channels, d_conv, window, dtype = name.split("-")
    specialization = CausalConv1dSpecialization(int(channels), int(d_conv), dtype)  # type: ignore[arg-type]
    image = emulated_image(specialization, folder)
    ConvolutionPair(harness, specialization, image, "cpu", window=int(window), silu=True).drive(24)


def main(library: str, harness_library: str, name: str) -> None:
    """Run one case."""
    torch.set_num_threads(1)
    harness = Harness(Path(library), Path(harness_library))
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"conv-": run_convolution, "with_conv-": run_with_conv}
        run = next((run for prefix, run in kinds.items() if name.startswith(prefix)), run_recurrence)
        run(harness, name, Path(folder))
    messages = harness.messages()
    assert not messages, messages


if __name__ == "__main__":
    main(*sys.argv[1:])
