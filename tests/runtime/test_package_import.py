"""What ``import trtllm_replayssm`` does to a process: no torch, and threads that sleep while they wait."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "first", "policy"),
    [(None, "", "PASSIVE"), ("ACTIVE", "", "ACTIVE"), (None, "import torch", None)],
    ids=["unset", "the-users-own", "too-late"],
)
def test_threads_that_wait_are_told_to_sleep(given: str | None, first: str, policy: str | None) -> None:
    code = f"{first}\nimport os, trtllm_replayssm\nprint(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment if given is None else environment | {"OMP_WAIT_POLICY": given},
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(policy)


def test_the_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import trtllm_replayssm as t; t.SamplingParams(); t.ReplayConfig()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
