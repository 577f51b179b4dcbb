"""The byte plan of a model's states: computed before anything is allocated."""

from math import prod

from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    EngineLimits,
    Frozen,
    GatedDeltaNetGeometry,
    Mamba2Geometry,
    ModelGeometry,
    RecurrenceGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs


class StatePool(Frozen):
    """One kind of state, over all layers that have it.

    Attributes:
        kind: "ssm_state", "x_ring", "key_cache", ...
        layers: how many layers have it.
        dtype: element type.
        slot_shape: shape of one layer's state of one slot.
        bytes_per_slot: of all layers.
    """

    kind: str
    layers: int
    dtype: str
    slot_shape: tuple[int, ...]
    bytes_per_slot: int


def tensor_bytes(spec: TensorSpec, **symbols: int) -> int:
    """Return the size of a tensor whose symbolic dimensions have the given values."""
    return DTYPE_BYTES[spec.dtype] * prod(symbols[d] if isinstance(d, str) else d for d in spec.shape)


def state_pools(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> tuple[StatePool, ...]:
    """Return what one slot takes per kind of state; all layers of a kind have one shape."""
    one = limits.model_copy(update={"max_batch_size": 1})
    by_kind: dict[str, list[TensorSpec]] = {}
    for spec in state_specs(geometry, replay, one):
        by_kind.setdefault(spec.name.rpartition("_")[0], []).append(spec)
    return tuple(
        StatePool(
            kind=kind,
            layers=len(specs),
            dtype=specs[0].dtype,
            slot_shape=tuple(int(d) for d in specs[0].shape[1:]),
            bytes_per_slot=len(specs) * tensor_bytes(specs[0], B=1),
        )
        for kind, specs in by_kind.items()
    )


def mamba2_checkpoint_bytes(m: Mamba2Geometry, state_dtype: str) -> int:
    """Return the bytes of one slot's recurrent state in one layer: what a flush writes there."""
    return m.n_heads * m.head_dim * m.d_state * DTYPE_BYTES[state_dtype]


def mamba2_ring_row_bytes(m: Mamba2Geometry, activation_dtype: str) -> int:
    """Return the bytes of one token's x, B and dt ring rows in one layer."""
    activations = m.d_inner + m.n_groups * m.d_state
    return activations * DTYPE_BYTES[activation_dtype] + m.n_heads * DTYPE_BYTES["float32"]


def gated_delta_net_checkpoint_bytes(m: GatedDeltaNetGeometry, state_dtype: str) -> int:
    """Return the bytes of one slot's recurrent state in one layer: what a flush writes there."""
    return m.n_value_heads * m.key_dim * m.value_dim * DTYPE_BYTES[state_dtype]


def gated_delta_net_ring_row_bytes(m: GatedDeltaNetGeometry, activation_dtype: str) -> int:
    """Return the bytes of one token's k, u and g ring rows in one layer; u and g are fp32 in every model."""
    return m.d_key * DTYPE_BYTES[activation_dtype] + (m.d_value + m.n_value_heads) * DTYPE_BYTES["float32"]


def layer_checkpoint_bytes(m: RecurrenceGeometry, state_dtype: str) -> int:
    """Return the bytes of one slot's recurrent state in one layer of either kind."""
    if isinstance(m, Mamba2Geometry):
        return mamba2_checkpoint_bytes(m, state_dtype)
    return gated_delta_net_checkpoint_bytes(m, state_dtype)


def layer_ring_row_bytes(m: RecurrenceGeometry, activation_dtype: str) -> int:
    """Return the bytes of one token's ring rows, but the convolution's, in one layer of either kind."""
    if isinstance(m, Mamba2Geometry):
        return mamba2_ring_row_bytes(m, activation_dtype)
    return gated_delta_net_ring_row_bytes(m, activation_dtype)


def checkpoint_bytes(geometry: ModelGeometry, state_dtype: str) -> int:
    """Return the bytes of one slot's recurrent states, all layers: what a flush writes."""
    m = geometry.recurrence
    return 0 if m is None else geometry.n_recurrent_layers * layer_checkpoint_bytes(m, state_dtype)


def ring_row_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of one token's ring rows but the convolution's, all layers: what a window token appends."""
    m = geometry.recurrence
    return 0 if m is None else geometry.n_recurrent_layers * layer_ring_row_bytes(m, geometry.dtype)
