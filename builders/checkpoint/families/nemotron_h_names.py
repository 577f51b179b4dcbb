"""Which stored tensors of a Nemotron-H checkpoint make which tensor of a rank checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.names import Naming, Parts, concatenate
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_EMBEDDING = "embeddings.weight"
_RENAMED = {"embedding.weight": _EMBEDDING, "final_norm.weight": "norm_f.weight"}

# The first layer of the multi-token prediction head has what joins its two inputs, the last one its final norm.
_MTP = {
    "mtp.embedding_norm.weight": "mtp.layers.0.enorm.weight",
    "mtp.hidden_norm.weight": "mtp.layers.0.hnorm.weight",
    "mtp.projection.weight": "mtp.layers.0.eh_proj.weight",
    "mtp.final_norm.weight": "mtp.layers.{last}.final_layernorm.weight",
}
_MTP_TENSOR = re.compile(r"^mtp\.")


def _parts(spec: TensorSpec, geometry: ModelGeometry) -> Parts:
    shape = tuple(int(size) for size in spec.shape)
    if geometry.mtp is not None and spec.name in _MTP:
        last = len(geometry.mtp.layer_types) - 1
        return Parts(((_MTP[spec.name].format(last=last), shape),), concatenate)
    layer, _, role = spec.name.rpartition(".mixer.")
    if role == "A":
        return Parts(((f"{layer}.mixer.A_log", shape),), _decay_rate)
    if role == "conv1d.weight":
        return Parts(((spec.name, (shape[0], 1, shape[1])),), concatenate)
    if role == "qkv.weight":
        a = geometry.attention
        assert a is not None, "a geometry with attention layers describes them"
        heads = {"q": a.n_query_heads, "k": a.n_kv_heads, "v": a.n_kv_heads}
        sources = ((f"{layer}.mixer.{part}_proj.weight", (n * a.head_dim, shape[1])) for part, n in heads.items())
        return Parts(tuple(sources), concatenate)
    return Parts(((_RENAMED.get(spec.name, spec.name), shape),), concatenate)


def _decay_rate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return ``A = -exp(A_log)`` in fp32 (Mamba-2's parametrisation)."""
    return -parts[0].float().exp()


NAMING = Naming(
    # "backbone." in published checkpoints and on disk; "model." is transformers' name in memory.
    prefix=re.compile(r"^(?:backbone|model)\.(?=(?:embeddings|layers|norm_f|mtp)\.)"),
    embedding=_EMBEDDING,
    output_matrix="lm_head.weight",
    parts=_parts,
    mtp=_MTP_TENSOR,
    ignored=(
        (_MTP_TENSOR, reasons.MTP_WEIGHTS),
        (re.compile(r"\.rotary_emb\.inv_freq$"), "a constant; the attention has no positional encoding"),
    ),
)
