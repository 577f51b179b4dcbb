"""The byte plan of a model's states: computed before anything is allocated."""

from math import prod

from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    EngineLimits,
    LayerType,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs


def tensor_bytes(spec: TensorSpec, **symbols: int) -> int:
    """Return the size of a tensor whose symbolic dimensions have the given values."""
    return DTYPE_BYTES[spec.dtype] * prod(symbols[d] if isinstance(d, str) else d for d in spec.shape)


def slot_bytes(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> dict[str, int]:
    """Return the bytes that one slot takes, summed over the layers, per kind of state.

    Returns:
        kind ("conv_ring", "ssm_state", "x_ring", "b_ring", "dt_ring", "key_cache", "value_cache") -> bytes.
    """
    one = limits.model_copy(update={"max_batch_size": 1})
    totals: dict[str, int] = {}
    for spec in state_specs(geometry, replay, one):
        kind = spec.name.rsplit("_", 1)[0]
        totals[kind] = totals.get(kind, 0) + tensor_bytes(spec, B=1)
    return totals


def checkpoint_bytes(geometry: ModelGeometry, state_dtype: str) -> int:
    """Return the bytes of one slot's recurrent states, all layers: what a flush writes."""
    m = geometry.mamba2
    layers = len(geometry.layers_of(LayerType.MAMBA2))
    return 0 if m is None else layers * m.n_heads * m.head_dim * m.d_state * DTYPE_BYTES[state_dtype]


def ring_row_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of one token's x, B and dt ring rows, all layers: what a window token appends."""
    m = geometry.mamba2
    if m is None:
        return 0
    layers = len(geometry.layers_of(LayerType.MAMBA2))
    activations = m.n_heads * m.head_dim + m.n_groups * m.d_state
    return layers * (activations * DTYPE_BYTES[geometry.dtype] + m.n_heads * DTYPE_BYTES["float32"])
