"""config.json of a Hugging Face folder -> ``ModelGeometry``; all its problems are told at once."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.checkpoint.families import nemotron_h_config, qwen_config
from trtllm_replayssm.builders.checkpoint.hf_reader import HfConfig, shown
from trtllm_replayssm.errors import CheckpointError, UnsupportedError

_Parser = Callable[[Mapping[str, Any], Mapping[str, Any], str | None], HfConfig]

# model_type -> the architectures that it may name, and who reads the rest.
_MODEL_TYPES: dict[str, tuple[tuple[str, ...], _Parser]] = {
    "nemotron_h": (("NemotronHForCausalLM",), nemotron_h_config.parse),
    "qwen3_next": (("Qwen3NextForCausalLM",), qwen_config.parse),
    "qwen3_5_text": (("Qwen3_5ForCausalLM",), qwen_config.parse),
    "qwen3_5": (("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"), qwen_config.parse_multimodal),
}
_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe_text")


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
    return _parser(config)(config, generation, dtype)


def _parser(config: Mapping[str, Any]) -> _Parser:
    """Refuse another architecture first: its other keys would only add noise."""
    model_type = config.get("model_type")
    found = config.get("architectures")
    known = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if known is not None and (not found or (isinstance(found, list) and set(known[0]) & set(map(str, found)))):
        return known[1]
    needed = f"{model_type!r} with {list(known[0])}" if known else f"one of {', '.join(_MODEL_TYPES)}"
    experts = ", a mixture of experts" if model_type in _EXPERTS else ""
    raise UnsupportedError(
        f"config.json: found model_type {shown(model_type)}{experts} with architectures {shown(found)}; needed "
        f"{needed}. This version converts dense Nemotron-H, Qwen3-Next and Qwen3.5 models."
    )
