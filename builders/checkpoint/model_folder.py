"""One door to every kind of model folder: Hugging Face, rank checkpoint, engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtllm_replayssm.builders.checkpoint import hf_config, index, rank_checkpoint, source
from trtllm_replayssm.builders.checkpoint.hf_reader import checked_dtype
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.manifest import MANIFEST_FILE, read_manifest
from trtllm_replayssm.contract.tensors import TensorSpec, mtp_weight_specs, weight_specs
from trtllm_replayssm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FolderKind = Literal["huggingface", "rank_checkpoint", "engine"]


@dataclass(frozen=True)
class ModelFolder:
    """An opened model folder.

    Attributes:
        path: the folder.
        kind: what it holds.
        geometry: the model; ``dtype`` as asked for at opening.
    """

    path: Path
    kind: FolderKind
    geometry: ModelGeometry

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in the folder; an engine or a checkpoint may be without."""
        if self.kind == "huggingface":
            return index.has_weights(self.path)
        return rank_checkpoint.has_weights(self.path)

    def load_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Load the model's weights under their rank checkpoint names, converting a Hugging Face folder on the way.

        Raises:
            CheckpointError: they are absent, damaged or not those of the model.
        """
        return self._load(weight_specs(self.geometry), device)

    def load_mtp_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Load the weights of the multi-token prediction head, as ``load_weights``; none for a model without one."""
        return self._load(mtp_weight_specs(self.geometry), device)

    def _load(self, wanted: Sequence[TensorSpec], device: torch.device | str) -> dict[str, torch.Tensor]:
        if self.kind == "huggingface":
            return {name: t.to(device) for name, t in source.stream_weights(self.path, self.geometry, wanted)}
        return rank_checkpoint.load_weights(self.path, self.geometry, device, wanted)


def open_model_folder(folder: Path | str, dtype: str | None = None) -> ModelFolder:
    """Tell what a folder holds and read its model's geometry; no weight is loaded.

    Args:
        folder: Hugging Face folder, rank checkpoint or engine folder; a config.json alone will do.
        dtype: activation type to run in; None or "auto" takes the folder's own.

    Raises:
        CheckpointError: not a model folder, or an incomplete one.
        ConfigError: its config has unknown, missing or contradictory keys.
        UnsupportedError: a model that this version does not run.
        ManifestError: an engine folder whose manifest is damaged or of another version.
    """
    path = Path(folder)
    kind = folder_kind(path)
    if kind == "engine":
        return ModelFolder(path, kind, _with_dtype(read_manifest(path).geometry, dtype))
    if kind == "rank_checkpoint":
        return ModelFolder(path, kind, _with_dtype(rank_checkpoint.read_config(path), dtype))
    if index.has_weights(path):
        return ModelFolder(path, kind, source.open_source(path, dtype).geometry)
    return ModelFolder(path, kind, hf_config.read_hf_config(path, dtype).geometry)


def folder_kind(folder: Path) -> FolderKind:
    """Tell what a folder holds from the files that are in it.

    Raises:
        CheckpointError: not a folder, or one without a config.
    """
    kinds = "needed a Hugging Face folder, a rank checkpoint or an engine folder"
    if not folder.exists():
        raise CheckpointError(f"{folder}: found nothing there; {kinds}. Check the path.{_hub_hint(folder)}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: found a file; {kinds}.")
    if not any((folder / name).is_file() for name in (MANIFEST_FILE, "config.json")):
        raise CheckpointError(f"{folder}: found no config.json in it; {kinds}.")
    if (folder / MANIFEST_FILE).is_file():
        return "engine"
    return "rank_checkpoint" if rank_checkpoint.is_rank_checkpoint(folder) else "huggingface"


def _hub_hint(folder: Path) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)):
        return ""
    return (
        f" If it is a name on the Hugging Face hub: nothing is downloaded from there. Run `hf download {folder} "
        f"--local-dir DIR`, then name DIR."
    )


def _with_dtype(geometry: ModelGeometry, dtype: str | None) -> ModelGeometry:
    if dtype in (None, "auto"):
        return geometry
    return geometry.model_copy(update={"dtype": checked_dtype(str(dtype))})
