"""The files of an engine folder, written into a staging folder; the manifest last."""

import hashlib
import os
import shutil
from pathlib import Path

from trtllm_replayssm.builders.checkpoint import rank_checkpoint
from trtllm_replayssm.builders.checkpoint.companions import copy_companions
from trtllm_replayssm.contract.manifest import (
    MANIFEST_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    BuildReport,
    CheckpointRecord,
    Manifest,
)
from trtllm_replayssm.contract.safetensors_header import read_header


def link_weights(checkpoint_dir: Path, staging: Path) -> None:
    """Bring the weights into the folder: as a hard link where the file system allows it, else as a copy."""
    source = (checkpoint_dir / WEIGHTS_FILE).resolve()
    try:
        os.link(source, staging / WEIGHTS_FILE)
    except OSError:
        shutil.copyfile(source, staging / WEIGHTS_FILE)


def checkpoint_record(weights_file: Path | None) -> CheckpointRecord:
    """Return what identifies the weights of an engine; ``weights_file`` is None for a build from a config alone."""
    if weights_file is None:
        return CheckpointRecord()
    header = hashlib.sha256(read_header(weights_file)).hexdigest()
    return CheckpointRecord(header_sha256=header, weights_bytes=weights_file.stat().st_size)


def write_descriptions(staging: Path, checkpoint_dir: Path, manifest: Manifest, report: BuildReport) -> None:
    """Write what goes with the engine and its weights, which are there already.

    Args:
        staging: where to write.
        checkpoint_dir: whose tokenizer files are copied.
        manifest: written last.
        report: what the builder said.
    """
    rank_checkpoint.write_config(staging, manifest.geometry)
    copy_companions(checkpoint_dir, staging)
    (staging / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (staging / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
