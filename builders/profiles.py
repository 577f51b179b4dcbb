"""The two optimization profiles of an engine, and the bindings they range over."""

from collections.abc import Sequence

from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import ProfileRecord, TensorRecord, WeightsMode
from trtllm_replayssm.contract.tensors import (
    TensorSpec,
    mtp_network_inputs,
    mtp_network_outputs,
    network_inputs,
    network_outputs,
)


def profiles(replay: ReplayGeometry, limits: EngineLimits) -> tuple[ProfileRecord, ...]:
    """Return the profiles in the order of their indices.

    A decode step runs windows of up to T tokens for all slots. A prefill step runs one slot: TensorRT's linear
    cache update writes cache row i for row i of the step, so that slot's row is bound alone.
    """
    window, rows = replay.window, limits.max_batch_size
    decode = ProfileRecord(name="decode", batch=(1, rows, rows), window=(1, window, window), logits=(1, window, window))
    longest = max(limits.max_num_tokens, window)
    prefill = ProfileRecord(name="prefill", batch=(1, 1, 1), window=(1, longest, longest), logits=(1, 1, 1))
    return decode, prefill


def bindings(
    geometry: ModelGeometry,
    replay: ReplayGeometry,
    limits: EngineLimits,
    weights: WeightsMode,
    *,
    returns_hidden_states: bool = False,
) -> tuple[TensorRecord, ...]:
    """Return every binding of an engine: inputs, then outputs, in the order of the network."""
    outputs = network_outputs(geometry, replay, limits, returns_hidden_states=returns_hidden_states)
    return _records(network_inputs(geometry, replay, limits), outputs, weights)


def mtp_bindings(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, weights: WeightsMode
) -> tuple[TensorRecord, ...]:
    """Return every binding of the multi-token prediction head's engine, as ``bindings``."""
    inputs = mtp_network_inputs(geometry, replay, limits)
    return _records(inputs, mtp_network_outputs(geometry, replay, limits), weights)


def _records(
    inputs: Sequence[tuple[str, TensorSpec]], outputs: Sequence[tuple[str, TensorSpec]], weights: WeightsMode
) -> tuple[TensorRecord, ...]:
    records = [
        TensorRecord(name=name, dtype=spec.dtype, shape=spec.shape, role=spec.role, is_input=True)
        for name, spec in inputs
        if spec.role != "weight" or weights == "external"
    ]
    records += [
        TensorRecord(
            name=name,
            dtype=spec.dtype,
            shape=spec.shape,
            role=spec.role,
            is_input=False,
            shares_address_with=spec.past_name if spec.role == "state" else None,
        )
        for name, spec in outputs
    ]
    return tuple(records)
