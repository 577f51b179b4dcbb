"""What a model or engine folder holds, without loading weights or needing a GPU."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trtllm_replayssm.builders.checkpoint.model_folder import FolderKind, ModelFolder, open_model_folder
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    LAYER_LETTERS,
    EngineLimits,
    Frozen,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.manifest import (
    BuildReport,
    LayerRecord,
    Manifest,
    check_engine_size,
    read_manifest,
    read_report,
)
from trtllm_replayssm.contract.memory import StatePool, state_pools, tensor_bytes
from trtllm_replayssm.contract.memory_plan import Execution, MemoryPlan, mtp_head_bytes, plan_memory
from trtllm_replayssm.contract.tensors import weight_specs


class EngineInspection(Frozen):
    """What an engine folder adds: its manifest, and counts of what the builder reported.

    Attributes:
        manifest: the whole manifest but for the bindings, which are many.
        bindings: role -> how many, of the model's engine.
        aliased_states: states whose past and present share an address.
        network_layers: TensorRT layer type -> how many, in the parsed network.
        engine_layers: layer type -> how many, in the built engine, both profiles.
        plugin_layers: names of the plugin layers of the parsed network.
        mtp_network_layers: as network_layers, of the multi-token prediction head; none without its engine.
        mtp_engine_layers: as engine_layers, idem.
        seconds: step of the build -> time it took.
    """

    manifest: Manifest
    bindings: dict[str, int]
    aliased_states: int
    network_layers: dict[str, int]
    engine_layers: dict[str, int]
    plugin_layers: tuple[str, ...]
    mtp_network_layers: dict[str, int]
    mtp_engine_layers: dict[str, int]
    seconds: dict[str, float]


class Inspection(Frozen):
    """What a folder holds.

    Attributes:
        path: the folder.
        kind: of folder.
        geometry: of the model.
        pattern: one letter per layer: M (Mamba-2), G (Gated DeltaNet), * (attention), - (MLP).
        layers: layer type -> how many.
        num_parameters: elements of all weights.
        weights_bytes: bytes of all weights.
        has_weights: whether they are in the folder.
        replay: how the states below are kept.
        max_batch_size: slots.
        max_seq_len: rows of the key/value caches below.
        states: the pools of one slot.
        state_bytes_per_slot: their sum.
        memory: what the model takes on its device.
        engine: None unless the folder is one.
    """

    path: Path
    kind: FolderKind
    geometry: ModelGeometry
    pattern: str
    layers: dict[str, int]
    num_parameters: int
    weights_bytes: int
    has_weights: bool
    replay: ReplayGeometry
    max_batch_size: int
    max_seq_len: int
    states: tuple[StatePool, ...]
    state_bytes_per_slot: int
    memory: MemoryPlan
    engine: EngineInspection | None


def inspect_folder(path: Path) -> Inspection:
    """Read a Hugging Face folder, a rank checkpoint or an engine folder.

    Raises:
        CheckpointError: none of these, or an incomplete one.
        ManifestError: an engine folder of another version, or with an engine of another size than it was built.
    """
    folder = open_model_folder(path)
    if folder.kind == "engine":
        manifest = read_manifest(path)
        check_engine_size(path, manifest)
        return _inspection(folder, manifest.replay, manifest.limits, _engine(manifest, read_report(path)))
    # No engine says how many slots it has and how long they are: shown is what a run would take.
    length = min(defaults.MAX_SEQ_LEN, folder.geometry.max_position_embeddings)
    limits = EngineLimits(
        max_batch_size=defaults.MAX_BATCH_SIZE,
        max_input_len=length,
        max_seq_len=length,
        max_num_tokens=min(defaults.MAX_NUM_TOKENS, length),
    )
    return _inspection(folder, ReplayGeometry(), limits, None)


def _inspection(
    folder: ModelFolder, replay: ReplayGeometry, limits: EngineLimits, engine: EngineInspection | None
) -> Inspection:
    geometry = folder.geometry
    states = state_pools(geometry, replay, limits)
    counts = Counter(layer.value for layer in geometry.layer_types)
    weights = weight_specs(geometry)
    memory = _memory(geometry, replay, limits, engine)
    return Inspection(
        path=folder.path,
        kind=folder.kind,
        geometry=geometry,
        pattern="".join(LAYER_LETTERS[layer] for layer in geometry.layer_types),
        layers=dict(counts),
        num_parameters=sum(tensor_bytes(spec) // DTYPE_BYTES[spec.dtype] for spec in weights),
        weights_bytes=sum(tensor_bytes(spec) for spec in weights),
        has_weights=folder.has_weights,
        replay=replay,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        states=states,
        state_bytes_per_slot=sum(pool.bytes_per_slot for pool in states),
        memory=memory,
        engine=engine,
    )


def _memory(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, engine: EngineInspection | None
) -> MemoryPlan:
    if engine is None:
        return plan_memory(geometry, replay, limits, Execution())
    # TensorRT says what its activations take when an engine is loaded, not before.
    has_head = engine.manifest.mtp is not None
    how = Execution.of_engine(has_weights=True, returns_hidden_states=has_head)
    head = 0
    if has_head:
        head = mtp_head_bytes(geometry, replay, limits, embeds_weights=engine.manifest.weights == "embedded")
    return plan_memory(geometry, replay, limits, how).model_copy(update={"drafter": head})


def _kinds(layers: Sequence[LayerRecord]) -> dict[str, int]:
    return dict(Counter(layer.kind for layer in layers).most_common())


def _engine(manifest: Manifest, report: BuildReport | None) -> EngineInspection:
    network = report.network_layers if report else ()
    shown: dict[str, object] = {"tensors": ()}
    if manifest.mtp is not None:
        shown["mtp"] = manifest.mtp.model_copy(update={"tensors": ()})
    return EngineInspection(
        manifest=manifest.model_copy(update=shown),
        bindings=dict(Counter(tensor.role for tensor in manifest.tensors)),
        aliased_states=sum(tensor.shares_address_with is not None for tensor in manifest.tensors),
        network_layers=_kinds(network),
        engine_layers=_kinds(report.engine_layers if report else ()),
        plugin_layers=tuple(layer.name for layer in network if layer.kind == "PLUGIN_V3"),
        mtp_network_layers=_kinds(report.mtp_network_layers if report else ()),
        mtp_engine_layers=_kinds(report.mtp_engine_layers if report else ()),
        seconds=report.seconds if report else {},
    )
