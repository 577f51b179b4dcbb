"""The plugins' whole way, from fields to results, without a GPU: their kernels run on the CPU.

The driver library beside the plugin is the recording one, which executes kernels compiled for the CPU. Everything else
is real: the plugin objects, their argument packing, the choice of kernels, the kernels' sources.
"""

import subprocess
import sys

import pytest

from tests.harness.plugin_harness import harness_library
from tests.harness.recorded_run import ROOT, driver_environment
from tests.plugins.emulated_run import WITH_CONV
from trtllm_replayssm.plugins.library import plugin_library


@pytest.mark.parametrize(
    "name", ["W2-T2-fp32", "P80-T8-W8-fp16", "gdn-T3-fp32", "gdn-state_bf16", "conv-40-4-4-bfloat16", *WITH_CONV]
)
def test_steps_and_prefills_follow_the_recurrence(name: str) -> None:
    command = [sys.executable, "-m", "tests.plugins.emulated_run", str(plugin_library()), str(harness_library()), name]
    environment = driver_environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
