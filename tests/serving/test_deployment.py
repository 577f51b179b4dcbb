"""The sizes in docs/deployment.md are those that the memory plan computes."""

import re
import shutil
from pathlib import Path

import pytest

from tests.meta.repository import ROOT
from trtllm_replayssm.bench.e2e.models import PRESETS
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory


def documented_rows() -> list[list[str]]:
    text = (ROOT / "docs" / "deployment.md").read_text()
    table = re.search(r"^\| model \| weights .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [line.strip("| ").split(" | ") for line in table[1].splitlines()]


def geometry_of(config: str, folder: Path) -> ModelGeometry:
    """Return the geometry of a published config, or of a preset of the benchmark."""
    if config in PRESETS:
        return PRESETS[config]
    shutil.copyfile(ROOT / "tests" / "data" / config, folder / "config.json")
    return open_model_folder(folder, "auto").geometry


@pytest.mark.parametrize(
    ("first_row", "config"),
    [(0, "nemotron_nano_9b_v2_config.json"), (2, "qwen3.5-4b"), (4, "qwen3_5_9b_config.json")],
)
def test_the_sizing_table_is_the_memory_plan(tmp_path: Path, first_row: int, config: str) -> None:
    geometry = geometry_of(config, tmp_path)
    for row, max_draft_len in enumerate((0, 4), start=first_row):
        plans = [
            plan_memory(
                geometry,
                ReplayGeometry(history=16, max_draft_len=max_draft_len, state_dtype="float32"),
                EngineLimits(max_batch_size=1, max_input_len=length - 1, max_seq_len=length, max_num_tokens=2048),
                Execution(has_graphs=True, captured_prompt=defaults.MAX_CAPTURED_PROMPT, is_flash=True),
            )
            for length in (4096, 32768)
        ]
        plan = plans[0]
        rings = plan.rings + plan.conv_rings
        sizes = [plan.checkpoints, rings, plan.kv_caches, plan.states, plans[1].states]
        found = documented_rows()[row]
        assert found[1] == f"{plan.weights / 2**20:.0f}"
        assert found[2:] == [f"{size / 2**20:.1f}" for size in sizes]
        assert 0.5 < plan.step / 2**30 < 1.05
