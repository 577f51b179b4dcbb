"""Engines of Qwen models, from a Hugging Face folder to the layers that TensorRT built, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.builders.test_qwen_config import PUBLISHED
from tests.builders.tiny_geometry import tiny_qwen_geometry
from tests.tiny_models import make_qwen
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config, read_json
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import write_config
from trtllm_replayssm.builders.engine import build
from trtllm_replayssm.builders.kernels import specializations
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import GatedDeltaNetGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import read_manifest, read_report
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.errors import UnsupportedError

# The smallest widths that there are kernels for.
SHAPE = {"pattern": "GG*G", "key_dim": 16, "value_dim": 32}
# Every decoder layer is two of ours, a mixer and an MLP.
RECURRENT = (0, 2, 6)
LENGTHS = ["--max_batch_size", "2", "--max_input_len", "16", "--max_seq_len", "64"]
TARGET = ["--backend", "tensorrt_rtx", "--compute_capability", "8.9"]


def build_by_command(model: Path, folder: Path, *options: str) -> Path:
    """Convert a Hugging Face folder and build an engine of it; returns the engine."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    assert main(["convert", "--model_dir", str(model), "--output_dir", str(checkpoint)]) == 0
    folders = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(engine)]
    assert main(["build", *folders, *TARGET, *LENGTHS, *options]) == 0
    return engine


@pytest.mark.parametrize(
    ("family", "dtype", "state_dtype"), [("qwen3_5", "bfloat16", "float32"), ("qwen3_next", "float16", "bfloat16")]
)
def test_a_hugging_face_folder_becomes_an_engine_whose_recurrences_are_plugins(
    tmp_path: Path, family: str, dtype: str, state_dtype: str
) -> None:
    model = make_qwen(tmp_path / "hf", family, dtype=dtype, **SHAPE)  # type: ignore[arg-type]
    engine = build_by_command(model, tmp_path, "--max_draft_len", "3", "--history", "8", "--state_dtype", state_dtype)
    manifest, report = read_manifest(engine), read_report(engine)
    assert report is not None and not report.warnings
    assert {plugin.op_type: plugin.nodes for plugin in manifest.plugins} == {
        "ReplayCausalConv1d": 3,
        "ReplayGatedDeltaNet": 3,
    }
    names = [f"layers.{i}.mixer.{op}" for i in RECURRENT for op in ("ReplayCausalConv1d", "ReplayGatedDeltaNet")]
    assert [layer.name for layer in report.network_layers if layer.kind == "PLUGIN_V3"] == names
    built = [layer.name for layer in report.engine_layers if layer.kind == "PluginV3"]
    assert built == names + [f"{name} [profile 1]" for name in names]
    kinds = Counter(layer.kind for layer in report.network_layers)
    assert (kinds["ROTARY_EMBEDDING"], kinds["KV_CACHE_UPDATE"]) == (2, 2)
    replay = ReplayGeometry(history=8, max_draft_len=3, state_dtype=state_dtype)  # type: ignore[arg-type]
    states = state_specs(manifest.geometry, replay, manifest.limits)
    aliases = {t.name: t.shares_address_with for t in manifest.tensors if t.shares_address_with is not None}
    assert aliases == {spec.present_name: spec.past_name for spec in states}
    types = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    pools = [types[f"past_{name}_0"] for name in ("conv_ring", "ssm_state", "k_ring", "u_ring", "g_ring")]
    assert pools == [dtype, state_dtype, dtype, "float32", "float32"]
    assert json.loads((engine / "config.json").read_text())["rotary_pct"] == 0.25


def test_an_engine_of_one_file_and_a_chosen_history_generates_as_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen(tmp_path / "hf", "qwen3_5_multimodal", tied=True, **SHAPE)  # type: ignore[arg-type]
    engine = build_by_command(model, tmp_path, "--weights", "embedded", "--history", "auto")
    history = read_manifest(engine).replay.history
    capsys.readouterr()
    assert main(["inspect", str(engine)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ReplayGatedDeltaNet 1 3" in shown and f"history {history}, max_draft_len 0" in shown
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    tokens = []
    for folder in (engine, tmp_path / "checkpoint"):
        with LLM(folder, executor="torch", device="cpu", max_seq_len=64) as llm:
            tokens.append(llm.generate([5, 7, 11], greedy).outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_widths_without_a_kernel_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = GatedDeltaNetGeometry(n_key_heads=1, n_value_heads=1, key_dim=16, value_dim=24, d_conv=4)
    folder = tmp_path / "config"
    folder.mkdir()
    write_config(folder, tiny_qwen_geometry(gated_delta_net=narrow))
    with pytest.raises(UnsupportedError, match=r"found .* value_dim=24, .*; needed .* value_dim a multiple of 32"):
        build(folder, tmp_path / "engine", backend="tensorrt_rtx")
    assert main(["build", "--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "engine"), *TARGET]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "value_dim a multiple of 32" in line
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_every_plugin_that_a_model_needs_has_a_specialization() -> None:
    true_size = parse_hf_config(read_json(PUBLISHED), {}).geometry
    assert list(specializations(true_size, ReplayGeometry())) == ["ReplayCausalConv1d", "ReplayGatedDeltaNet"]
