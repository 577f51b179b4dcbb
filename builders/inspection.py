"""What a model or engine folder holds, without loading weights or needing a GPU."""

from collections import Counter
from pathlib import Path
from typing import Literal

from trtllm_replayssm.builders.checkpoint.model_folder import ModelFolder, open_model_folder
from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    EngineLimits,
    Frozen,
    LayerType,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.manifest import BuildReport, Manifest, read_manifest, read_report
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.tensors import state_specs, weight_specs

_LETTERS = {LayerType.MAMBA2: "M", LayerType.ATTENTION: "*", LayerType.MLP: "-"}
# What a folder that is no engine is shown with: this package's defaults.
_SHOWN_SEQ_LEN = 4096


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


class EngineInspection(Frozen):
    """What an engine folder adds: its manifest, and counts of what the builder reported.

    Attributes:
        manifest: the whole manifest but for the bindings, which are many.
        bindings: role -> how many.
        aliased_states: states whose past and present share an address.
        network_layers: TensorRT layer type -> how many, in the parsed network.
        engine_layers: layer type -> how many, in the built engine, both profiles.
        plugin_layers: names of the plugin layers of the parsed network.
        seconds: step of the build -> time it took.
    """

    manifest: Manifest
    bindings: dict[str, int]
    aliased_states: int
    network_layers: dict[str, int]
    engine_layers: dict[str, int]
    plugin_layers: tuple[str, ...]
    seconds: dict[str, float]


class Inspection(Frozen):
    """What a folder holds.

    Attributes:
        path: the folder.
        kind: of folder.
        geometry: of the model.
        pattern: one letter per layer: M (Mamba-2), * (attention), - (MLP).
        layers: layer type -> how many.
        num_parameters: elements of all weights.
        weights_bytes: bytes of all weights.
        has_weights: whether they are in the folder.
        replay: how the states below are kept.
        max_seq_len: rows of the key/value caches below.
        states: the pools of one slot.
        state_bytes_per_slot: their sum.
        engine: None unless the folder is one.
    """

    path: Path
    kind: Literal["huggingface", "rank_checkpoint", "engine"]
    geometry: ModelGeometry
    pattern: str
    layers: dict[str, int]
    num_parameters: int
    weights_bytes: int
    has_weights: bool
    replay: ReplayGeometry
    max_seq_len: int
    states: tuple[StatePool, ...]
    state_bytes_per_slot: int
    engine: EngineInspection | None


def inspect_folder(path: Path) -> Inspection:
    """Read a Hugging Face folder, a rank checkpoint or an engine folder.

    Raises:
        CheckpointError: none of these, or an incomplete one.
        ManifestError: an engine folder of another version.
    """
    folder = open_model_folder(path)
    if folder.kind == "engine":
        manifest = read_manifest(path)
        return _inspection(folder, manifest.replay, manifest.limits, _engine(manifest, read_report(path)))
    length = min(_SHOWN_SEQ_LEN, folder.geometry.max_position_embeddings)
    limits = EngineLimits(max_batch_size=1, max_input_len=length, max_seq_len=length, max_num_tokens=length)
    return _inspection(folder, ReplayGeometry(), limits, None)


def _inspection(
    folder: ModelFolder, replay: ReplayGeometry, limits: EngineLimits, engine: EngineInspection | None
) -> Inspection:
    geometry = folder.geometry
    states = _state_pools(geometry, replay, limits)
    counts = Counter(layer.value for layer in geometry.layer_types)
    weights = weight_specs(geometry)
    return Inspection(
        path=folder.path,
        kind=folder.kind,
        geometry=geometry,
        pattern="".join(_LETTERS[layer] for layer in geometry.layer_types),
        layers=dict(counts),
        num_parameters=sum(tensor_bytes(spec) // DTYPE_BYTES[spec.dtype] for spec in weights),
        weights_bytes=sum(tensor_bytes(spec) for spec in weights),
        has_weights=folder.has_weights,
        replay=replay,
        max_seq_len=limits.max_seq_len,
        states=states,
        state_bytes_per_slot=sum(pool.bytes_per_slot for pool in states),
        engine=engine,
    )


def _state_pools(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> tuple[StatePool, ...]:
    one = limits.model_copy(update={"max_batch_size": 1})
    pools: dict[str, StatePool] = {}
    for spec in state_specs(geometry, replay, one):
        kind = spec.name.rpartition("_")[0]
        held = pools.get(kind)
        pools[kind] = StatePool(
            kind=kind,
            layers=1 + (held.layers if held else 0),
            dtype=spec.dtype,
            slot_shape=tuple(int(d) for d in spec.shape[1:]),
            bytes_per_slot=tensor_bytes(spec, B=1) + (held.bytes_per_slot if held else 0),
        )
    return tuple(pools.values())


def _engine(manifest: Manifest, report: BuildReport | None) -> EngineInspection:
    network = report.network_layers if report else ()
    return EngineInspection(
        manifest=manifest.model_copy(update={"tensors": ()}),
        bindings=dict(Counter(tensor.role for tensor in manifest.tensors)),
        aliased_states=sum(tensor.shares_address_with is not None for tensor in manifest.tensors),
        network_layers=dict(Counter(layer.kind for layer in network).most_common()),
        engine_layers=dict(Counter(layer.kind for layer in (report.engine_layers if report else ())).most_common()),
        plugin_layers=tuple(layer.name for layer in network if layer.kind == "PLUGIN_V3"),
        seconds=report.seconds if report else {},
    )
