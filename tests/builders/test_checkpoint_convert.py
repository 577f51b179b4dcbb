"""Conversions that succeed: values, types, tying, shards, and loading back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import edit_config, make_nemotron_h
from trtllm_replayssm.builders.checkpoint.convert import BalanceSheet, convert
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import (
    is_rank_checkpoint,
    load_weights,
    make_config,
    read_config,
)
from trtllm_replayssm.builders.checkpoint.source import stream_weights
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.manifest import MANIFEST_FILE, CheckpointRecord, Manifest
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.errors import CheckpointError, ManifestError

CONFIGS: dict[str, dict[str, Any]] = {
    "groups-1": {},
    "groups-8-head_dim-80": {"n_groups": 8, "head_dim": 80, "pattern": "M*-"},
    "no-conv-bias-kernel-3": {"use_conv_bias": False, "d_conv": 3, "pattern": "MM-"},
    "mamba-alone-tied": {"pattern": "MM", "tied": True},
    "attention-first": {"pattern": "*-M", "n_query_heads": 6, "n_kv_heads": 2},
}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    return {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}


def expected_tensors(folder: Path, pattern: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Write down by hand what a rank checkpoint holds, from the stored tensors."""
    stored = stored_tensors(folder)
    expected = {"embedding.weight": stored["embeddings.weight"], "final_norm.weight": stored["norm_f.weight"]}
    fp32 = {}
    for i, letter in enumerate(pattern):
        expected[f"layers.{i}.norm.weight"] = stored[f"layers.{i}.norm.weight"]
        mixer = f"layers.{i}.mixer."
        if letter == "M":
            for name in ("in_proj.weight", "norm.weight", "out_proj.weight"):
                expected[mixer + name] = stored[mixer + name]
            expected[mixer + "conv1d.weight"] = stored[mixer + "conv1d.weight"][:, 0, :]
            zeros = torch.zeros(len(stored[mixer + "conv1d.weight"]))
            expected[mixer + "conv1d.bias"] = stored.get(mixer + "conv1d.bias", zeros)
            fp32[mixer + "A"] = -torch.exp(stored[mixer + "A_log"].float())
            fp32[mixer + "D"] = stored[mixer + "D"].float()
            fp32[mixer + "dt_bias"] = stored[mixer + "dt_bias"].float()
        elif letter == "*":
            expected[mixer + "qkv.weight"] = torch.cat([stored[f"{mixer}{p}_proj.weight"] for p in "qkv"])
            expected[mixer + "o_proj.weight"] = stored[mixer + "o_proj.weight"]
        else:
            for name in ("up_proj.weight", "down_proj.weight"):
                expected[mixer + name] = stored[mixer + name]
    if not torch.equal(stored["lm_head.weight"], stored["embeddings.weight"]):
        expected["lm_head.weight"] = stored["lm_head.weight"]
    return {name: tensor.to(dtype) for name, tensor in expected.items()} | fp32


def assert_same(found: dict[str, torch.Tensor], needed: dict[str, torch.Tensor]) -> None:
    assert found.keys() == needed.keys()
    for name, tensor in needed.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_rank_checkpoint_holds_the_models_values_under_its_own_names(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_nemotron_h(tmp_path / "hf", **config)
    checkpoint = convert(folder, tmp_path / "checkpoint")
    geometry = read_config(checkpoint)
    weights = load_weights(checkpoint, geometry)
    assert list(weights) == [spec.name for spec in weight_specs(geometry)]
    assert_same(weights, expected_tensors(folder, config.get("pattern", "M-M*-M-"), torch.float32))


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_every_stored_type_converts_to_every_type(tmp_path: Path, stored: str, target: str) -> None:
    folder = make_nemotron_h(tmp_path / "hf", pattern="M*-", dtype=stored)
    checkpoint = convert(folder, tmp_path / "checkpoint", dtype=target)
    geometry = read_config(checkpoint)
    assert geometry.dtype == target
    assert_same(load_weights(checkpoint, geometry), expected_tensors(folder, "M*-", getattr(torch, target)))


def test_dtype_auto_keeps_the_configs_type(tmp_path: Path) -> None:
    folder = make_nemotron_h(tmp_path / "hf", pattern="M", dtype="bfloat16")
    assert read_config(convert(folder, tmp_path / "checkpoint")).dtype == "bfloat16"


def test_shards_and_one_file_convert_to_the_same_bytes(tmp_path: Path, tiny_folder: Path, sharded_folder: Path) -> None:
    assert len(list(sharded_folder.glob("model-*.safetensors"))) > 3
    one, several = convert(tiny_folder, tmp_path / "one"), convert(sharded_folder, tmp_path / "several")
    for path in one.iterdir():
        assert path.read_bytes() == (several / path.name).read_bytes(), path.name


def test_the_names_of_transformers_in_memory_are_read_too(tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    renamed = {
        name.replace("backbone.", "model."): t for name, t in load_file(tiny_folder / "model.safetensors").items()
    }
    assert any(name.startswith("model.") for name in renamed)
    save_file(renamed, folder / "model.safetensors")
    for name, tensor in stream_weights(tiny_folder, open_model_folder(tiny_folder).geometry):
        assert torch.equal(dict(stream_weights(folder, open_model_folder(folder).geometry))[name], tensor)


def test_streaming_a_folder_gives_what_a_rank_checkpoint_holds(tmp_path: Path, tiny_folder: Path) -> None:
    checkpoint = open_model_folder(convert(tiny_folder, tmp_path / "checkpoint", dtype="bfloat16"))
    direct = open_model_folder(tiny_folder, "bfloat16")
    assert (direct.kind, checkpoint.kind) == ("huggingface", "rank_checkpoint")
    assert direct.geometry == checkpoint.geometry
    assert_same(direct.load_weights(), checkpoint.load_weights())


def test_the_weights_file_is_what_the_safetensors_library_reads_and_aligned(tmp_path: Path, tiny_folder: Path) -> None:
    path = convert(tiny_folder, tmp_path / "checkpoint", dtype="bfloat16") / "rank0.safetensors"
    geometry = read_config(path.parent)
    assert_same(load_file(path), load_weights(path.parent, geometry))
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__")
    assert (8 + size) % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0, name


def test_the_config_has_tensorrt_llms_keys_and_the_whole_geometry(tmp_path: Path, tiny_folder: Path) -> None:
    folder = convert(tiny_folder, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "NemotronHForCausalLM"
    assert config["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert config["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    assert config["layer_types"] == ["mamba2", "mlp", "mamba2", "attention", "mlp", "mamba2", "mlp"]
    assert (config["state_size"], config["conv_kernel"], config["ngroups"]) == (16, 4, 1)
    assert (config["num_attention_heads"], config["hidden_act"], config["logits_dtype"]) == (4, "relu2", "float32")
    assert is_rank_checkpoint(folder)
    assert not is_rank_checkpoint(tiny_folder)
    assert make_config(read_config(folder)) == config


def test_the_tokenizer_travels_along(tmp_path: Path, tiny_folder: Path) -> None:
    folder = convert(tiny_folder, tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_the_balance_sheet_accounts_for_every_stored_tensor(tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    stored = load_file(tiny_folder / "model.safetensors")
    stored["mtp.layers.0.mixer.q_proj.weight"] = torch.ones(3, 3)
    stored["backbone.layers.3.mixer.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, folder / "model.safetensors")
    sheets: list[BalanceSheet] = []
    convert(folder, tmp_path / "checkpoint", report=sheets.append)
    sheet = sheets[0]
    ignored = [name for names in sheet.ignored.values() for name in names]
    assert sorted(ignored) == ["backbone.layers.3.mixer.rotary_emb.inv_freq", "mtp.layers.0.mixer.q_proj.weight"]
    assert sheet.num_used + len(ignored) == len(stored)
    assert sheet.used_bytes == sum(t.nbytes for t in stored.values()) - 9 * 4 - 8 * 4
    assert sheet.written_bytes == (tmp_path / "checkpoint" / "rank0.safetensors").stat().st_size
    assert any("mtp." in line for line in sheet.lines())


def test_a_stored_output_matrix_wins_over_the_promise_to_tie_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_nemotron_h(tmp_path / "hf", pattern="M")
    edit_config(folder, tie_word_embeddings=True)
    run_by_transformers = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    sheets: list[BalanceSheet] = []
    checkpoint = convert(folder, tmp_path / "checkpoint", report=sheets.append)
    geometry = read_config(checkpoint)
    assert not geometry.tie_word_embeddings
    assert torch.equal(load_weights(checkpoint, geometry)["lm_head.weight"], run_by_transformers)
    assert "differs from the embedding" in sheets[0].notes[0]
    opened = open_model_folder(folder)
    assert opened.geometry == geometry
    opened.load_weights()
    assert [record.getMessage() for record in caplog.records] == [f"{folder}: {sheets[0].notes[0]}"]


@pytest.mark.parametrize("stored", [True, False], ids=["equal-copy", "absent"])
def test_a_tied_output_matrix_is_stored_once(tmp_path: Path, stored: bool) -> None:
    folder = make_nemotron_h(tmp_path / "hf", pattern="M", tied=True)
    if not stored:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    checkpoint = convert(folder, tmp_path / "checkpoint")
    geometry = read_config(checkpoint)
    assert geometry.tie_word_embeddings
    assert "lm_head.weight" not in load_weights(checkpoint, geometry)


def test_weights_load_in_another_type_except_the_recurrences_constants(tmp_path: Path, tiny_folder: Path) -> None:
    checkpoint = convert(tiny_folder, tmp_path / "checkpoint")
    geometry = read_config(checkpoint).model_copy(update={"dtype": "bfloat16"})
    weights = load_weights(checkpoint, geometry)
    assert weights["embedding.weight"].dtype == torch.bfloat16
    assert {weights[f"layers.0.mixer.{name}"].dtype for name in ("A", "D", "dt_bias")} == {torch.float32}
    assert open_model_folder(checkpoint, "bfloat16").load_weights()["embedding.weight"].dtype == torch.bfloat16


def test_an_empty_output_folder_is_filled(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "deep" / "checkpoint").mkdir(parents=True)
    convert(tiny_folder, tmp_path / "deep" / "checkpoint")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["checkpoint"]


def test_an_engine_folder_is_told_by_its_manifest(tmp_path: Path, tiny_folder: Path) -> None:
    folder = convert(tiny_folder, tmp_path / "engine")
    geometry = read_config(folder)
    manifest = Manifest(
        package_version="1",
        backend="tensorrt_rtx",
        backend_version="1",
        compute_capabilities=(89,),
        geometry=geometry,
        replay=ReplayGeometry(),
        limits=EngineLimits(max_batch_size=1, max_input_len=1, max_seq_len=1, max_num_tokens=1),
        tensors=(),
        profiles=(),
        plugins=(),
        weights="external",
        checkpoint=CheckpointRecord(),
        engine_sha256="0",
        engine_bytes=0,
    )
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    opened = open_model_folder(folder)
    assert (opened.kind, opened.geometry, opened.has_weights) == ("engine", geometry, True)
    assert_same(opened.load_weights(), load_weights(folder, geometry))
    with pytest.raises(CheckpointError, match="converted already"):
        convert(folder, tmp_path / "again")
    (folder / MANIFEST_FILE).write_text("{}")
    with pytest.raises(ManifestError):
        open_model_folder(folder)
