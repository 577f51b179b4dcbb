"""What ``inspect`` says of each kind of folder, as tables and as JSON."""

import json
import re
from pathlib import Path

import pytest

from tests.builders.tiny_geometry import tiny_geometry
from trtllm_replayssm.cli import inspect
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.tensors import state_specs

QWEN_9B = Path(__file__).parents[1] / "data" / "qwen3_5_9b_config.json"
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
        "ReplayMamba2WithConv ",
        "layers.{0,3}.mixer.ReplayMamba2WithConv x2",
        "engine layers, 2 profiles",
        "12 states updated in place",
    ):
        assert expected in text, expected
    engine = inspect_json(engine_folder, capsys)["engine"]
    assert isinstance(engine, dict)
    assert (engine["network_layers"]["PLUGIN_V3"], len(engine["plugin_layers"])) == (2, 2)


def test_the_times_of_a_build_add_up(engine_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine_folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = re.search(r"build time ([\d.]+) s: (.*?) Profiles", text)
    assert found is not None
    parts = [float(part.rpartition(" ")[2]) for part in found[2].split(", ")]
    assert float(found[1]) == pytest.approx(sum(parts), abs=0.05 * (len(parts) + 1))


def test_states_are_summed_by_kind_and_for_all_slots(engine_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(engine_folder, capsys)
    sizes = {pool["kind"]: pool["bytes_per_slot"] for pool in found["states"]}  # type: ignore[attr-defined]
    caches = sizes["key_cache"] + sizes["value_cache"]
    total = sum(sizes.values())
    assert main(["inspect", str(engine_folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, num_bytes in (("all recurrent", total - caches), ("all key/value", caches), ("total", total)):
        assert [*name.split(), f"{num_bytes:,}", f"{num_bytes / 2**20:.3f}"] in lines
    assert ["x", "max_batch_size", "4", "=", f"{4 * total / 1024:.1f}", "KiB"] in lines


def test_what_is_piped_has_no_trailing_blanks(engine_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]


def test_many_layers_and_kinds_are_folded() -> None:
    names = tuple(f"layers.{layer}.mixer.ReplayMamba2WithConv" for layer in range(0, 54, 2))
    assert inspect._grouped(names) == ["layers.{0,2,4,6,8,...,52}.mixer.ReplayMamba2WithConv x27"]
    assert inspect._grouped(("embedding",)) == ["embedding x1"]
    counts = {f"KIND{number}": 20 - number for number in range(10)}
    assert inspect._counts(counts).endswith("13 KIND7, and 23 of 2 more types")


def test_plugin_names_stay_whole_in_a_terminal_of_80_columns(
    engine_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", str(engine_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["ReplayMamba2WithConv", "1", "2"] for line in lines)


def test_the_bytes_per_slot_are_those_of_the_memory_plan(
    engine_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(engine_folder, capsys)
    limits = EngineLimits(max_batch_size=1, max_input_len=32, max_seq_len=64, max_num_tokens=16)
    expected: dict[str, int] = {}
    for spec in state_specs(tiny_geometry(), ReplayGeometry(history=8, max_draft_len=3), limits):
        kind = spec.name.rpartition("_")[0]
        expected[kind] = expected.get(kind, 0) + tensor_bytes(spec, B=1)
    states = found["states"]
    assert isinstance(states, list)
    assert {pool["kind"]: pool["bytes_per_slot"] for pool in states} == expected
    assert found["state_bytes_per_slot"] == sum(expected.values())
    memory = found["memory"]
    assert isinstance(memory, dict) and memory["activations"] == 0  # TensorRT's own
    limits = memory["limits"]
    states_bytes = sum(memory[part] for part in ("checkpoints", "rings", "conv_rings", "kv_caches"))
    assert (
        states_bytes == limits["max_batch_size"] * sum(expected.values())
        and memory["weights"] == found["weights_bytes"]
    )


def test_a_rank_checkpoint_is_shown_without_an_engine(
    rank_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(rank_checkpoint, capsys)
    assert (found["kind"], found["engine"], found["has_weights"]) == ("rank_checkpoint", None, True)


def test_a_published_config_alone_is_shown_in_true_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(NANO_9B.read_bytes())
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Hugging Face folder" in printed and "logits and sampling" in printed
    found = inspect_json(tmp_path, capsys)
    states = {pool["kind"]: pool for pool in found["states"]}  # type: ignore[attr-defined]
    assert states["ssm_state"]["slot_shape"] == [128, 80, 128]
    assert states["ssm_state"]["bytes_per_slot"] == 27 * 5120 * 1024
    assert found["pattern"] == "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    assert 8.8e9 < found["num_parameters"] < 9.0e9  # type: ignore[operator]


def test_a_published_qwen_config_alone_is_shown_in_true_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(QWEN_9B.read_bytes())
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "16 key heads x 128, 32 value heads x 128, d_conv 4" in shown
    assert "64 channels rotated, base 10,000,000, output gate" in " ".join(shown.split())
    found = inspect_json(tmp_path, capsys)
    assert found["pattern"] == "G-G-G-*-" * 8
    states = {pool["kind"]: pool for pool in found["states"]}  # type: ignore[attr-defined]
    assert list(states) == ["conv_ring", "ssm_state", "k_ring", "u_ring", "g_ring", "key_cache", "value_cache"]
    assert states["ssm_state"]["bytes_per_slot"] == 24 * 2048 * 1024


def test_what_is_no_model_folder_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert "found nothing there" in capsys.readouterr().err
