"""Small geometries of every layer kind, with random weights and poisoned states."""

from collections.abc import Sequence
from typing import Any

import torch

from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.contract.geometry import (
    LAYER_LETTERS,
    AttentionGeometry,
    EngineLimits,
    GatedDeltaNetGeometry,
    Mamba2Geometry,
    MlpGeometry,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs, weight_specs

LETTERS = {letter: kind for kind, letter in LAYER_LETTERS.items()}


def tiny_geometry(pattern: str = "M-*M", **changes: Any) -> ModelGeometry:
    """A model that the kernels support, a few thousand parameters large."""
    values: dict[str, Any] = {
        "architecture": "NemotronHForCausalLM",
        "dtype": "float32",
        "vocab_size": 97,
        "d_model": 64,
        "layer_types": tuple(LETTERS[letter] for letter in pattern),
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "mamba2": Mamba2Geometry(n_heads=4, head_dim=16, d_state=32, n_groups=2, d_conv=4) if "M" in pattern else None,
        "attention": AttentionGeometry(n_query_heads=4, n_kv_heads=2, head_dim=16) if "*" in pattern else None,
        "mlp": MlpGeometry(d_ff=96, activation="relu2") if "-" in pattern else None,
        "eos_token_ids": (2,),
    }
    return ModelGeometry(**(values | changes))


def tiny_qwen_geometry(pattern: str = "G-*-", **changes: Any) -> ModelGeometry:
    """The same with the layers of Qwen3.5: no two widths are the same."""
    has_attention, has_mlp = "*" in pattern, "-" in pattern
    values: dict[str, Any] = {
        "architecture": "Qwen3_5ForCausalLM",
        "mamba2": None,
        "gated_delta_net": GatedDeltaNetGeometry(n_key_heads=2, n_value_heads=6, key_dim=16, value_dim=32, d_conv=4)
        if "G" in pattern
        else None,
        "attention": AttentionGeometry(
            n_query_heads=4,
            n_kv_heads=2,
            head_dim=32,
            rotary_dim=8,
            rope_theta=10000.0,
            has_qk_norm=True,
            has_output_gate=True,
        )
        if has_attention
        else None,
        "mlp": MlpGeometry(d_ff=96, activation="swiglu") if has_mlp else None,
    }
    return tiny_geometry(pattern, **(values | changes))


def random_weights(
    geometry: ModelGeometry, seed: int = 0, specs: Sequence[TensorSpec] | None = None
) -> dict[str, torch.Tensor]:
    """Weights of a scale that keeps activations near one: of ``specs``, by default the model's own."""
    generator = torch.Generator().manual_seed(seed)

    def values(spec: TensorSpec) -> torch.Tensor:
        normal = torch.randn([int(d) for d in spec.shape], generator=generator)
        role = spec.name.rsplit(".", 1)[-1]
        if spec.name.endswith("norm.weight") or role == "D":
            normal = 1 + 0.2 * normal
        elif role == "A":
            normal = -(0.3 + normal.abs())
        elif role == "A_log":
            normal = 0.5 * normal
        elif role == "dt_bias":
            normal = normal - 2
        elif len(spec.shape) == 2 and not spec.name.startswith("embedding"):
            normal = 1.5 * normal / normal.shape[-1] ** 0.5
        return normal.to(getattr(torch, spec.dtype))

    return {spec.name: values(spec) for spec in (weight_specs(geometry) if specs is None else specs)}


def random_model(geometry: ModelGeometry, replay: ReplayGeometry, **options: bool) -> torch.nn.Module:
    """The module with ``random_weights``."""
    with torch.device("meta"):
        model = create_model(geometry, replay, **options)
    model.load_state_dict(random_weights(geometry), assign=True)
    return model


def poisoned_states(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, *, conventional: bool = False
) -> dict[str, torch.Tensor]:
    """Every state full of NaN: what no request may ever read."""
    specs = state_specs(geometry, replay, limits, conventional=conventional)
    rows = {"B": limits.max_batch_size}
    return {
        spec.name: torch.full(
            [rows[d] if isinstance(d, str) else d for d in spec.shape], float("nan"), dtype=getattr(torch, spec.dtype)
        )
        for spec in specs
    }


def is_cache(name: str) -> bool:
    """Whether a state has one row per row of the step rather than per slot."""
    return name.startswith(("key_cache", "value_cache"))
