"""What ``inspect`` says of each kind of folder, as tables and as JSON."""

import json
from pathlib import Path

import pytest

from tests.builders.tiny_geometry import tiny_geometry
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.memory import slot_bytes

NANO_9B = Path(__file__).parents[1] / "data" / "nemotron_nano_9b_v2_config.json"


def inspect_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["inspect", str(folder), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_an_engine_folder_shows_layers_states_profiles_targets_and_versions(
    engine_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", str(engine_folder)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "M-*M  (2 mamba2, 1 mlp, 1 attention)",
        "ssm_state",
        "prefill",
        "compute capability 8.0, 8.9, 12.0",
        "tensorrt_rtx 1.",
        "trtllm_replayssm::ReplayMamba2",
        "layers.3.mixer.ReplayCausalConv1d",
        "12 states updated in place",
        "4 PLUGIN_V3",
    ):
        assert expected in text, expected


def test_the_bytes_per_slot_are_those_of_the_memory_plan(
    engine_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(engine_folder, capsys)
    limits = EngineLimits(max_batch_size=4, max_input_len=32, max_seq_len=64, max_num_tokens=16)
    expected = slot_bytes(tiny_geometry(), ReplayGeometry(history=8, max_draft_len=3), limits)
    states = found["states"]
    assert isinstance(states, list)
    assert {pool["kind"]: pool["bytes_per_slot"] for pool in states} == expected
    assert found["state_bytes_per_slot"] == sum(expected.values())


def test_a_rank_checkpoint_is_shown_without_an_engine(
    rank_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(rank_checkpoint, capsys)
    assert (found["kind"], found["engine"], found["has_weights"]) == ("rank_checkpoint", None, True)


def test_a_published_config_alone_is_shown_in_true_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(NANO_9B.read_bytes())
    found = inspect_json(tmp_path, capsys)
    states = {pool["kind"]: pool for pool in found["states"]}  # type: ignore[attr-defined]
    assert states["ssm_state"]["slot_shape"] == [128, 80, 128]
    assert states["ssm_state"]["bytes_per_slot"] == 27 * 5120 * 1024
    assert found["pattern"] == "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    assert 8.8e9 < found["num_parameters"] < 9.0e9  # type: ignore[operator]


def test_what_is_no_model_folder_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert "found nothing there" in capsys.readouterr().err
