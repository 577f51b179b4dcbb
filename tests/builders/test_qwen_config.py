"""config.json of the Qwen models -> geometry: published values, both spellings of layers and rotation, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import edit_config, make_qwen
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config, read_hf_config, read_json
from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    AttentionGeometry,
    GatedDeltaNetGeometry,
    LayerType,
    MlpGeometry,
    ModelGeometry,
)
from trtllm_replayssm.contract.memory import checkpoint_bytes, ring_row_bytes, tensor_bytes
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.errors import ConfigError, UnsupportedError

PUBLISHED = Path(__file__).parents[1] / "data" / "qwen3_5_9b_config.json"


def outer(**changes: Any) -> dict[str, Any]:
    """Return the multimodal config; the value ``...`` removes a key."""
    return merged(read_json(PUBLISHED), changes)


def text(**changes: Any) -> dict[str, Any]:
    """Return the text part's config by itself."""
    alone = {"architectures": ["Qwen3_5ForCausalLM"], **read_json(PUBLISHED)["text_config"]}
    return merged(alone, changes)


def next_text(**changes: Any) -> dict[str, Any]:
    """Return the text part in the words of Qwen3-Next's published configs, without experts."""
    old = text(
        model_type="qwen3_next",
        architectures=["Qwen3NextForCausalLM"],
        layer_types=...,
        rope_parameters=...,
        rope_theta=10000000,
        rope_scaling=None,
        num_experts=0,
        decoder_sparse_step=1,
        mtp_num_hidden_layers=...,
        torch_dtype="bfloat16",
        dtype=...,
    )
    return merged(old, changes)


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | changes).items() if value is not ...}


def parse(config: dict[str, Any]) -> ModelGeometry:
    return parse_hf_config(config, {}).geometry


def test_the_published_9b_config_gives_its_published_shapes() -> None:
    geometry = parse(outer())
    assert (geometry.architecture, geometry.dtype) == ("Qwen3_5ForCausalLM", "bfloat16")
    assert (geometry.d_model, geometry.vocab_size, geometry.norm_eps) == (4096, 248320, 1e-6)
    assert geometry.eos_token_ids == (248044,)
    assert geometry.layers_of(LayerType.ATTENTION) == tuple(range(6, 64, 8))
    assert geometry.layers_of(LayerType.MLP) == tuple(range(1, 64, 2))
    assert len(geometry.layers_of(LayerType.GATED_DELTA_NET)) == 24
    assert geometry.gated_delta_net == GatedDeltaNetGeometry(
        n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, d_conv=4
    )
    assert geometry.gated_delta_net.conv_dim == 8192
    assert geometry.attention == AttentionGeometry(
        n_query_heads=16,
        n_kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        has_qk_norm=True,
        has_output_gate=True,
    )
    assert geometry.mlp == MlpGeometry(d_ff=12288, activation="swiglu")
    assert not parse_hf_config(outer(), {}).use_conv_bias


def test_the_published_9b_model_has_its_published_size() -> None:
    specs = weight_specs(parse(outer()))
    parameters = sum(tensor_bytes(spec) // DTYPE_BYTES[spec.dtype] for spec in specs)
    zero_biases = 24 * 8192  # ours alone: the convolution's plugin has a bias
    # Published: 9,653 M parameters, of which the vision part's 333 tensors and the prediction head's 15 are left out.
    assert parameters - zero_biases == 8_953_803_264


def test_the_bytes_of_a_slot_are_those_of_its_heads() -> None:
    geometry = parse(outer())
    assert checkpoint_bytes(geometry, "float32") == 24 * 32 * 128 * 128 * 4
    assert ring_row_bytes(geometry) == 24 * (16 * 128 * 2 + 32 * 128 * 4 + 32 * 4)


def test_the_text_part_alone_and_within_a_multimodal_config_are_one_model() -> None:
    assert parse(text()) == parse(outer())


@pytest.mark.parametrize(
    "config",
    [
        text(layer_types=...),
        text(full_attention_interval=...),
        text(partial_rotary_factor=...),
        text(rope_parameters=..., rope_theta=10000000),
        text(rope_parameters=..., rope_theta=10000000, partial_rotary_factor=..., rope_scaling=None),
        text(rope_parameters=..., rope_scaling={"type": "default", "rope_theta": 1e7}),
        text(num_experts=0),
        text(num_experts=4, mlp_only_layers=list(range(32))),
        text(num_experts=4, decoder_sparse_step=33),
        text(dtype=..., torch_dtype="bfloat16"),
        text(architectures=...),
        outer(tie_word_embeddings=...),
        outer(text_config=merged(text(), {"tie_word_embeddings": ..., "architectures": ...})),
        outer(dtype="bfloat16"),
    ],
)
def test_every_spelling_gives_one_geometry(config: dict[str, Any]) -> None:
    assert parse(config) == parse(outer())


def test_qwen3_next_without_experts_is_the_same_geometry_under_its_own_name() -> None:
    assert parse(next_text()) == parse(outer()).model_copy(update={"architecture": "Qwen3NextForCausalLM"})


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_multimodal"])
def test_what_transformers_writes_is_read(tmp_path: Path, family: str) -> None:
    geometry = read_hf_config(make_qwen(tmp_path / "model", family, tied=True, partial_rotary_factor=0.5)).geometry
    assert geometry.tie_word_embeddings and geometry.norm_dtype == "float32"
    assert geometry.attention is not None
    assert (geometry.attention.rotary_dim, geometry.attention.rope_theta) == (16, 10000.0)
    assert [layer.value for layer in geometry.layer_types[4:6]] == ["attention", "mlp"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (text(wobble=1), "unknown keys wobble"),
        (outer(wobble=1), "unknown keys wobble"),
        (text(rope_parameters={"rope_theta": 1e7, "wobble": 1}), "unknown keys wobble"),
        (text(layer_types=..., full_attention_interval=...), "found no layers; needed layer_types or full_attention_"),
        (text(full_attention_interval=3), "layer_types and full_attention_interval: found different layers"),
        (text(num_hidden_layers=31, full_attention_interval=...), "num_hidden_layers: found 31; needed 32"),
        (text(layer_types=["mamba"] * 32), r"layer_types\[0\]: found 'mamba'; needed one of linear_attention, full_at"),
        (text(layer_types="linear_attention"), "layer_types: found 'linear_attention'; needed a list"),
        (text(layer_types=[["a"]] * 32), r"layer_types\[0\]: found \['a'\]; needed one of"),
        (text(linear_num_value_heads=24), "linear_num_value_heads: found 24 with linear_num_key_heads=16; needed a mu"),
        (text(num_key_value_heads=3), "num_attention_heads: found 16 with num_key_value_heads=3; needed a multiple"),
        (text(partial_rotary_factor=0.5), "partial_rotary_factor: found 0.25 in rope_parameters and 0.5 beside it"),
        (text(partial_rotary_factor=0.0, rope_parameters={"rope_theta": 1e7}), "partial_rotary_factor: found 0.0; nee"),
        (text(head_dim=20, partial_rotary_factor=0.25), "head_dim=20, 5 rotated channels; needed an even number"),
        (text(rope_parameters=...), "rope_theta: found nothing; needed a number above 0"),
        (text(rope_parameters=[1]), r"rope_parameters: found \[1\]; needed an object"),
        (text(rope_theta=1e6), "rope_theta: found 10000000 in rope_parameters and 1000000.0 beside it; needed one"),
        (text(linear_key_head_dim=0), "linear_key_head_dim: found 0; needed a whole number"),
        (text(head_dim=...), "head_dim: found nothing; needed a whole number"),
        (text(num_experts=2, mlp_only_layers=3), r"decoder_sparse_step, mlp_only_layers: found 1, 3; needed"),
        (next_text(num_experts=...), "num_experts: found nothing; needed 0, a model without experts"),
        (outer(text_config=...), "text_config: found nothing; needed the text part, with model_type 'qwen3_5_text'"),
        (outer(text_config={"model_type": "qwen3"}), "text_config: found one of model_type 'qwen3'; needed"),
        (outer(tie_word_embeddings=True), "found tie_word_embeddings with one value, and another one in text_config"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (outer(model_type="qwen3_5_moe"), "found model_type 'qwen3_5_moe', a mixture of experts"),
        (text(model_type="qwen3_5_moe_text"), "This version converts dense Nemotron-H, Qwen3-Next and Qwen3.5 models"),
        (text(num_experts=8), "num_experts: found 8, in 32 of 32 layers; this version has dense MLPs only"),
        (next_text(num_experts=512, decoder_sparse_step=2), "num_experts: found 512, in 16 of 32 layers"),
        (text(attention_bias=True), "attention_bias"),
        (text(attn_output_gate=False), "attention with an output gate only"),
        (text(output_gate_type="sigmoid"), "the silu gate behind the recurrence only"),
        (text(hidden_act="gelu"), "hidden_act"),
        (text(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7}), "positions that are not scaled only"),
        (outer(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (text(sliding_window=4096), "sliding_window"),
        (text(architectures=["Qwen3_5ForSequenceClassification"]), r"needed 'qwen3_5_text' with \['Qwen3_5ForCausalLM"),
        (text(model_type="qwen3"), "needed one of nemotron_h, qwen3_next, qwen3_5_text, qwen3_5"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_with_the_reason(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        parse(config)


def test_all_problems_are_told_at_once() -> None:
    bad = text(wobble=1, head_dim=0, rope_parameters={"wibble": 1}, num_experts=4, vocab_size=0)
    with pytest.raises(ConfigError) as caught:
        parse(bad)
    for part in (
        "6 problems",
        "wobble",
        "head_dim: found 0",
        "wibble",
        "rope_theta",
        "dense MLPs",
        "vocab_size: found 0",
    ):
        assert part in str(caught.value)


def test_a_published_mixture_of_experts_is_refused_by_its_experts(tmp_path: Path) -> None:
    folder = make_qwen(tmp_path / "model", "qwen3_next", pattern="G*")
    edit_config(folder, num_experts=512)
    with pytest.raises(UnsupportedError, match="num_experts: found 512, in 2 of 2 layers"):
        read_hf_config(folder)
