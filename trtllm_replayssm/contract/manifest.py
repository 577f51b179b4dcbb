"""What an engine folder says about itself: the only bridge between the builder and the runtime.

``manifest.json`` is written last, so a folder without one is not an engine. ``build_report.json`` beside it holds
what the builder said of the layers; it is read by ``inspect`` alone.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from trtllm_replayssm.contract.geometry import EngineLimits, Frozen, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.tensors import Role
from trtllm_replayssm.errors import ManifestError, validation_text

MANIFEST_FILE = "manifest.json"
REPORT_FILE = "build_report.json"
ENGINE_FILE = "rank0.engine"
MTP_ENGINE_FILE = "rank0_mtp.engine"
WEIGHTS_FILE = "rank0.safetensors"
CONFIG_FILE = "config.json"
SCHEMA_VERSION: Literal[1] = 1

BackendName = Literal["tensorrt", "tensorrt_rtx"]
WeightsMode = Literal["external", "embedded"]
SpeculativeDecodingMode = Literal["mtp"]
"""Drafts that an engine must be built for; any others need windows of max_draft_len alone."""


class TensorRecord(Frozen):
    """One binding of the engine.

    Attributes:
        name: binding name.
        dtype: "float32", "float16", "bfloat16" or "int32".
        shape: ints, or the symbols B, S, J of the step.
        role: "step", "state", "weight" or "result".
        is_input: whether the engine reads it.
        shares_address_with: for a present state, the past state that must be bound to the same address.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: Role
    is_input: bool
    shares_address_with: str | None = None


class ProfileRecord(Frozen):
    """One optimization profile; its index is its place in the manifest.

    Attributes:
        name: "decode" (windows of all slots) or "prefill" (one slot, a longer window).
        batch: least, best and most rows B.
        window: least, best and most window tokens S.
        logits: least, best and most logit positions J.
    """

    name: Literal["decode", "prefill"]
    batch: tuple[int, int, int]
    window: tuple[int, int, int]
    logits: tuple[int, int, int]

    def shapes(self, shape: tuple[int | str, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the least, best and largest shape of a tensor whose dimensions may be symbols."""
        ranges = {"B": self.batch, "S": self.window, "J": self.logits}
        least, best, most = (tuple(ranges[d][which] if isinstance(d, str) else d for d in shape) for which in range(3))
        return least, best, most


class PluginRecord(Frozen):
    """A plugin that the engine needs, and the kernels it carries.

    Attributes:
        op_type: creator name.
        version: creator version.
        namespace: creator namespace.
        nodes: how many layers use it.
        kernels_sha256: of the kernel image.
        kernels_bytes: size of the kernel image.
    """

    op_type: str
    version: str
    namespace: str
    nodes: int
    kernels_sha256: str
    kernels_bytes: int


class CheckpointRecord(Frozen):
    """Which weights belong to the engine.

    Attributes:
        header_sha256: of the safetensors header (names, types, shapes, offsets); None when built from a config alone.
        weights_bytes: size of the weights file; None when built from a config alone.
    """

    header_sha256: str | None = None
    weights_bytes: int | None = None


class MtpRecord(Frozen):
    """The engine of the multi-token prediction head; profiles, limits and GPUs are those of the model's.

    Attributes:
        tensors: every binding, in the order of the network.
        engine_sha256: of ``rank0_mtp.engine``.
        engine_bytes: its size.
    """

    tensors: tuple[TensorRecord, ...]
    engine_sha256: str
    engine_bytes: int


class Manifest(Frozen):
    """An engine folder's contents.

    Attributes:
        schema_version: of this file.
        package_version: of the package that built it.
        backend: "tensorrt" or "tensorrt_rtx".
        backend_version: of that TensorRT.
        compute_capabilities: targets as 10 * major + minor.
        geometry: of the model.
        replay: history, window and state type.
        limits: what the engine accepts.
        tensors: every binding, in the order of the network.
        profiles: in the order of their indices.
        plugins: what must be registered before the engine is deserialised.
        weights: "external" are bound at load, "embedded" are in the plan.
        checkpoint: identity of the weights.
        engine_sha256: of ``rank0.engine``.
        engine_bytes: its size.
        mtp: the engine of the multi-token prediction head, for which the model's returns hidden states; None without.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    package_version: str
    backend: BackendName
    backend_version: str
    compute_capabilities: tuple[int, ...]
    geometry: ModelGeometry
    replay: ReplayGeometry
    limits: EngineLimits
    tensors: tuple[TensorRecord, ...]
    profiles: tuple[ProfileRecord, ...]
    plugins: tuple[PluginRecord, ...]
    weights: WeightsMode
    checkpoint: CheckpointRecord
    engine_sha256: str
    engine_bytes: int
    mtp: MtpRecord | None = None

    def profile_index(self, name: Literal["decode", "prefill"]) -> int:
        """Return the optimization profile index of a step kind."""
        return [profile.name for profile in self.profiles].index(name)


class LayerRecord(Frozen):
    """One layer as TensorRT names it.

    Attributes:
        kind: layer type.
        name: layer name.
    """

    kind: str
    name: str


class BuildReport(Frozen):
    """What the builder said, since a plan cannot be deserialised without a GPU that it targets.

    Attributes:
        network_layers: the parsed network, in order.
        engine_layers: the built engine, in order, per profile.
        warnings: of parser and builder.
        seconds: step of the build -> time it took.
        mtp_network_layers: as network_layers, of the multi-token prediction head; none without its engine.
        mtp_engine_layers: as engine_layers, idem.
    """

    network_layers: tuple[LayerRecord, ...]
    engine_layers: tuple[LayerRecord, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    mtp_network_layers: tuple[LayerRecord, ...] = ()
    mtp_engine_layers: tuple[LayerRecord, ...] = ()


def is_engine_folder(folder: Path) -> bool:
    """Say whether a folder holds a complete engine."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an engine folder.

    Raises:
        ManifestError: there is none, it is not JSON, has another schema, or lacks a field.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        version = found.get("schema_version") if isinstance(found, dict) else None
        if version == SCHEMA_VERSION:
            return Manifest.model_validate_json(text)
    except OSError as error:
        raise ManifestError(
            f"{folder}: found no readable {MANIFEST_FILE} ({error.strerror}); needed an engine folder. "
            "Build one with `trtllm-replayssm build`."
        ) from error
    except (ValueError, RecursionError) as error:  # the first includes what is no UTF-8, and pydantic's errors
        raise _damaged(path, error) from error
    raise ManifestError(f"{path}: found schema_version {version!r}; needed {SCHEMA_VERSION}. Build the engine again.")


def read_report(folder: Path) -> BuildReport | None:
    """Read what the builder said; None when the folder has no report.

    Raises:
        ManifestError: it cannot be read.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    try:
        return BuildReport.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error


def check_engine_size(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of the engine files with what the manifest says; nothing is read.

    Raises:
        ManifestError: a file is missing, or of another size.
    """
    for name, record in ((ENGINE_FILE, manifest), (MTP_ENGINE_FILE, manifest.mtp)):
        if record is None:
            continue
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.engine_bytes:
            raise ManifestError(
                f"{path}: found {'nothing' if found is None else f'{found:,} bytes'}; needed {record.engine_bytes:,} "
                "bytes, as the manifest says. Copy the file again, or build the engine again."
            )


def _damaged(path: Path, error: Exception) -> ManifestError:
    if isinstance(error, ValidationError):
        return ManifestError(f"{path}: {validation_text(error)}. Build the engine again.")
    return ManifestError(f"{path}: found text that is not JSON ({error}). Build the engine again.")
