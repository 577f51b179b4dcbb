"""config.json -> geometry: both spellings, the published values, and one error for everything that is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import edit_config, make_nemotron_h
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config, read_hf_config, read_json
from trtllm_replayssm.contract.geometry import (
    AttentionGeometry,
    LayerType,
    Mamba2Geometry,
    MlpGeometry,
    ModelGeometry,
)
from trtllm_replayssm.errors import CheckpointError, ConfigError, ReplaySSMError, UnsupportedError

PUBLISHED = Path(__file__).parents[1] / "data" / "nemotron_nano_9b_v2_config.json"


def parse_geometry(config: dict[str, Any], dtype: str | None = None) -> ModelGeometry:
    return parse_hf_config(config, {}, dtype).geometry


def read_geometry(folder: Path) -> ModelGeometry:
    return read_hf_config(folder).geometry


def published(**changes: Any) -> dict[str, Any]:
    """Return the published config; the value ``...`` removes a key."""
    config = read_json(PUBLISHED) | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_the_published_nano_9b_v2_config_gives_its_published_shapes() -> None:
    geometry = parse_geometry(published())
    assert geometry.dtype == "bfloat16"
    assert (geometry.d_model, geometry.vocab_size, geometry.norm_eps) == (4480, 131072, 1e-5)
    assert [len(geometry.layers_of(kind)) for kind in LayerType] == [27, 0, 4, 25]
    assert geometry.layers_of(LayerType.ATTENTION) == (14, 21, 30, 39)
    assert geometry.mamba2 == Mamba2Geometry(n_heads=128, head_dim=80, d_state=128, n_groups=8, d_conv=4)
    assert geometry.mamba2.d_inner == 10240, "mamba_num_heads * mamba_head_dim, not expand * hidden_size"
    assert geometry.mamba2.d_in_proj == 10240 + 12288 + 128
    assert geometry.attention == AttentionGeometry(n_query_heads=40, n_kv_heads=8, head_dim=128)
    assert geometry.mlp == MlpGeometry(d_ff=15680, activation="relu2")
    assert geometry.eos_token_ids == (12,)


def test_both_spellings_of_a_config_give_one_geometry(tmp_path: Path) -> None:
    folder = make_nemotron_h(tmp_path / "model", pattern="M-*-MM")
    listed = read_geometry(folder)
    blocks = ["mamba", "mlp", "attention", "mlp", "mamba", "mamba"]
    head_dim = read_json(folder / "config.json")["head_dim"]
    spellings: list[dict[str, object]] = [
        {"layers_block_type": ..., "hybrid_override_pattern": "M-*-MM", "num_hidden_layers": 6},
        {"layers_block_type": blocks},
        {"layers_block_type": ..., "layer_types": blocks},
        {"head_dim": ..., "attention_head_dim": head_dim, "torch_dtype": "torch.float32", "dtype": ...},
        {"layer_norm_epsilon": ..., "rms_norm_eps": 1e-5, "time_step_limit": [0.0, float("inf")]},
    ]
    for changes in spellings:
        edit_config(folder, **changes)
        assert read_geometry(folder) == listed, changes


def test_infinity_is_read_as_json_writers_and_transformers_spell_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [0.0, Infinity], "b": [0.0, {"__float__": "Infinity"}]}')
    assert read_json(path)["a"] == read_json(path)["b"] == [0.0, float("inf")]


def test_the_asked_dtype_replaces_the_stored_one() -> None:
    assert parse_geometry(published(), "float16").dtype == "float16"
    assert parse_geometry(published(), "auto").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"found 'int8'; needed auto, float32, float16, bfloat16"):
        parse_geometry(published(), "int8")


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    folder = make_nemotron_h(tmp_path / "model", pattern="M")
    assert read_geometry(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 5]}))
    assert read_geometry(folder).eos_token_ids == (5, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    edit_config(folder, eos_token_id=[7, 8])
    assert read_geometry(folder).eos_token_ids == (7, 8)


def test_a_model_without_a_layer_type_has_no_geometry_of_it() -> None:
    geometry = parse_geometry(published(hybrid_override_pattern="MM", num_hidden_layers=2))
    assert geometry.attention is None
    assert geometry.mlp is None


def test_the_convolution_bias_is_stored_unless_the_config_says_otherwise() -> None:
    assert parse_hf_config(published(), {}).use_conv_bias
    assert parse_hf_config(published(use_conv_bias=...), {}).use_conv_bias
    assert not parse_hf_config(published(use_conv_bias=False), {}).use_conv_bias


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"wobble": 1}, r"unknown keys wobble"),
        ({"num_hidden_layers": 57}, r"num_hidden_layers: found 57; needed 56, the layers of hybrid_override_pattern"),
        ({"layers_block_type": ["mamba"] * 56}, r"hybrid_override_pattern and layers_block_type: found different"),
        (
            {"hybrid_override_pattern": "M-L", "num_hidden_layers": 3},
            r"hybrid_override_pattern\[2\]: found 'L'; needed",
        ),
        ({"hybrid_override_pattern": ["M"]}, r"hybrid_override_pattern: found \['M'\]; needed a str"),
        ({"hybrid_override_pattern": ...}, r"found no layers"),
        ({"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon=1e-06, rms_norm_eps=1e-05; needed one value"),
        ({"attention_head_dim": 64}, r"head_dim=128, attention_head_dim=64; needed one value"),
        ({"mamba_num_heads": ...}, r"mamba_num_heads: found nothing; needed a whole number"),
        ({"hidden_size": "4480"}, r"hidden_size: found '4480'; needed a whole number"),
        ({"vocab_size": True}, r"vocab_size: found True; needed a whole number"),
        ({"n_groups": 7}, r"mamba_num_heads: found 128 with n_groups=7; needed a multiple"),
        ({"num_key_value_heads": 3}, r"num_attention_heads: found 40 with num_key_value_heads=3; needed a multiple"),
        ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype: found float8_e4m3fn; needed one of"),
        ({"torch_dtype": ...}, r"dtype: found nothing; needed one of"),
        ({"eos_token_id": 131072}, r"eos_token_id: found \[131072\]; needed token ids below vocab_size"),
        ({"eos_token_id": True}, r"eos_token_id: found \[True\]; needed token ids"),
        (
            {"hybrid_override_pattern": "---", "num_hidden_layers": 3},
            "found no recurrent and no attention layer; needed one at least",
        ),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings: found 'no'; needed true or false"),
        (
            {"rms_norm_eps": math.nan, "layer_norm_epsilon": ...},
            r"^config.json: rms_norm_eps: found nan; needed a number between",
        ),
        ({"rms_norm_eps": 0, "layer_norm_epsilon": ...}, r"rms_norm_eps: found 0; needed a number between"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_key_is_an_error_that_names_it(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_geometry(published(**changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4},
            r"2 expert layers \(1, 3\); experts: not supported",
        ),
        ({"use_bias": True}, r"use_bias: found True; this version has linear layers without bias only"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: found 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act: found 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window: found 4096"),
        ({"residual_in_fp32": True}, "residual_in_fp32: found True"),
        ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"found model_type 'llama'"),
        ({"architectures": ["NemotronHForSequenceClassification"]}, "NemotronHForSequenceClassification"),
        ({"model_type": ...}, "found model_type nothing"),
        ({"architectures": 5}, r"architectures 5; needed 'nemotron_h' with \['NemotronHForCausalLM'\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_model_that_is_not_supported_is_refused_with_the_reason(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        parse_geometry(published(**changes))


def test_all_problems_are_told_at_once() -> None:
    bad = published(wobble=1, wibble=2, use_bias=True, num_hidden_layers=3, vocab_size=0)
    with pytest.raises(ConfigError) as caught:
        parse_geometry(bad)
    for part in ("4 problems", "wibble, wobble", "use_bias", "num_hidden_layers: found 3", "vocab_size: found 0"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", "\x00", "", "[" * 200_000, "1" * 5000),
        *('{"a": {"__float__": [1]}}', '{"a": {"__float__": null}}', '{"a": {"__float__": "x"}}'),
    ],
    ids=["cut", "list", "binary", "empty", "nested", "long-number", "float-list", "float-null", "float-word"],
)
def test_a_config_that_is_no_json_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: found"):
        read_geometry(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PUBLISHED.read_text(), encoding="utf-8-sig")
    assert read_geometry(tmp_path) == parse_geometry(published())


def test_every_error_of_a_config_is_a_value_error_of_ours() -> None:
    with pytest.raises(ReplaySSMError) as caught:
        parse_geometry(published(hidden_size=None))
    assert isinstance(caught.value, ValueError)
