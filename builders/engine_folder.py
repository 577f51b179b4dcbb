"""The files of an engine folder, written into a staging folder; the manifest last."""

import hashlib
import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trtllm_replayssm.builders.checkpoint import rank_checkpoint
from trtllm_replayssm.builders.checkpoint.convert import COMPANION_FILES
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    BuildReport,
    CheckpointRecord,
    Manifest,
)


def package_version() -> str:
    """Return this package's version; "unknown" in a checkout that is not installed."""
    try:
        return version("trtllm-replayssm")
    except PackageNotFoundError:
        return "unknown"


def sha256(data: bytes) -> str:
    """Return the SHA-256 of a buffer, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def config_text(geometry: ModelGeometry) -> str:
    """Return the ``config.json`` of a rank checkpoint or an engine of this geometry."""
    return json.dumps(rank_checkpoint.make_config(geometry), indent=2) + "\n"


def link_weights(checkpoint_dir: Path, staging: Path) -> None:
    """Bring the weights into the folder: as a hard link where the file system allows it, else as a copy."""
    source = (checkpoint_dir / WEIGHTS_FILE).resolve()
    try:
        os.link(source, staging / WEIGHTS_FILE)
    except OSError:
        shutil.copyfile(source, staging / WEIGHTS_FILE)


def checkpoint_record(geometry: ModelGeometry, weights_file: Path | None) -> CheckpointRecord:
    """Return what identifies the weights of an engine; ``weights_file`` is None for a build from a config alone."""
    config_sha256 = sha256(config_text(geometry).encode())
    if weights_file is None:
        return CheckpointRecord(config_sha256=config_sha256)
    with weights_file.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
    return CheckpointRecord(
        config_sha256=config_sha256, header_sha256=sha256(header), weights_bytes=weights_file.stat().st_size
    )


def write_descriptions(staging: Path, checkpoint_dir: Path, manifest: Manifest, report: BuildReport) -> None:
    """Write what goes with the engine and its weights, which are there already.

    Args:
        staging: where to write.
        checkpoint_dir: whose tokenizer files are copied.
        manifest: written last.
        report: what the builder said.
    """
    (staging / CONFIG_FILE).write_text(config_text(manifest.geometry), encoding="utf-8")
    for name in COMPANION_FILES:
        if (checkpoint_dir / name).is_file():
            shutil.copyfile(checkpoint_dir / name, staging / name)
    (staging / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (staging / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
