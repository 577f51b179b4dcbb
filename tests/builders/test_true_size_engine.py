"""Engines of published models at their true size, from a config alone: within one gigabyte and a minute of the CPU."""

import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_replayssm.contract.manifest import read_report

DATA = Path(__file__).parents[1] / "data"

BUILD = """
import resource, sys, time
from trtllm_replayssm.builders.engine import build
started = time.perf_counter()
build(sys.argv[1], sys.argv[2], backend="tensorrt_rtx", max_batch_size=8, max_input_len=2048, max_seq_len=4096,
      max_draft_len=3)
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(max(peaks) // 1024, time.perf_counter() - started)
"""


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ("nemotron_nano_9b_v2_config.json", {"PLUGIN_V3": 27, "KV_CACHE_UPDATE": 8}),
        ("qwen3_5_9b_config.json", {"PLUGIN_V3": 48, "KV_CACHE_UPDATE": 16, "ROTARY_EMBEDDING": 16}),
    ],
    ids=["nemotron_nano_9b_v2", "qwen3_5_9b"],
)
def test_a_published_config_alone_becomes_an_engine(
    tmp_path: Path, config: str, layers: dict[str, int], record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((DATA / config).read_bytes())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path / "model"), str(tmp_path / "engine")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak_mib, seconds = finished.stdout.split()
    record_property("true_size", f"peak {peak_mib} MiB, {seconds} s, {cpu_seconds:.0f} s of CPU time")
    assert int(peak_mib) < 1024
    # CPU time, not elapsed time: the latter says more about what else the machine does.
    assert cpu_seconds < 60
    report = read_report(tmp_path / "engine")
    assert report is not None
    kinds = Counter(layer.kind for layer in report.network_layers)
    assert {kind: kinds[kind] for kind in layers} == layers
    assert not (tmp_path / "engine" / "rank0.safetensors").exists()
