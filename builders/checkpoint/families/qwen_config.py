"""config.json of a dense Qwen3-Next or Qwen3.5 model -> ``ModelGeometry``.

A layer of these models is two of ours: a recurrence or attention, then an MLP, each behind its norm.
"""

from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.families.qwen_keys import KEYS, ROPE_KEYS
from trtllm_replayssm.builders.checkpoint.hf_reader import HfConfig, Reader, make_geometry, shown
from trtllm_replayssm.contract.geometry import (
    AttentionGeometry,
    GatedDeltaNetGeometry,
    LayerType,
    MlpGeometry,
    MtpGeometry,
)
from trtllm_replayssm.errors import ConfigError

_ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}
_LAYER_TYPES = {"linear_attention": LayerType.GATED_DELTA_NET, "full_attention": LayerType.ATTENTION}
# What transformers takes where a config has no such key.
_PARTIAL_ROTARY_FACTOR = 0.25
_SPARSE_STEP = 1
# The keys of a multimodal config that say something else than the same keys of its text part.
_OUTER_ALONE = ("architectures", "model_type", "transformers_version")


def parse_multimodal(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str | None) -> HfConfig:
    """Find the text part of a multimodal config, and turn it into a geometry; as ``hf_config.parse_hf_config``."""
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != "qwen3_5_text":
        raise ConfigError(
            f"config.json: text_config: found {_kind_of_text(text)}; needed the text part, with model_type "
            "'qwen3_5_text'."
        )
    outer = {key: value for key, value in config.items() if key not in _OUTER_ALONE}
    differing = sorted(
        key for key in outer.keys() & text.keys() if None not in (outer[key], text[key]) and outer[key] != text[key]
    )
    if differing:
        raise ConfigError(
            f"config.json: found {', '.join(differing)} with one value, and another one in text_config; needed the "
            "same in both."
        )
    return parse(outer | {key: value for key, value in text.items() if value is not None}, generation, dtype)


def _kind_of_text(text: Any) -> str:
    return f"one of model_type {shown(text.get('model_type'))}" if isinstance(text, dict) else shown(text)


def parse(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str | None) -> HfConfig:
    """Turn a parsed config into a geometry; as ``hf_config.parse_hf_config``."""
    reader = Reader(config, KEYS)
    reader.check_keys()
    mixers = _mixers(reader)
    _refuse_experts(reader, len(mixers))
    vocab_size = reader.positive("vocab_size", stand_in=2**31)
    values: dict[str, Any] = {
        "architecture": _ARCHITECTURES[config["model_type"]],
        "dtype": reader.dtype(dtype),
        "vocab_size": vocab_size,
        "d_model": reader.positive("d_model"),
        "layer_types": tuple(layer for mixer in mixers for layer in (mixer, LayerType.MLP)),
        "norm_eps": reader.norm_eps(),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "mamba2": None,
        "gated_delta_net": _gated_delta_net(reader) if LayerType.GATED_DELTA_NET in mixers else None,
        "attention": _attention(reader) if LayerType.ATTENTION in mixers else None,
        "mlp": MlpGeometry(d_ff=reader.positive("d_ff"), activation="swiglu"),
        "eos_token_ids": reader.end_tokens(generation, vocab_size),
    }
    return HfConfig(make_geometry(reader, values), use_conv_bias=False, mtp=_mtp(reader))


def _mtp(reader: Reader) -> MtpGeometry | str:
    """Return the multi-token prediction head: a layer of attention and MLP, one where the config does not say."""
    count, has_embeddings = reader.value("mtp_layers"), reader.value("mtp_use_dedicated_embeddings")
    if count not in (None, 1):
        return reasons.MTP_LAYERS.format(f"{reader.label('mtp_layers')}={count!r}")
    if has_embeddings:
        return reasons.MTP_EMBEDDINGS
    return MtpGeometry(layer_types=(LayerType.ATTENTION, LayerType.MLP))


def _mixers(reader: Reader) -> tuple[LayerType, ...]:
    """Return what each layer has in front of its MLP: as listed, or attention in every n-th layer."""
    listed, interval = reader.value("layer_types"), reader.value("full_attention_interval")
    if listed is None and interval is None:
        reader.problems.append("found no layers; needed layer_types or full_attention_interval")
        return ()
    count = reader.positive("num_layers")
    regular = None
    if interval is not None:
        every = reader.positive("full_attention_interval")
        regular = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if listed is None:
        listed = regular
    if not isinstance(listed, list):
        reader.problems.append(f"layer_types: found {listed!r}; needed a list")
        return ()
    for i, item in enumerate(listed):
        if item not in list(_LAYER_TYPES):
            reader.problems.append(f"layer_types[{i}]: found {item!r}; needed one of {', '.join(_LAYER_TYPES)}")
    if len(listed) != count:
        reader.problems.append(f"num_hidden_layers: found {count}; needed {len(listed)}, the layers of layer_types")
    elif regular is not None and listed != regular:
        reader.problems.append("layer_types and full_attention_interval: found different layers; needed the same")
    return tuple(_LAYER_TYPES[item] for item in listed if item in list(_LAYER_TYPES))


def _refuse_experts(reader: Reader, num_layers: int) -> None:
    """Note layers with a mixture of experts; transformers takes 512 experts where a Qwen3-Next config says none."""
    experts = reader.value("num_experts")
    if experts is None and reader.config.get("model_type") == "qwen3_next":
        reader.problems.append("num_experts: found nothing; needed 0, a model without experts")
        return
    step, without = reader.value("decoder_sparse_step"), reader.value("mlp_only_layers") or []
    step = _SPARSE_STEP if step is None else step
    if not isinstance(step, int) or step < 1 or not isinstance(without, list):
        reader.problems.append(
            f"decoder_sparse_step, mlp_only_layers: found {step!r}, {without!r}; needed a whole number and a list"
        )
        return
    sparse = [i for i in range(num_layers) if i not in without and (i + 1) % step == 0]
    if experts and sparse:
        reader.unsupported.append(
            f"num_experts: found {experts!r}, in {len(sparse)} of {num_layers} layers; this version has dense MLPs "
            "only (0)"
        )


def _gated_delta_net(reader: Reader) -> GatedDeltaNetGeometry:
    names = ("n_key_heads", "n_value_heads", "key_dim", "value_dim", "d_conv")
    geometry = GatedDeltaNetGeometry(
        **{name: reader.positive(name, stand_in=int(name != "n_value_heads")) for name in names}
    )
    reader.check_multiple("n_value_heads", geometry.n_value_heads, "n_key_heads", geometry.n_key_heads)
    return geometry


def _attention(reader: Reader) -> AttentionGeometry:
    n_query_heads, n_kv_heads = reader.positive("n_query_heads", stand_in=0), reader.positive("n_kv_heads")
    reader.check_multiple("n_query_heads", n_query_heads, "n_kv_heads", n_kv_heads)
    head_dim = reader.positive("head_dim", stand_in=2**10)
    rotary_dim, theta = _rotary(reader, head_dim)
    return AttentionGeometry(
        n_query_heads=n_query_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        has_qk_norm=True,
        has_output_gate=True,
    )


def _rotary(reader: Reader, head_dim: int) -> tuple[int, float | None]:
    """Return rotated channels and base, said by an object of their own, beside it, or both."""
    said = reader.value("rope") or {}
    if not isinstance(said, dict):
        reader.problems.append(f"{reader.label('rope')}: found {said!r}; needed an object")
        said = {}
    rope = Reader(said, ROPE_KEYS, reader.problems, reader.unsupported)
    rope.check_keys()
    theta = _number(reader, rope, "rope_theta", None)
    factor = _number(reader, rope, "partial_rotary_factor", _PARTIAL_ROTARY_FACTOR)
    rotary_dim = int(head_dim * factor)
    if 2 <= rotary_dim <= head_dim and rotary_dim % 2 == 0:
        return rotary_dim, theta
    reader.problems.append(
        f"partial_rotary_factor: found {factor} with head_dim={head_dim}, {rotary_dim} rotated channels; needed an "
        f"even number of 2 to {head_dim}"
    )
    return 0, None


def _number(reader: Reader, rope: Reader, name: str, default: float | None) -> float:
    values = [value for value in (rope.value(name), reader.value(name)) if value is not None]
    if len(values) == 2 and values[0] != values[1]:
        reader.problems.append(
            f"{name}: found {values[0]!r} in {reader.label('rope')} and {values[1]!r} beside it; needed one value"
        )
    value = values[0] if values else default
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    reader.problems.append(f"{name}: found {shown(value)}; needed a number above 0")
    return 1.0
