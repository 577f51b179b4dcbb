"""Runs plugins beside a driver that executes kernels compiled for the CPU; a process of its own, one case each.

``python -m tests.plugins.emulated_run <library> <harness> <case>``: a name of ``tests.cases.ALL_CASES``, or
``conv-<channels>-<d_conv>-<window>-<type>``. It ends with an assertion's message when results differ.
"""

import sys
import tempfile
from pathlib import Path

import torch

from tests.cases import ALL_CASES
from tests.harness.plugin_harness import Harness
from tests.ops.driver import Row, drive
from tests.plugins.plugin_ops import ConvolutionPair, emulated_image, plugin_driver, specialization_of_case
from trtllm_replayssm.plugins.specialize import CausalConv1dSpecialization


def run_recurrence(harness: Harness, name: str, folder: Path) -> None:
    """Live as a sequence does: prompts, then windows past flushes and wraps with rejections, padding and idle rows."""
    case = next(case for case in ALL_CASES if case.name == name)
    image = emulated_image(specialization_of_case(case), folder)
    driver = plugin_driver(harness, case, image, "cpu", num_slots=3, seed=6)
    driver.run([Row(1, 3, 3), Row(-1, 2, 0), Row(0, case.window + 33, case.window + 33)], case.window + 33)
    drive(driver, 25)
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
        run = run_convolution if name.startswith("conv-") else run_recurrence
        run(harness, name, Path(folder))
    messages = harness.messages()
    assert not messages, messages


if __name__ == "__main__":
    main(*sys.argv[1:])
