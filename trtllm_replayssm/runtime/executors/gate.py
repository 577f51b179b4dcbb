"""The gate before an engine: what it was built for is compared with what is here, and a difference is named."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.manifest import Manifest, MtpRecord
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE, PLUGIN_VERSION, PLUGINS
from trtllm_replayssm.contract.safetensors_header import read_header
from trtllm_replayssm.errors import ManifestError
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR


@dataclass(frozen=True)
class Installation:
    """What a machine offers to an engine.

    Attributes:
        backend: "tensorrt" or "tensorrt_rtx".
        backend_version: of the installed package.
        compute_capability: of the GPU, as 10 * major + minor.
    """

    backend: str
    backend_version: str
    compute_capability: int


def check_installation(manifest: Manifest, here: Installation) -> None:
    """Refuse an engine that was built for something else.

    Raises:
        ManifestError: every differing field, with what was found and what is needed.
    """
    problems = []
    if manifest.backend != here.backend:
        problems.append(f"backend: built with {manifest.backend}, found {here.backend}")
    if manifest.backend_version != here.backend_version:
        problems.append(f"backend_version: built with {manifest.backend_version}, found {here.backend_version}")
    if here.compute_capability not in manifest.compute_capabilities:
        problems.append(
            f"compute_capabilities: built for {capability_text(*manifest.compute_capabilities)}, found a GPU of "
            f"{capability_text(here.compute_capability)}"
        )
    ours = {(io.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) for io in PLUGINS}
    for plugin in manifest.plugins:
        if (plugin.op_type, plugin.version, plugin.namespace) not in ours:
            problems.append(
                f"plugins: built with {plugin.namespace}::{plugin.op_type} version {plugin.version}, which this "
                f"version of the package does not have"
            )
    if problems:
        raise ManifestError(f"engine: {'; '.join(problems)}. Build it again for this machine, or use {TORCH_EXECUTOR}.")


def read_engine(path: Path, record: Manifest | MtpRecord) -> bytes:
    """Read a plan and compare it with what the manifest says of it.

    Raises:
        ManifestError: it is missing, cut short or not the one that was built.
    """
    try:
        plan = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: found {error.strerror or error}; needed the engine. Build it again.") from error
    if len(plan) != record.engine_bytes:
        raise ManifestError(
            f"{path}: engine_bytes: found {len(plan)}, needed {record.engine_bytes}. The file is cut short or was "
            f"replaced; copy or build it again."
        )
    found = hashlib.sha256(plan).hexdigest()
    if found != record.engine_sha256:
        raise ManifestError(
            f"{path}: engine_sha256: found {found}, needed {record.engine_sha256}. The file was damaged or replaced; "
            f"copy or build it again."
        )
    return plan


def check_weights(path: Path, manifest: Manifest) -> None:
    """Compare a weights file's size and header (names, types, shapes and offsets) with what was built from.

    An engine built from a config alone has no such record: any weights of the right shapes will do.

    Raises:
        ManifestError: there is no such file, or it is another checkpoint's or cut short.
        CheckpointError: it is no safetensors file.
    """
    try:
        header, num_bytes = read_header(path), path.stat().st_size
    except OSError as error:
        raise ManifestError(
            f"{path}: found {error.strerror or error}; needed the engine's weights, which are bound at load. Name the "
            f"rank checkpoint that they are in with the option checkpoint_dir."
        ) from error
    here = {"header_sha256": hashlib.sha256(header).hexdigest(), "weights_bytes": num_bytes}
    for name, found in here.items():
        needed = getattr(manifest.checkpoint, name)
        if needed is not None and found != needed:
            raise ManifestError(
                f"{path}: checkpoint.{name}: found {found}, needed {needed}. Name the checkpoint that the engine was "
                f"built from with the option checkpoint_dir, or copy the file again."
            )
