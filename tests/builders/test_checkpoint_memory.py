"""A conversion holds one tensor in memory, not the model."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.tiny_models import make_nemotron_h
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import load_weights, read_config

# Measured in a process of its own: the peak that a conversion adds to what the imports alone need. VmHWM, since
# getrusage's peak is inherited from the process that started this one.
SCRIPT = """
import json, re, sys
from pathlib import Path
import torch
from trtllm_replayssm.builders.checkpoint.convert import convert
torch.set_num_threads(1)
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
torch.ones(1000).to(torch.bfloat16)
before = peak()
convert(sys.argv[1], sys.argv[2], dtype="bfloat16")
print(json.dumps(peak() - before))
"""


def test_converting_a_large_single_file_needs_the_memory_of_a_few_tensors(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_nemotron_h(
        tmp_path / "hf", pattern="*" + "-" * 9, hidden=1024, d_ff=2048, vocab=1024, dtype="float32"
    )
    size = (folder / "model.safetensors").stat().st_size
    largest = 2048 * 1024 * 4
    assert size > 150e6
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "checkpoint")]
    added = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    # The tensor, its conversion, and one more of each for allocator and library slack: a fifth of the file.
    assert added < 4 * largest, f"{added / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"
    assert load_weights(tmp_path / "checkpoint", read_config(tmp_path / "checkpoint"))
