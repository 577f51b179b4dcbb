"""Multi-token prediction heads for the tiny checkpoints: ``transformers`` writes none, so they are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import edit_config, make_nemotron_h, make_qwen

Kind = Literal["random", "copying"]
_LAST_PROJECTIONS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")


def make_with_mtp(folder: Path, family: str, kind: Kind = "random", *, mixing: float = 1.0, **options: Any) -> Path:
    """Write a tiny checkpoint with a head and return its folder.

    Args:
        folder: to create.
        family: "nemotron_h", "qwen3_next" or "qwen3_5".
        kind: a "copying" head gives what the model would, if the model looked at nothing but the newest token.
        mixing: factor on what mixers add to the hidden states; 0 makes that true.
        options: of ``make_nemotron_h`` or ``make_qwen``.
    """
    if family == "nemotron_h":
        make_nemotron_h(folder, pattern="M-*M", tokenizer=True, **options)
        edit_config(
            folder,
            num_nextn_predict_layers=1,
            mtp_layers_block_type=["full_attention", "mlp"],
            mtp_hybrid_override_pattern="*-",
        )
    else:
        make_qwen(folder, family, pattern="G*G", tokenizer=True, **options)
        edit_config(folder, mtp_num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(_LAST_PROJECTIONS):
            tensors[name] = mixing * tensors[name]
    make = _nemotron_h_head if family == "nemotron_h" else _qwen_head
    save_file(tensors | make(tensors, kind), file, metadata={"format": "pt"})
    return folder


def _random(shape: tuple[int, ...], number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2)


def _projection(width: int, kind: Kind) -> torch.Tensor:
    if kind == "copying":
        return torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    return _random((width, 2 * width), 0)


def _layers(tensors: dict[str, torch.Tensor], source: str, target: str, kind: Kind) -> dict[str, torch.Tensor]:
    """Return a layer of the model's shapes with other values; a copying one adds nothing."""
    head = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items()), start=1):
        if name.startswith(source):
            values = _random(tuple(tensor.shape), number) + (1.0 if _is_plain_norm(name) else 0.0)
            is_silent = kind == "copying" and name.endswith(_LAST_PROJECTIONS)
            head[target + name.removeprefix(source)] = torch.zeros_like(values) if is_silent else values
    return head


def _is_plain_norm(name: str) -> bool:
    return name.startswith("backbone.") and name.endswith("norm.weight")


def _nemotron_h_head(tensors: dict[str, torch.Tensor], kind: Kind) -> dict[str, torch.Tensor]:
    norm = tensors["backbone.norm_f.weight"]
    one = torch.ones_like(norm)
    random = kind == "random"
    return {
        **_layers(tensors, "backbone.layers.2.", "mtp.layers.0.", kind),
        **_layers(tensors, "backbone.layers.1.", "mtp.layers.1.", kind),
        "mtp.layers.0.enorm.weight": one + random * _random(tuple(norm.shape), 1),
        "mtp.layers.0.hnorm.weight": one + random * _random(tuple(norm.shape), 2),
        "mtp.layers.0.eh_proj.weight": _projection(len(norm), kind),
        "mtp.layers.1.final_layernorm.weight": norm + random * _random(tuple(norm.shape), 3),
    }


def _qwen_head(tensors: dict[str, torch.Tensor], kind: Kind) -> dict[str, torch.Tensor]:
    norm = tensors["model.norm.weight"]
    zero = torch.zeros_like(norm)
    random = kind == "random"
    return {
        **_layers(tensors, "model.layers.1.", "mtp.layers.0.", kind),
        "mtp.pre_fc_norm_embedding.weight": zero + random * _random(tuple(norm.shape), 1),
        "mtp.pre_fc_norm_hidden.weight": zero + random * _random(tuple(norm.shape), 2),
        "mtp.fc.weight": _projection(len(norm), kind),
        "mtp.norm.weight": norm + random * _random(tuple(norm.shape), 3),
    }
