"""The models that are measured: true shapes by name, or any folder's config; fewer layers for small cards."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trtllm_replayssm.bench.recurrences import recurrence_of
from trtllm_replayssm.bench.shapes import GATED_DELTA_NET, MAMBA2
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.contract.geometry import (
    LAYER_LETTERS,
    AttentionGeometry,
    LayerType,
    MlpGeometry,
    ModelGeometry,
)
from trtllm_replayssm.contract.tensors import TensorSpec, weight_specs
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.ops.dtypes import torch_dtype

_LAYER_TYPES = {letter: kind for kind, letter in LAYER_LETTERS.items()}
_NANO_9B_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_QWEN_PATTERN = "G-G-G-*-" * 8  # every fourth layer attends; an MLP behind each


def _layers(pattern: str) -> tuple[LayerType, ...]:
    return tuple(_LAYER_TYPES[letter] for letter in pattern)


def _qwen(d_model: int, d_ff: int, *, tied: bool) -> ModelGeometry:
    return ModelGeometry(
        architecture="Qwen3_5ForCausalLM",
        dtype="bfloat16",
        vocab_size=248320,
        d_model=d_model,
        layer_types=_layers(_QWEN_PATTERN),
        norm_eps=1e-6,
        tie_word_embeddings=tied,
        max_position_embeddings=262144,
        mamba2=None,
        gated_delta_net=GATED_DELTA_NET["qwen9b"],
        attention=AttentionGeometry(
            n_query_heads=16,
            n_kv_heads=4,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            has_qk_norm=True,
            has_output_gate=True,
        ),
        mlp=MlpGeometry(d_ff=d_ff, activation="swiglu"),
        eos_token_ids=(248044,),
    )


PRESETS: Final = {
    "nemotron-nano-9b-v2": ModelGeometry(
        architecture="NemotronHForCausalLM",
        dtype="bfloat16",
        vocab_size=131072,
        d_model=4480,
        layer_types=_layers(_NANO_9B_PATTERN),
        norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        mamba2=MAMBA2["nano9b"],
        attention=AttentionGeometry(n_query_heads=40, n_kv_heads=8, head_dim=128),
        mlp=MlpGeometry(d_ff=15680, activation="relu2"),
        eos_token_ids=(12,),
    ),
    "qwen3.5-4b": _qwen(2560, 9216, tied=True),
    "qwen3.5-9b": _qwen(4096, 12288, tied=False),
}
"""Name -> the model's published shapes."""


def model_named(name: str, num_layers: int | None = None) -> ModelGeometry:
    """Return the geometry of a preset or of a folder with a config.json, whole or its first layers.

    Args:
        name: a preset's name, or the path of a Hugging Face folder, a rank checkpoint or an engine; weights in it are
            not read.
        num_layers: residual layers to keep: of a Nemotron-H model one a letter of its pattern, of a Qwen model two a
            layer. None keeps all.

    Raises:
        ConfigError: too few layers or too many.
        ReplaySSMError: no preset, and no folder that could be opened.
    """
    geometry = PRESETS.get(name.lower())
    if geometry is None:
        if not Path(name).exists():
            raise ConfigError(f"model: found {name!r}; needed {', '.join(PRESETS)} or a folder with a config.json.")
        geometry = open_model_folder(name).geometry
    if num_layers is None:
        return geometry
    kept = geometry.layer_types[:num_layers]
    if not 1 <= num_layers <= len(geometry.layer_types) or not set(kept) - {LayerType.MLP}:
        raise ConfigError(
            f"num_layers: found {num_layers}; needed 1 to {len(geometry.layer_types)}, a recurrence or an attention "
            "among them."
        )
    return geometry.model_copy(update={"layer_types": kept})


def random_weights(geometry: ModelGeometry, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Draw a model's weights on a device, scaled so that activations stay of one size through all layers.

    Args:
        geometry: of the model.
        device: where they are made; nothing crosses the bus.
        seed: of the random numbers, which differ between kinds of devices.

    Returns:
        Name -> tensor, as a rank checkpoint has them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made = {spec.name: _random(spec, len(geometry.layer_types), generator) for spec in weight_specs(geometry)}
    if geometry.recurrence is not None:
        torch.manual_seed(seed)
        for index, kind in enumerate(geometry.layer_types):
            if kind in (LayerType.MAMBA2, LayerType.GATED_DELTA_NET):
                drawn = recurrence_of(geometry.recurrence).draw_weights(device)
                made |= {f"layers.{index}.mixer.{name}": constant for name, constant in drawn.items()}
    return made


def _random(spec: TensorSpec, num_layers: int, generator: torch.Generator) -> Tensor:
    role = spec.name.rpartition("mixer.")[2]
    made = torch.empty([int(d) for d in spec.shape], dtype=torch_dtype(spec.dtype), device=generator.device)
    if role.endswith("norm.weight"):
        return made.fill_(1.0)
    if role == "embedding.weight":
        return made.normal_(generator=generator)
    if role.endswith("bias"):
        return made.zero_()
    scale = float(made.shape[-1]) ** -0.5
    if role in ("out_proj.weight", "o_proj.weight", "down_proj.weight"):
        scale *= num_layers**-0.5
    return made.normal_(0.0, scale, generator=generator)
