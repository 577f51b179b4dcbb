"""Names, types and shapes of everything that goes in and out of a model's step: one list, read by all floors.

Symbols: ``B`` rows of the step, ``S`` window tokens, ``J`` logit positions, ``slots`` rows of the state pools.
Key/value caches have one row per *row of the step* (TensorRT's linear cache update writes cache row i for batch row
i); every other state has one row per slot and is addressed through ``slot_ids``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from trtllm_replayssm.contract.geometry import (
    EngineLimits,
    LayerType,
    Mamba2Geometry,
    ModelGeometry,
    RecurrenceGeometry,
    ReplayGeometry,
)

Dim = int | str
MTP_PREFIX: Final = "mtp."
"""Begins the name of every weight of a multi-token prediction head."""
Role = Literal["step", "state", "weight", "result"]


@dataclass(frozen=True)
class TensorSpec:
    """One engine tensor.

    Attributes:
        name: binding name; a state's is without its ``past_`` / ``present_`` prefix.
        dtype: "float32", "float16", "bfloat16" or "int32".
        shape: ints, or the symbols above.
        role: "step" inputs, "state" bound in and out at one address, "weight" inputs, "result" outputs.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    role: Role

    @property
    def is_cache(self) -> bool:
        """Whether this is a key/value cache: one row per row of the step instead of one per slot."""
        return self.role == "state" and self.shape[0] == "B"

    @property
    def past_name(self) -> str:
        """The input binding of a state."""
        return f"past_{self.name}"

    @property
    def present_name(self) -> str:
        """The output binding of a state; it has the address of ``past_name``."""
        return f"present_{self.name}"


def step_specs() -> tuple[TensorSpec, ...]:
    """Return the inputs that change with every step, in the order of the network."""
    return (
        TensorSpec("input_ids", "int32", ("B", "S"), "step"),
        TensorSpec("past_lengths", "int32", ("B",), "step"),
        TensorSpec("checkpoint_lengths", "int32", ("B",), "step"),
        TensorSpec("num_tokens", "int32", ("B",), "step"),
        TensorSpec("slot_ids", "int32", ("B",), "step"),
        TensorSpec("logits_indices", "int32", ("B", "J"), "step"),
    )


def logits_spec(geometry: ModelGeometry) -> TensorSpec:
    """Return the logits of the positions that ``logits_indices`` names, in fp32."""
    return TensorSpec("logits", "float32", ("B", "J", geometry.vocab_size), "result")


def hidden_states_spec(geometry: ModelGeometry) -> TensorSpec:
    """Return the hidden states of all window tokens behind the final norm: what a multi-token prediction head reads."""
    return TensorSpec("hidden_states", geometry.dtype, ("B", "S", geometry.d_model), "result")


def mtp_step_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Return the head's inputs of every step: embeddings of tokens c+1 .. c+S, hidden states at c .. c+S-1, c."""
    hidden = (geometry.dtype, ("B", "S", geometry.d_model))
    return (
        TensorSpec("inputs_embeds", *hidden, "step"),
        TensorSpec("hidden_states", *hidden, "step"),
        TensorSpec("past_lengths", "int32", ("B",), "step"),
    )


def mtp_result_spec(geometry: ModelGeometry) -> TensorSpec:
    """Return what the head makes of its inputs: it takes the place of the model's hidden states one token on."""
    return TensorSpec("next_hidden_states", geometry.dtype, ("B", "S", geometry.d_model), "result")


def state_specs(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, *, conventional: bool = False
) -> tuple[TensorSpec, ...]:
    """Return every state of a model, layer by layer, in the order of the network's inputs and outputs.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        limits: of the engine or executor.
        conventional: the states of the decode that rewrites them for every token: one snapshot per window token
            and one to start from, and no rings but the convolution's.
    """
    specs: list[TensorSpec] = []
    for index, kind in enumerate(geometry.layer_types):
        if kind in (LayerType.MAMBA2, LayerType.GATED_DELTA_NET):
            specs += _recurrent_states(index, geometry, replay, limits.max_batch_size, conventional)
        elif kind is LayerType.ATTENTION:
            specs += _attention_states(index, geometry, limits.kv_capacity(replay.window))
    return tuple(specs)


def _recurrent_states(
    index: int, geometry: ModelGeometry, replay: ReplayGeometry, slots: int, conventional: bool
) -> list[TensorSpec]:
    """Return the convolution's ring, the state or its snapshots, and the rings of a replayed recurrence."""
    mixer = geometry.recurrence
    assert mixer is not None, "a geometry with recurrent layers describes them"
    conv_rows = replay.conv_ring_rows(mixer.d_conv)
    conv_ring = TensorSpec(f"conv_ring_{index}", geometry.dtype, (slots, conv_rows, mixer.conv_dim), "state")
    one_state, rings = slot_states(mixer)
    if conventional:
        snapshots = (slots, replay.window + 1, *one_state)
        return [conv_ring, TensorSpec(f"ssm_snapshots_{index}", replay.state_dtype, snapshots, "state")]
    return [
        conv_ring,
        TensorSpec(f"ssm_state_{index}", replay.state_dtype, (slots, *one_state), "state"),
        *(
            TensorSpec(f"{name}_{index}", dtype or geometry.dtype, (slots, replay.ring_rows, *row), "state")
            for name, dtype, row in rings
        ),
    ]


class SlotStates(NamedTuple):
    """What one slot has in one recurrent layer, the convolution's ring left out.

    Attributes:
        state: shape of the checkpoint.
        rings: name, type (None: the activations') and shape of one row of every ring.
    """

    state: tuple[int, ...]
    rings: tuple[tuple[str, str | None, tuple[int, ...]], ...]


def slot_states(m: RecurrenceGeometry) -> SlotStates:
    """Return the states of a replayed recurrence of either kind, in the order of its op's arguments."""
    if isinstance(m, Mamba2Geometry):
        return SlotStates(
            (m.n_heads, m.head_dim, m.d_state),
            (
                ("x_ring", None, (m.n_heads, m.head_dim)),
                ("b_ring", None, (m.n_groups, m.d_state)),
                ("dt_ring", "float32", (m.n_heads,)),
            ),
        )
    return SlotStates(
        (m.n_value_heads, m.key_dim, m.value_dim),
        (
            ("k_ring", None, (m.n_key_heads, m.key_dim)),
            # Rounding these would grow with the text: what is wrong in the state stays in it.
            ("u_ring", "float32", (m.n_value_heads, m.value_dim)),
            ("g_ring", "float32", (m.n_value_heads,)),
        ),
    )


def _attention_states(index: int, geometry: ModelGeometry, capacity: int) -> list[TensorSpec]:
    a = geometry.attention
    assert a is not None, "a geometry with attention layers describes them"
    shape: tuple[Dim, ...] = ("B", a.n_kv_heads, capacity, a.head_dim)
    return [
        TensorSpec(f"key_cache_{index}", geometry.dtype, shape, "state"),
        TensorSpec(f"value_cache_{index}", geometry.dtype, shape, "state"),
    ]


def mtp_state_specs(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> tuple[TensorSpec, ...]:
    """Return the key/value caches of the multi-token prediction head, in the order of its layers."""
    layer_types = () if geometry.mtp is None else geometry.mtp.layer_types
    specs: list[TensorSpec] = []
    for index, kind in enumerate(layer_types):
        if kind is LayerType.ATTENTION:
            specs += _attention_states(index, geometry, limits.kv_capacity(replay.window))
    return tuple(specs)


def weight_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Return every tensor of the model itself: the modules' parameter names are a rank checkpoint's keys."""
    embedding, *output = shared_matrix_specs(geometry)
    specs = [embedding]
    specs += _layer_weights("layers.", geometry.layer_types, geometry)
    specs.append(_norm_weight("final_norm.weight", geometry))
    return (*specs, *output)


def shared_matrix_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Return the matrices that a multi-token prediction head has of its model: embedding, then output if apart."""
    names = ("embedding.weight",) if geometry.tie_word_embeddings else ("embedding.weight", "lm_head.weight")
    shape = (geometry.vocab_size, geometry.d_model)
    return tuple(TensorSpec(name, geometry.dtype, shape, "weight") for name in names)


def mtp_weight_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Return every tensor of the multi-token prediction head; none for a model without one."""
    if geometry.mtp is None:
        return ()
    d = geometry.d_model
    return (
        _norm_weight(MTP_PREFIX + "embedding_norm.weight", geometry),
        _norm_weight(MTP_PREFIX + "hidden_norm.weight", geometry),
        TensorSpec(MTP_PREFIX + "projection.weight", geometry.dtype, (d, 2 * d), "weight"),
        *_layer_weights(MTP_PREFIX + "layers.", geometry.mtp.layer_types, geometry),
        _norm_weight(MTP_PREFIX + "final_norm.weight", geometry),
    )


def checkpoint_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Return every tensor of a rank checkpoint: the model's, then its multi-token prediction head's."""
    return weight_specs(geometry) + mtp_weight_specs(geometry)


def _norm_weight(name: str, geometry: ModelGeometry) -> TensorSpec:
    return TensorSpec(name, geometry.norm_dtype, (geometry.d_model,), "weight")


def _layer_weights(prefix: str, layer_types: Sequence[LayerType], geometry: ModelGeometry) -> list[TensorSpec]:
    specs = []
    for index, kind in enumerate(layer_types):
        specs.append(_norm_weight(f"{prefix}{index}.norm.weight", geometry))
        specs += [
            TensorSpec(f"{prefix}{index}.mixer.{name}", dtype or geometry.dtype, shape, "weight")
            for name, dtype, shape in _MIXER_WEIGHTS[kind](geometry)
        ]
    return specs


# Name, type (None: the activations'), shape.
_Weight = tuple[str, str | None, tuple[Dim, ...]]


def _mamba2_weights(geometry: ModelGeometry) -> list[_Weight]:
    m = geometry.mamba2
    assert m is not None
    return [
        ("in_proj.weight", None, (m.d_in_proj, geometry.d_model)),
        ("conv1d.weight", None, (m.conv_dim, m.d_conv)),
        ("conv1d.bias", None, (m.conv_dim,)),
        # The recurrence is computed in fp32; so are its per-head constants. A = -exp(A_log).
        ("A", "float32", (m.n_heads,)),
        ("D", "float32", (m.n_heads,)),
        ("dt_bias", "float32", (m.n_heads,)),
        ("norm.weight", None, (m.d_inner,)),
        ("out_proj.weight", None, (geometry.d_model, m.d_inner)),
    ]


def _gated_delta_net_weights(geometry: ModelGeometry) -> list[_Weight]:
    g = geometry.gated_delta_net
    assert g is not None
    return [
        ("in_proj.weight", None, (g.d_in_proj, geometry.d_model)),
        ("conv1d.weight", None, (g.conv_dim, g.d_conv)),
        ("conv1d.bias", None, (g.conv_dim,)),
        ("A_log", "float32", (g.n_value_heads,)),
        ("dt_bias", "float32", (g.n_value_heads,)),
        ("norm.weight", None, (g.value_dim,)),
        ("out_proj.weight", None, (geometry.d_model, g.d_value)),
    ]


def _attention_weights(geometry: ModelGeometry) -> list[_Weight]:
    a = geometry.attention
    assert a is not None
    norms: list[_Weight] = [(f"{part}_norm.weight", geometry.norm_dtype, (a.head_dim,)) for part in ("q", "k")]
    return [
        ("qkv.weight", None, (a.d_qkv, geometry.d_model)),
        *(norms if a.has_qk_norm else []),
        ("o_proj.weight", None, (geometry.d_model, a.d_query)),
    ]


def _mlp_weights(geometry: ModelGeometry) -> list[_Weight]:
    p = geometry.mlp
    assert p is not None
    wide: _Weight = ("up_proj.weight", None, (p.d_ff, geometry.d_model))
    if p.activation == "swiglu":
        wide = ("gate_up_proj.weight", None, (2 * p.d_ff, geometry.d_model))
    return [wide, ("down_proj.weight", None, (geometry.d_model, p.d_ff))]


_MIXER_WEIGHTS = {
    LayerType.MAMBA2: _mamba2_weights,
    LayerType.GATED_DELTA_NET: _gated_delta_net_weights,
    LayerType.ATTENTION: _attention_weights,
    LayerType.MLP: _mlp_weights,
}


def network_inputs(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits
) -> list[tuple[str, TensorSpec]]:
    """Return (name, spec) of every graph input, weights last."""
    return _inputs(step_specs(), state_specs(geometry, replay, limits), weight_specs(geometry))


def network_outputs(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, *, returns_hidden_states: bool = False
) -> list[tuple[str, TensorSpec]]:
    """Return (name, spec) of every graph output: logits, hidden states where they are wanted, the present states."""
    results = [logits_spec(geometry)]
    if returns_hidden_states:
        results.append(hidden_states_spec(geometry))
    return _outputs(results, state_specs(geometry, replay, limits))


def mtp_network_inputs(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits
) -> list[tuple[str, TensorSpec]]:
    """Return (name, spec) of every input of the multi-token prediction head's graph, weights last."""
    return _inputs(mtp_step_specs(geometry), mtp_state_specs(geometry, replay, limits), mtp_weight_specs(geometry))


def mtp_network_outputs(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits
) -> list[tuple[str, TensorSpec]]:
    """Return (name, spec) of every output of the head's graph: its result, then the present states."""
    return _outputs([mtp_result_spec(geometry)], mtp_state_specs(geometry, replay, limits))


def _inputs(
    step: Sequence[TensorSpec], states: Sequence[TensorSpec], weights: Sequence[TensorSpec]
) -> list[tuple[str, TensorSpec]]:
    named = [(spec.name, spec) for spec in step]
    named += [(spec.past_name, spec) for spec in states]
    return named + [(spec.name, spec) for spec in weights]


def _outputs(results: Sequence[TensorSpec], states: Sequence[TensorSpec]) -> list[tuple[str, TensorSpec]]:
    return [(spec.name, spec) for spec in results] + [(spec.present_name, spec) for spec in states]
