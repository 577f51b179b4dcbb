"""The gate before an engine: what it was built for is compared with what is here, and a difference is named."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.contract.manifest import ENGINE_FILE, Manifest
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE, PLUGIN_VERSION, PLUGINS
from trtllm_replayssm.errors import ManifestError


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
        targets = ", ".join(as_version(capability) for capability in manifest.compute_capabilities)
        problems.append(
            f"compute_capabilities: built for {targets}, found a GPU of {as_version(here.compute_capability)}"
        )
    ours = {(io.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) for io in PLUGINS}
    for plugin in manifest.plugins:
        if (plugin.op_type, plugin.version, plugin.namespace) not in ours:
            problems.append(
                f"plugins: built with {plugin.namespace}::{plugin.op_type} version {plugin.version}, which this "
                f"version of the package does not have"
            )
    if problems:
        raise ManifestError(f"engine: {'; '.join(problems)}. Build it again for this machine, or use executor='torch'.")


def read_engine(folder: Path, manifest: Manifest) -> bytes:
    """Read the plan and compare it with the manifest.

    Raises:
        ManifestError: it is missing, cut short or not the one that was built.
    """
    path = folder / ENGINE_FILE
    try:
        plan = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; needed the engine. Build it again.") from error
    if len(plan) != manifest.engine_bytes:
        raise ManifestError(
            f"{path}: engine_bytes: found {len(plan)}, needed {manifest.engine_bytes}. The file is cut short or was "
            f"replaced; copy or build it again."
        )
    found = hashlib.sha256(plan).hexdigest()
    if found != manifest.engine_sha256:
        raise ManifestError(
            f"{path}: engine_sha256: found {found}, needed {manifest.engine_sha256}. The file was damaged or replaced; "
            f"copy or build it again."
        )
    return plan


def check_weights(path: Path, manifest: Manifest) -> None:
    """Compare a weights file's header, which holds names, types, shapes and offsets, with what was built from.

    An engine built from a config alone has no such record: any weights of the right shapes will do.

    Raises:
        ManifestError: there is no such file, or it is another checkpoint's.
    """
    try:
        with path.open("rb") as file:
            length = file.read(8)
            header = length + file.read(int.from_bytes(length, "little"))
    except OSError as error:
        raise ManifestError(
            f"{path}: {error.strerror}; the engine's weights are bound at load. Name the rank checkpoint that they are "
            f"in with checkpoint_dir."
        ) from error
    needed, found = manifest.checkpoint.header_sha256, hashlib.sha256(header).hexdigest()
    if needed is not None and found != needed:
        raise ManifestError(
            f"{path}: checkpoint.header_sha256: found {found}, needed {needed}. Name the checkpoint "
            f"that the engine was built from with checkpoint_dir."
        )


def as_version(capability: int) -> str:
    """Write 10 * major + minor as NVIDIA does."""
    return f"{capability // 10}.{capability % 10}"
