"""Which stored tensors of a Qwen3-Next or Qwen3.5 checkpoint make which tensor of a rank checkpoint.

Layer j of the checkpoint is layers 2j (recurrence or attention) and 2j + 1 (MLP) of ours, in the multi-token prediction
head as well. Norms are stored as what is
added to one, except for the one behind the recurrence. Qwen3-Next interleaves its projections by key heads; they are
taken apart, so that one layout is left.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.names import Naming, Parts, concatenate
from trtllm_replayssm.contract.geometry import AttentionGeometry, GatedDeltaNetGeometry, LayerType, ModelGeometry
from trtllm_replayssm.contract.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_EMBEDDING = "embed_tokens.weight"
_MTP = {
    "mtp.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "mtp.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "mtp.projection.weight": "mtp.fc.weight",
    "mtp.final_norm.weight": "mtp.norm.weight",
}
_OUTPUT_MATRIX = "lm_head.weight"
_MIXERS = {
    LayerType.GATED_DELTA_NET: "linear_attn",
    LayerType.ATTENTION: "self_attn",
    LayerType.MLP: "mlp",
}


def _parts(spec: TensorSpec, geometry: ModelGeometry) -> Parts:
    shape = tuple(int(size) for size in spec.shape)
    if spec.name == "final_norm.weight":
        return Parts((("norm.weight", shape),), _one_plus)
    if spec.name in _MTP:
        stored = _MTP[spec.name]
        return Parts(((stored, shape),), _one_plus if "norm" in stored else concatenate)
    head, found, place = spec.name.rpartition("layers.")
    if not found:
        plain = {"embedding.weight": _EMBEDDING}.get(spec.name, spec.name)
        return Parts(((plain, shape),), concatenate)
    number, role = place.split(".", 1)
    index = int(number)
    layer = f"{head}layers.{index // 2}."
    if role == "norm.weight":
        norm = "post_attention_layernorm" if index % 2 else "input_layernorm"
        return Parts(((f"{layer}{norm}.weight", shape),), _one_plus)
    layer_types = geometry.mtp.layer_types if head and geometry.mtp else geometry.layer_types
    kind = layer_types[index]
    return _mixer_parts(layer + _MIXERS[kind] + ".", role.removeprefix("mixer."), shape, geometry, kind)


def _mixer_parts(mixer: str, role: str, shape: tuple[int, ...], geometry: ModelGeometry, kind: LayerType) -> Parts:
    if role == "in_proj.weight":
        g = geometry.gated_delta_net
        assert g is not None, "a geometry with Gated DeltaNet layers describes them"
        return _in_proj_parts(mixer, g, geometry)
    if role == "qkv.weight":
        a = geometry.attention
        assert a is not None, "a geometry with attention layers describes them"
        return _qkv_parts(mixer, a, geometry.d_model)
    if role == "gate_up_proj.weight":
        half = (shape[0] // 2, shape[1])
        return Parts(tuple((f"{mixer}{part}_proj.weight", half) for part in ("gate", "up")), concatenate)
    if role == "conv1d.weight":
        return Parts(((mixer + role, (shape[0], 1, shape[1])),), concatenate)
    is_zero_centred = kind is LayerType.ATTENTION and role in ("q_norm.weight", "k_norm.weight")
    return Parts(((mixer + role, shape),), _one_plus if is_zero_centred else concatenate)


def _in_proj_parts(mixer: str, g: GatedDeltaNetGeometry, geometry: ModelGeometry) -> Parts:
    """Return q, k, v, z, b and a: four matrices in Qwen3.5, two in Qwen3-Next."""
    if geometry.architecture == "Qwen3NextForCausalLM":
        rows = {"qkvz": g.conv_dim + g.d_value, "ba": 2 * g.n_value_heads}

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            return _take_apart(parts, g)

    else:
        rows = {"qkv": g.conv_dim, "z": g.d_value, "b": g.n_value_heads, "a": g.n_value_heads}
        join = concatenate
    sources = ((f"{mixer}in_proj_{part}.weight", (count, geometry.d_model)) for part, count in rows.items())
    return Parts(tuple(sources), join)


def _take_apart(parts: list[torch.Tensor], g: GatedDeltaNetGeometry) -> torch.Tensor:
    """Sort the rows of Qwen3-Next's matrices: each key head has its q, k, v and z side by side, and its b and a."""
    import torch

    qkvz, ba = (torch.unflatten(part, 0, (g.n_key_heads, -1)) for part in parts)
    values = g.d_value // g.n_key_heads
    q, k, v, z = torch.split(qkvz, [g.key_dim, g.key_dim, values, values], dim=1)
    b, a = ba.chunk(2, dim=1)
    return torch.cat([rows.flatten(0, 1) for rows in (q, k, v, z, b, a)])


def _qkv_parts(mixer: str, a: AttentionGeometry, d_model: int) -> Parts:
    """Return queries, keys, values and gate; stored, each query head has its gate behind it."""

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        import torch

        query, gate = torch.unflatten(parts[0], 0, (a.n_query_heads, 2, a.head_dim)).unbind(1)
        return torch.cat((query.flatten(0, 1), *parts[1:], gate.flatten(0, 1)))

    rows = {"q": 2 * a.d_query, "k": a.n_kv_heads * a.head_dim, "v": a.n_kv_heads * a.head_dim}
    return Parts(tuple((f"{mixer}{part}_proj.weight", (count, d_model)) for part, count in rows.items()), join)


def _one_plus(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the factor of a zero-centred norm, in fp32."""
    return 1.0 + parts[0].float()


_MTP_TENSOR = re.compile(r"^mtp\.")

NAMING = Naming(
    # "model.language_model." where a checkpoint has a vision part as well.
    prefix=re.compile(r"^model\.(?:language_model\.)?(?=(?:embed_tokens|layers|norm|mtp)\.)"),
    embedding=_EMBEDDING,
    output_matrix=_OUTPUT_MATRIX,
    parts=_parts,
    mtp=_MTP_TENSOR,
    ignored=(
        (_MTP_TENSOR, reasons.MTP_WEIGHTS),
        (re.compile(r"^(?:model\.)?visual\."), reasons.VISION_WEIGHTS),
    ),
)
