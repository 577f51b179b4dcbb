"""Rank checkpoints: ``config.json`` with TensorRT-LLM 1.2's keys, and one flat ``rank{i}.safetensors`` per rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from trtllm_replayssm.builders.checkpoint.hf_config import read_json
from trtllm_replayssm.builders.checkpoint.names import cast
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.manifest import CONFIG_FILE, WEIGHTS_FILE
from trtllm_replayssm.contract.tensors import TensorSpec, checkpoint_specs
from trtllm_replayssm.errors import CheckpointError, UnsupportedError, validation_text

if TYPE_CHECKING:
    import torch

# Our key beside TensorRT-LLM's; the geometry under it is what is read back.
OWN_KEY = "trtllm_replayssm"
SCHEMA = 1


def make_config(geometry: ModelGeometry) -> dict[str, Any]:
    """Return a rank checkpoint's config: TensorRT-LLM's keys derived from the geometry, then the geometry itself."""
    keys: dict[str, Any] = {
        "architecture": geometry.architecture,
        "dtype": geometry.dtype,
        "logits_dtype": "float32",
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.d_model,
        "num_hidden_layers": len(geometry.layer_types),
        "max_position_embeddings": geometry.max_position_embeddings,
        "norm_epsilon": geometry.norm_eps,
        "rms_norm": True,
        "layer_types": [layer.value for layer in geometry.layer_types],
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    if a := geometry.attention:
        keys |= {"num_attention_heads": a.n_query_heads, "num_key_value_heads": a.n_kv_heads, "head_size": a.head_dim}
        if a.rotary_dim:
            keys |= {
                "position_embedding_type": "rope_gpt_neox",
                "rotary_base": a.rope_theta,
                "rotary_pct": a.rotary_dim / a.head_dim,
            }
    if p := geometry.mlp:
        keys |= {"intermediate_size": p.d_ff, "hidden_act": p.activation}
    if m := geometry.mamba2:
        keys |= {
            "rnn_hidden_size": m.d_inner,
            "rnn_conv_dim_size": m.conv_dim,
            "rnn_head_size": m.head_dim,
            "state_size": m.d_state,
            "conv_kernel": m.d_conv,
            "ngroups": m.n_groups,
            "ssm_rmsnorm": True,
        }
    if g := geometry.gated_delta_net:
        keys |= {
            "linear_num_key_heads": g.n_key_heads,
            "linear_num_value_heads": g.n_value_heads,
            "linear_key_head_dim": g.key_dim,
            "linear_value_head_dim": g.value_dim,
            "linear_conv_kernel_dim": g.d_conv,
        }
    own = geometry.model_dump(mode="json", exclude_defaults=True)
    return keys | {OWN_KEY: {"schema": SCHEMA, "geometry": own}}


def write_config(folder: Path, geometry: ModelGeometry) -> None:
    """Write the ``config.json`` of a rank checkpoint or an engine of this geometry."""
    (folder / CONFIG_FILE).write_text(json.dumps(make_config(geometry), indent=2) + "\n", encoding="utf-8")


def is_rank_checkpoint(folder: Path) -> bool:
    """Say whether a folder's config.json is a rank checkpoint's; its weights may be absent."""
    path = folder / CONFIG_FILE
    return path.is_file() and OWN_KEY in read_json(path)


def read_config(folder: Path) -> ModelGeometry:
    """Read and check the config of a rank checkpoint or an engine folder.

    Raises:
        CheckpointError: no rank checkpoint, an invalid geometry, or keys that contradict it.
        UnsupportedError: written by a newer version, or for several ranks.
    """
    path = folder / CONFIG_FILE
    config = read_json(path)
    own = config.get(OWN_KEY)
    if not isinstance(own, dict):
        raise CheckpointError(f"{path}: found no key {OWN_KEY}; needed a rank checkpoint. Make one with convert.")
    if own.get("schema") != SCHEMA:
        raise UnsupportedError(f"{path}: found schema {own.get('schema')!r}; needed {SCHEMA}. Convert the model anew.")
    if config.get("mapping") != {"world_size": 1, "tp_size": 1, "pp_size": 1}:
        raise UnsupportedError(
            f"{path}: found mapping {config.get('mapping')}; needed one rank, since this version runs one rank. "
            "Convert the model with --tp_size 1."
        )
    try:
        geometry = ModelGeometry.model_validate(own.get("geometry"))
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: found an invalid geometry ({validation_text(error)}). Convert the model anew."
        ) from error
    _check_keys_agree(path, config, make_config(geometry))
    return geometry


def _check_keys_agree(path: Path, found: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Refuse a hand-edited copy of a value: the geometry is what counts, and an edit would have no effect."""
    different = [f"{key}={found.get(key)!r}, not {value!r}" for key, value in needed.items() if found.get(key) != value]
    unknown = sorted(found.keys() - needed.keys())
    if different or unknown:
        parts = different + [f"unknown key {key}" for key in unknown]
        raise CheckpointError(
            f"{path}: found keys that contradict its own geometry ({'; '.join(parts)}); needed those that convert "
            "wrote. Convert the model anew."
        )


def has_weights(folder: Path) -> bool:
    """Say whether the folder has the weights of rank 0."""
    return (folder / WEIGHTS_FILE).is_file()


def load_weights(
    folder: Path,
    geometry: ModelGeometry,
    device: torch.device | str = "cpu",
    wanted: Sequence[TensorSpec] | None = None,
) -> dict[str, torch.Tensor]:
    """Load rank 0's weights; on the CPU they are mapped from the file, not copied.

    Args:
        folder: rank checkpoint or engine folder.
        geometry: the model; it decides which tensors, shapes and types are needed. The fp32 constants of the
            recurrence stay fp32.
        device: where to load.
        wanted: some of ``checkpoint_specs``; None for all.

    Returns:
        Name -> tensor, in the order of ``checkpoint_specs``.

    Raises:
        CheckpointError: the file is absent or damaged, or its tensors are not those of the model.
    """
    path = folder / WEIGHTS_FILE
    specs = checkpoint_specs(geometry)
    if not path.is_file():
        raise CheckpointError(f"{path}: found nothing; needed the weights. Name the rank checkpoint they are in.")
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            _check_complete(path, specs, shapes)
            chosen = specs if wanted is None else wanted
            return {spec.name: cast(file.get_tensor(spec.name), spec.dtype, spec.name) for spec in chosen}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}). Copy or convert it again.") from error


def _check_complete(path: Path, specs: tuple[TensorSpec, ...], found: Mapping[str, tuple[int, ...]]) -> None:
    needed = {spec.name: spec.shape for spec in specs}
    problems = [f"{name} is missing" for name in needed if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in needed]
    problems += [
        f"{name} has {list(shape)}, not {list(needed[name])}"
        for name, shape in found.items()
        if name in needed and shape != needed[name]
    ]
    if problems:
        more = f", and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"{path}: found tensors that are not those of config.json: {', '.join(problems[:10])}{more}; needed the "
            "weights of that very model. Convert the model anew."
        )
