"""Conversions of Qwen folders: every value under its own name, one layout; vision part and MTP head left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_qwen
from trtllm_replayssm.builders.checkpoint.convert import BalanceSheet, convert
from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import load_weights, make_config, read_config
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.errors import CheckpointError

PATTERN = "G*G"
HK, HV, K, V = 2, 6, 8, 12
HQ, HKV, HD = 6, 2, 24
SHAPE: dict[str, Any] = {
    "pattern": PATTERN,
    "n_key_heads": HK,
    "n_value_heads": HV,
    "key_dim": K,
    "value_dim": V,
    "n_query_heads": HQ,
    "n_kv_heads": HKV,
    "attention_head_dim": HD,
}
FAMILIES = ["qwen3_5", "qwen3_next", "qwen3_5_multimodal"]


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("model.").removeprefix("language_model."): t for name, t in tensors.items()}


def expected_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Write down by hand what a rank checkpoint holds, row by row, from the stored tensors."""
    stored = stored_tensors(folder)
    expected = {"embedding.weight": stored["embed_tokens.weight"]}
    if "lm_head.weight" in stored:
        expected["lm_head.weight"] = stored["lm_head.weight"]
    fp32 = {"final_norm.weight": 1 + stored["norm.weight"].float()}
    for j, letter in enumerate(PATTERN):
        layer, mixer, mlp = f"layers.{j}.", f"layers.{2 * j}.mixer.", f"layers.{2 * j + 1}.mixer."
        fp32[f"layers.{2 * j}.norm.weight"] = 1 + stored[layer + "input_layernorm.weight"].float()
        fp32[f"layers.{2 * j + 1}.norm.weight"] = 1 + stored[layer + "post_attention_layernorm.weight"].float()
        gate_up = [stored[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        expected[mlp + "gate_up_proj.weight"] = torch.cat(gate_up)
        expected[mlp + "down_proj.weight"] = stored[layer + "mlp.down_proj.weight"]
        if letter == "*":
            attention = layer + "self_attn."
            q = stored[attention + "q_proj.weight"]
            heads = [q[2 * HD * h : 2 * HD * h + HD] for h in range(HQ)]
            gates = [q[2 * HD * h + HD : 2 * HD * (h + 1)] for h in range(HQ)]
            keys_values = [stored[attention + f"{part}_proj.weight"] for part in "kv"]
            expected[mixer + "qkv.weight"] = torch.cat([*heads, *keys_values, *gates])
            expected[mixer + "o_proj.weight"] = stored[attention + "o_proj.weight"]
            for part in "qk":
                fp32[f"{mixer}{part}_norm.weight"] = 1 + stored[f"{attention}{part}_norm.weight"].float()
            continue
        linear = layer + "linear_attn."
        expected[mixer + "in_proj.weight"] = in_proj(stored, linear)
        expected[mixer + "conv1d.weight"] = stored[linear + "conv1d.weight"][:, 0, :]
        expected[mixer + "conv1d.bias"] = torch.zeros(2 * HK * K + HV * V)
        expected[mixer + "norm.weight"] = stored[linear + "norm.weight"]
        expected[mixer + "out_proj.weight"] = stored[linear + "out_proj.weight"]
        for name in ("A_log", "dt_bias"):
            fp32[mixer + name] = stored[linear + name].float()
    return {name: tensor.to(dtype) for name, tensor in expected.items()} | fp32


def in_proj(stored: dict[str, torch.Tensor], linear: str) -> torch.Tensor:
    if linear + "in_proj_qkv.weight" in stored:
        return torch.cat([stored[f"{linear}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
    # Per key head of Qwen3-Next: q, k, then v and z of its value heads; b and a of its value heads.
    qkvz, ba = stored[linear + "in_proj_qkvz.weight"], stored[linear + "in_proj_ba.weight"]
    shared = HV // HK
    rows: dict[str, list[torch.Tensor]] = {part: [] for part in "qkvzba"}
    for h in range(HK):
        first = h * (2 * K + 2 * shared * V)
        for part, length in (("q", K), ("k", K), ("v", shared * V), ("z", shared * V)):
            rows[part].append(qkvz[first : first + length])
            first += length
        rows["b"].append(ba[2 * shared * h : 2 * shared * h + shared])
        rows["a"].append(ba[2 * shared * h + shared : 2 * shared * (h + 1)])
    return torch.cat([row for part in "qkvzba" for row in rows[part]])


def assert_same(found: dict[str, torch.Tensor], needed: dict[str, torch.Tensor]) -> None:
    assert found.keys() == needed.keys()
    for name, tensor in needed.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_checkpoint_holds_the_models_values_in_one_layout(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_qwen(tmp_path / "hf", family, tied=tied, **SHAPE)
    checkpoint = convert(folder, tmp_path / "checkpoint")
    geometry = read_config(checkpoint)
    assert geometry.tie_word_embeddings is tied
    weights = load_weights(checkpoint, geometry)
    assert list(weights) == [spec.name for spec in weight_specs(geometry)]
    assert_same(weights, expected_tensors(folder, torch.float32))
    assert_same(open_model_folder(folder).load_weights(), weights)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_norms_keep_fp32_where_one_is_added_to_16_bits(tmp_path: Path, family: str) -> None:
    folder = make_qwen(tmp_path / "hf", family, dtype="bfloat16", **SHAPE)
    checkpoint = convert(folder, tmp_path / "checkpoint")
    geometry = read_config(checkpoint)
    assert geometry.dtype == "bfloat16"
    weights = load_weights(checkpoint, geometry)
    assert_same(weights, expected_tensors(folder, torch.bfloat16))
    stored = stored_tensors(folder)["layers.0.input_layernorm.weight"]
    assert torch.equal((weights["layers.0.norm.weight"] - 1).bfloat16(), stored), "no bit of a stored norm is lost"


def test_the_config_has_the_keys_of_a_rank_checkpoint(tmp_path: Path) -> None:
    config = make_config(read_config(convert(make_qwen(tmp_path / "hf", **SHAPE), tmp_path / "checkpoint")))
    assert config["architecture"] == "Qwen3_5ForCausalLM"
    assert config["layer_types"] == ["gated_delta_net", "mlp", "attention", "mlp", "gated_delta_net", "mlp"]
    assert (config["position_embedding_type"], config["rotary_base"], config["rotary_pct"]) == (
        "rope_gpt_neox",
        10000.0,
        0.25,
    )
    assert (config["linear_num_value_heads"], config["hidden_act"], config["head_size"]) == (HV, "swiglu", HD)


def test_vision_part_and_prediction_head_are_left_out_by_name(tmp_path: Path) -> None:
    folder = make_qwen(tmp_path / "hf", "qwen3_5_multimodal", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    vision = [name for name in tensors if name.startswith("model.visual.")]
    assert len(vision) > 10
    head = ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"]
    save_file(tensors | {name: torch.ones(3, 3) for name in head}, folder / "model.safetensors")
    sheets: list[BalanceSheet] = []
    convert(folder, tmp_path / "checkpoint", report=sheets.append)
    by_reason = {reason: set(names) for reason, names in sheets[0].ignored.items()}
    assert by_reason == {
        reasons.MTP_INCOMPLETE.format("mtp.pre_fc_norm_embedding.weight: missing; needed [64]"): set(head),
        "the vision part of a multimodal model; the text part alone is run": set(vision),
    }
    assert sheets[0].num_used + len(vision) == len(tensors)
    assert not sheets[0].notes
    assert any("the vision part" in line and "model.visual" in line for line in sheets[0].lines())


def test_a_missing_a_misshapen_and_a_foreign_tensor_are_told_together(tmp_path: Path) -> None:
    folder = make_qwen(tmp_path / "hf", "qwen3_next", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.linear_attn.in_proj_ba.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.ones(HQ * HD, 64)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "checkpoint")
    for part in (
        f"layers.0.linear_attn.in_proj_ba.weight: missing; needed [{2 * HV}, 64]",
        f"model.layers.1.self_attn.q_proj.weight: found [{HQ * HD}, 64]; needed [{2 * HQ * HD}, 64]",
        "model.layers.0.mlp.experts.0.up_proj.weight: unexpected [2]",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "checkpoint").exists()


def test_a_stored_output_matrix_that_differs_is_run_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_qwen(tmp_path / "hf", tied=True, **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_by_transformers = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    sheets: list[BalanceSheet] = []
    checkpoint = convert(folder, tmp_path / "checkpoint", report=sheets.append)
    geometry = read_config(checkpoint)
    assert torch.equal(load_weights(checkpoint, geometry)["lm_head.weight"], run_by_transformers)
    assert "differs from the embedding" in sheets[0].notes[0]
