"""config.json of a Hugging Face folder -> ``ModelGeometry``; all its problems are told at once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from trtllm_replayssm.builders.checkpoint import hf_keys
from trtllm_replayssm.contract.geometry import (
    LAYER_LETTERS,
    ActivationDtype,
    AttentionGeometry,
    LayerType,
    Mamba2Geometry,
    MlpGeometry,
    ModelGeometry,
)
from trtllm_replayssm.errors import CheckpointError, ConfigError, UnsupportedError, validation_text

MODEL_TYPE = "nemotron_h"
ARCHITECTURE = "NemotronHForCausalLM"
DTYPES: tuple[str, ...] = get_args(ActivationDtype)

_LETTERS = {letter: layer for layer, letter in LAYER_LETTERS.items()}
_BLOCK_TYPES = {
    "linear_attention": LayerType.MAMBA2,
    "mamba": LayerType.MAMBA2,
    "full_attention": LayerType.ATTENTION,
    "attention": LayerType.ATTENTION,
    "mlp": LayerType.MLP,
}
_EXPERT_NAMES = ("E", "moe")


@dataclass(frozen=True)
class HfConfig:
    """What a config.json says.

    Attributes:
        geometry: the model's shape; ``tie_word_embeddings`` as the file has it.
        use_conv_bias: whether the checkpoint stores a bias of the convolution.
    """

    geometry: ModelGeometry
    use_conv_bias: bool


def read_hf_config(folder: Path, dtype: str | None = None) -> HfConfig:
    """Read the config.json of a folder, and its generation_config.json where there is one, as ``parse_hf_config``.

    Raises:
        CheckpointError: there is no readable config.json.
    """
    generation = folder / "generation_config.json"
    generated = read_json(generation) if generation.is_file() else {}
    return parse_hf_config(read_json(folder / "config.json"), generated, dtype)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; ``Infinity`` and transformers' ``{"__float__": "Infinity"}`` are numbers.

    Raises:
        CheckpointError: the file is missing, unreadable or not a JSON object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_float_object)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; needed a readable JSON file.") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no valid JSON ({error}). Copy the file again.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: found a JSON {type(parsed).__name__}; needed an object.")
    return parsed


def _float_object(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@dataclass
class _Reader:
    """A config, and the problems found in it so far."""

    config: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """Return a value under any of its spellings; None when absent. Differing spellings are a problem."""
        found = {key: self.config[key] for key in hf_keys.SPELLINGS[name] if self.config.get(key) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            both = ", ".join(f"{key}={value!r}" for key, value in found.items())
            self.problems.append(f"found {both}; needed one value, these are spellings of the same setting")
        return values[0] if values else None

    def positive(self, name: str, stand_in: int = 1) -> int:
        """Return a whole number >= 1; a stand-in that causes no further complaint for a bad one, which is noted."""
        value = self.value(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.problems.append(f"{self.label(name)}: found {_shown(value)}; needed a whole number of 1 or more")
        return stand_in

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean, or the architecture's default when the key is absent."""
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problems.append(f"{self.label(name)}: found {value!r}; needed true or false")
        return default

    def label(self, name: str) -> str:
        """Return the spelling that the file uses, or the usual one."""
        spellings = hf_keys.SPELLINGS[name]
        return next((key for key in spellings if key in self.config), spellings[0])

    def raise_if_any(self) -> None:
        """Raise one error with every problem."""
        lines = self.problems + self.unsupported
        if not lines:
            return
        text = lines[0] if len(lines) == 1 else f"found {len(lines)} problems:\n  - " + "\n  - ".join(lines)
        raise (ConfigError if self.problems else UnsupportedError)(f"config.json: {text}.")


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def parse_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str | None = None) -> HfConfig:
    """Turn a parsed config into a geometry.

    Args:
        config: of config.json.
        generation: of generation_config.json; empty without one.
        dtype: activation and weight type; None or "auto" takes the config's.

    Raises:
        ConfigError: unknown, missing or contradictory keys; every problem is listed.
        UnsupportedError: a well-formed model that this version does not run.
    """
    _check_model_type(config)
    reader = _Reader(config)
    _check_keys(reader)
    layers = _layers(reader)
    vocab_size = reader.positive("vocab_size", stand_in=2**31)
    values: dict[str, Any] = {
        "architecture": ARCHITECTURE,
        "dtype": _dtype(reader, dtype),
        "vocab_size": vocab_size,
        "d_model": reader.positive("d_model"),
        "layer_types": layers,
        "norm_eps": _norm_eps(reader),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "max_position_embeddings": reader.positive("max_position_embeddings"),
        "mamba2": _mamba2(reader) if LayerType.MAMBA2 in layers else None,
        "attention": _attention(reader) if LayerType.ATTENTION in layers else None,
        "mlp": MlpGeometry(d_ff=reader.positive("d_ff"), activation="relu2") if LayerType.MLP in layers else None,
        "eos_token_ids": _end_tokens(reader, generation, vocab_size),
    }
    use_conv_bias = reader.flag("use_conv_bias", True)
    reader.raise_if_any()
    try:
        return HfConfig(ModelGeometry(**values), use_conv_bias)
    except ValidationError as error:
        raise ConfigError(f"config.json: {validation_text(error)}.") from error


def _check_model_type(config: Mapping[str, Any]) -> None:
    """Refuse another architecture first: its other keys would only add noise."""
    model_type = config.get("model_type")
    architectures = config.get("architectures") or [ARCHITECTURE]
    if model_type != MODEL_TYPE or not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise UnsupportedError(
            f"config.json: found model_type {_shown(model_type)} with architectures {architectures}; needed "
            f"{MODEL_TYPE!r} with {[ARCHITECTURE]}. This version converts dense Nemotron-H models."
        )


def _check_keys(reader: _Reader) -> None:
    unknown = sorted(reader.config.keys() - hf_keys.KNOWN)
    if unknown:
        reader.problems.append(f"found unknown keys {', '.join(unknown)}; a setting that is not read may matter")
    for key, (allowed, meaning) in hf_keys.FIXED.items():
        value = reader.config.get(key, allowed[0])
        value = list(value) if isinstance(value, tuple) else value
        if not any(type(value) is type(a) and value == a for a in allowed):
            reader.unsupported.append(f"{key}: found {value!r}; this version has {meaning} only ({allowed[0]!r})")


def _layers(reader: _Reader) -> tuple[LayerType, ...]:
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


def _is_a(reader: _Reader, key: str, value: Any, kind: type) -> bool:
    if not isinstance(value, kind):
        reader.problems.append(f"{key}: found {value!r}; needed a {kind.__name__}")
    return isinstance(value, kind)


def _parse_layers(
    reader: _Reader, key: str, items: str | list[Any], names: Mapping[str, LayerType]
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


def checked_dtype(dtype: str) -> str:
    """Return the name of an activation type.

    Raises:
        ConfigError: no such type.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: found {dtype!r}; needed auto, {', '.join(DTYPES)}.")
    return dtype


def _dtype(reader: _Reader, asked: str | None) -> str:
    if asked not in (None, "auto"):
        return checked_dtype(str(asked))
    stored = str(reader.value("dtype") or "nothing").removeprefix("torch.")
    if stored in DTYPES:
        return stored
    reader.problems.append(
        f"{reader.label('dtype')}: found {stored}; needed one of {', '.join(DTYPES)}. Name one with --dtype"
    )
    return DTYPES[0]


def _norm_eps(reader: _Reader) -> float:
    value = reader.value("norm_eps")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    reader.problems.append(f"{reader.label('norm_eps')}: found {_shown(value)}; needed a number between 0 and 1")
    return 1e-5


def _mamba2(reader: _Reader) -> Mamba2Geometry:
    names = ("n_heads", "head_dim", "d_state", "n_groups", "d_conv")
    geometry = Mamba2Geometry(**{name: reader.positive(name, stand_in=int(name != "n_heads")) for name in names})
    if geometry.n_heads % geometry.n_groups:
        reader.problems.append(
            f"mamba_num_heads: found {geometry.n_heads} with n_groups={geometry.n_groups}; needed a multiple of it"
        )
    return geometry


def _attention(reader: _Reader) -> AttentionGeometry:
    n_query_heads, n_kv_heads = reader.positive("n_query_heads", stand_in=0), reader.positive("n_kv_heads")
    if n_query_heads % n_kv_heads:
        reader.problems.append(
            f"num_attention_heads: found {n_query_heads} with num_key_value_heads={n_kv_heads}; needed a multiple of it"
        )
    head_dim = reader.positive("attention_head_dim")
    return AttentionGeometry(n_query_heads=n_query_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)


def _end_tokens(reader: _Reader, generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text: those of generation_config.json where it names any, as transformers does."""
    value = generation.get("eos_token_id")
    key = "eos_token_id" if value is None else "generation_config.json eos_token_id"
    value = reader.value("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
    if bad:
        reader.problems.append(f"{key}: found {bad}; needed token ids below vocab_size ({vocab_size})")
    return tuple(dict.fromkeys(i for i in ids if i not in bad))
