"""Descriptions of an engine that were damaged: one sentence that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.manifests import PLAN, tiny_manifest
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.manifest import ENGINE_FILE, MANIFEST_FILE, REPORT_FILE

Damage = Callable[[Path], object]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Give a folder that ``inspect`` takes for an engine."""
    (tmp_path / MANIFEST_FILE).write_text(tiny_manifest().model_dump_json())
    (tmp_path / ENGINE_FILE).write_bytes(PLAN)
    return tmp_path


def edit_geometry(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST_FILE).read_text())
    content["geometry"] |= changes
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "manifest-not-utf8": (lambda f: (f / MANIFEST_FILE).write_bytes(b"\xff"), "manifest.json: found text that is not"),
    "manifest-nested": (lambda f: (f / MANIFEST_FILE).write_text("[" * 200_000), "manifest.json: found text that"),
    "report-not-utf8": (lambda f: (f / REPORT_FILE).write_bytes(b"\xff"), "build_report.json: found text that is not"),
    "report-cut": (lambda f: (f / REPORT_FILE).write_text("{"), "build_report.json: found '{'; Invalid JSON"),
    "report-empty": (lambda f: (f / REPORT_FILE).write_text("{}"), "build_report.json: network_layers: found nothing"),
    "no-mamba2-shape": (
        lambda f: edit_geometry(f, mamba2=None),
        "manifest.json: geometry: mamba2: found nothing; needed the shape of layers (0, 3)",
    ),
    "mlp-alone": (
        lambda f: edit_geometry(f, layer_types=["mlp"]),
        "manifest.json: geometry: layer_types: found no recurrent and no attention layer; needed one at least",
    ),
    "true-for-a-token": (
        lambda f: edit_geometry(f, eos_token_ids=[True]),
        "manifest.json: geometry.eos_token_ids.0: found True; needed a valid integer",
    ),
    "engine-cut": (lambda f: (f / ENGINE_FILE).write_bytes(PLAN[:5]), "rank0.engine: found 5 bytes; needed 22 bytes"),
    "no-engine": (lambda f: (f / ENGINE_FILE).unlink(), "rank0.engine: found nothing; needed 22 bytes"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_engine_folder_is_one_sentence_and_exit_code_2(
    engine: Path, damage: Damage, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(engine)]) == 0
    capsys.readouterr()
    damage(engine)
    assert main(["inspect", str(engine)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {engine / sentence}")
    assert (captured.err.count("\n"), captured.out) == (1, "")
