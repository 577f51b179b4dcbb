"""config.json of a dense Nemotron-H model -> ``ModelGeometry``."""

from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.families.nemotron_h_keys import KEYS
from trtllm_replayssm.builders.checkpoint.hf_reader import HfConfig, Reader, make_geometry
from trtllm_replayssm.contract.geometry import (
    LAYER_LETTERS,
    AttentionGeometry,
    LayerType,
    Mamba2Geometry,
    MlpGeometry,
    MtpGeometry,
)

ARCHITECTURE = "NemotronHForCausalLM"

_LETTERS = {LAYER_LETTERS[layer]: layer for layer in (LayerType.MAMBA2, LayerType.ATTENTION, LayerType.MLP)}
_BLOCK_TYPES = {
    "linear_attention": LayerType.MAMBA2,
    "mamba": LayerType.MAMBA2,
    "full_attention": LayerType.ATTENTION,
    "attention": LayerType.ATTENTION,
    "mlp": LayerType.MLP,
}
_EXPERT_NAMES = ("E", "moe")


def parse(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str | None) -> HfConfig:
    """Turn a parsed config into a geometry; as ``hf_config.parse_hf_config``."""
    reader = Reader(config, KEYS)
    reader.check_keys()
    layers = _layers(reader)
    vocab_size = reader.positive("vocab_size", stand_in=2**31)
    values: dict[str, Any] = {
        "architecture": ARCHITECTURE,
        "dtype": reader.dtype(dtype),
        "vocab_size": vocab_size,
        "d_model": reader.positive("d_model"),
        "layer_types": layers,
        "norm_eps": reader.norm_eps(),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "mamba2": _mamba2(reader) if LayerType.MAMBA2 in layers else None,
        "attention": _attention(reader) if LayerType.ATTENTION in layers else None,
        "mlp": MlpGeometry(d_ff=reader.positive("d_ff"), activation="relu2") if LayerType.MLP in layers else None,
        "eos_token_ids": reader.end_tokens(generation, vocab_size),
    }
    use_conv_bias = reader.flag("use_conv_bias", True)
    return HfConfig(make_geometry(reader, values), use_conv_bias, _mtp(reader))


def _mtp(reader: Reader) -> MtpGeometry | str:
    """Return the multi-token prediction head: the layers of its own pattern, with nothing of them a problem."""
    count = reader.value("mtp_layers")
    if count not in (None, 1):
        return reasons.MTP_LAYERS.format(f"{reader.label('mtp_layers')}={count!r}")
    pattern = reader.value("mtp_pattern")
    found = reader.value("mtp_block_types") if pattern is None else pattern
    items = found if isinstance(found, str | list) else []
    layers = [(_LETTERS | _BLOCK_TYPES).get(str(item)) for item in items]
    known = tuple(layer for layer in layers if layer in (LayerType.ATTENTION, LayerType.MLP))
    if not known or len(known) != len(layers):
        return reasons.MTP_PATTERN.format(repr(found))
    return MtpGeometry(layer_types=known)


def _layers(reader: Reader) -> tuple[LayerType, ...]:
    spelled = {
        "hybrid_override_pattern": (reader.value("pattern"), _LETTERS, str),
        reader.label("block_types"): (reader.value("block_types"), _BLOCK_TYPES, list),
    }
    parsed = {
        key: _parse_layers(reader, key, value, names)
        for key, (value, names, kind) in spelled.items()
        if value is not None and _is_a(reader, key, value, kind)
    }
    if len(set(parsed.values())) > 1:
        reader.problems.append(f"{' and '.join(parsed)}: found different layers; needed the same. Remove one of them")
    layers = next(iter(parsed.values()), ())
    if not layers and not reader.problems:
        reader.problems.append("found no layers; needed hybrid_override_pattern or layers_block_type")
    count = reader.value("num_layers")
    if parsed and count is not None and count != len(layers):
        key = next(iter(parsed))
        reader.problems.append(f"num_hidden_layers: found {count!r}; needed {len(layers)}, the layers of {key}")
    return tuple(layer for layer in layers if layer is not None)


def _is_a(reader: Reader, key: str, value: Any, kind: type) -> bool:
    if not isinstance(value, kind):
        reader.problems.append(f"{key}: found {value!r}; needed a {kind.__name__}")
    return isinstance(value, kind)


def _parse_layers(
    reader: Reader, key: str, items: str | list[Any], names: Mapping[str, LayerType]
) -> tuple[LayerType | None, ...]:
    """Name each layer; None for one that has no name here, after the problem is noted."""
    experts = [i for i, item in enumerate(items) if item in _EXPERT_NAMES]
    if experts:
        places = ", ".join(map(str, experts[:6])) + (", ..." if len(experts) > 6 else "")
        reader.unsupported.append(
            f"{key}: found {len(experts)} expert layers ({places}); experts: not supported by this version"
        )
    for i, item in enumerate(items):
        if item not in _EXPERT_NAMES and (not isinstance(item, str) or item not in names):
            reader.problems.append(f"{key}[{i}]: found {item!r}; needed one of {', '.join(names)}")
    return tuple(names.get(item) if isinstance(item, str) else None for item in items)


def _mamba2(reader: Reader) -> Mamba2Geometry:
    names = ("n_heads", "head_dim", "d_state", "n_groups", "d_conv")
    geometry = Mamba2Geometry(**{name: reader.positive(name, stand_in=int(name != "n_heads")) for name in names})
    reader.check_multiple("n_heads", geometry.n_heads, "n_groups", geometry.n_groups)
    return geometry


def _attention(reader: Reader) -> AttentionGeometry:
    n_query_heads, n_kv_heads = reader.positive("n_query_heads", stand_in=0), reader.positive("n_kv_heads")
    reader.check_multiple("n_query_heads", n_query_heads, "n_kv_heads", n_kv_heads)
    head_dim = reader.positive("attention_head_dim")
    return AttentionGeometry(n_query_heads=n_query_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
