"""Tests that need a GPU are never green for want of one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.repository import ROOT

SKIPPING = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    pytest.skip("too little memory")

def test_anywhere():
    pytest.skip("for another reason")
"""


@pytest.mark.parametrize(
    ("has_cuda", "options", "code", "sentence"),
    [
        (False, ["-m", "gpu"], pytest.ExitCode.USAGE_ERROR, "found no CUDA device"),
        (False, [], pytest.ExitCode.OK, "2 skipped"),
        (True, [], pytest.ExitCode.TESTS_FAILED, "1 failed, 1 skipped"),
    ],
    ids=["gpu-tests-without-a-gpu", "all-tests-without-a-gpu", "a-skip-with-a-gpu"],
)
def test_a_skip_of_a_gpu_test_is_a_failure_where_there_is_one(
    tmp_path: Path, has_cuda: bool, options: list[str], code: pytest.ExitCode, sentence: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    stand_in = f"import torch\n\ntorch.cuda.is_available = lambda: {has_cuda}\n"
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text() + stand_in)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert sentence in done.stdout + done.stderr


def test_a_failure_is_named_before_the_tests_after_it_have_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    source = "import os\n\ndef test_one():\n    assert 0\n\ndef test_two():\n    os._exit(7)\n"
    (tmp_path / "test_both.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7
    assert "test_both.py::test_one failed in its call" in done.stdout
