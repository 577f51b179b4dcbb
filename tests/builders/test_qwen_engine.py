"""Engines of Qwen models: refused while their recurrence has no plugin; the rest of them builds."""

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.builders.test_qwen_config import PUBLISHED
from tests.builders.tiny_geometry import random_weights, tiny_qwen_geometry
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config, read_json
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import write_config
from trtllm_replayssm.builders.engine import build
from trtllm_replayssm.builders.export import export
from trtllm_replayssm.builders.kernels import specializations
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import EngineLimits, GatedDeltaNetGeometry, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import read_report
from trtllm_replayssm.errors import UnsupportedError

REFUSAL = r'engine: found 24 Gated DeltaNet layers; needed the plugin ReplayGatedDeltaNet, .* executor="torch"'
LIMITS = EngineLimits(max_batch_size=2, max_input_len=16, max_seq_len=32, max_num_tokens=16)


def true_size() -> ModelGeometry:
    return parse_hf_config(read_json(PUBLISHED), {}).geometry


def test_an_engine_without_its_plugin_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_bytes(PUBLISHED.read_bytes())
    with pytest.raises(UnsupportedError, match=REFUSAL):
        build(folder, tmp_path / "engine", backend="tensorrt_rtx")
    assert main(["build", "--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "engine")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--executor torch" in line
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_every_plugin_that_a_model_needs_has_a_specialization() -> None:
    found = specializations(true_size(), ReplayGeometry())
    assert list(found) == ["ReplayCausalConv1d", "ReplayGatedDeltaNet"]
    narrow = GatedDeltaNetGeometry(n_key_heads=1, n_value_heads=1, key_dim=16, value_dim=24, d_conv=4)
    with pytest.raises(UnsupportedError, match="value_dim a multiple of 32"):
        specializations(tiny_qwen_geometry(gated_delta_net=narrow), ReplayGeometry())


def test_layers_of_true_size_export_from_a_config_alone() -> None:
    whole = true_size()
    graph = export(whole.model_copy(update={"layer_types": whole.layer_types[:16]}), ReplayGeometry(), LIMITS)
    kinds = Counter(node.op_type for node in graph.graph.node)
    ours = {kind: kinds[kind] for kind in ("ReplayCausalConv1d", "ReplayGatedDeltaNet", "Attention", "RotaryEmbedding")}
    assert ours == {"ReplayCausalConv1d": 6, "ReplayGatedDeltaNet": 6, "Attention": 2, "RotaryEmbedding": 4}
    assert len(graph.SerializeToString()) < 2**20, "no weight is part of the graph"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_and_mlp_build_to_the_layers_that_tensorrt_has_for_them(tmp_path: Path, dtype: str) -> None:
    geometry = tiny_qwen_geometry("*-*-", dtype=dtype)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_config(folder, geometry)
    save_file(random_weights(geometry), folder / "rank0.safetensors")
    engine = build(
        folder,
        tmp_path / "engine",
        backend="tensorrt_rtx",
        max_batch_size=2,
        max_input_len=16,
        max_seq_len=32,
        max_draft_len=2,
        compute_capabilities=[89],
    )
    report = read_report(engine)
    assert report is not None
    kinds = Counter(layer.kind for layer in report.network_layers)
    assert kinds["ROTARY_EMBEDDING"] == 4
    assert kinds["KV_CACHE_UPDATE"] == 4
    assert json.loads((engine / "config.json").read_text())["rotary_pct"] == 0.25
