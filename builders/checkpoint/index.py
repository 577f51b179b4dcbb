"""The tensors of a Hugging Face folder: where each is stored, its type and shape. No values are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from trtllm_replayssm.contract.geometry import DTYPE_BYTES
from trtllm_replayssm.contract.safetensors_header import DTYPE_NAMES
from trtllm_replayssm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# safetensors' names of the types that can be converted, with their bytes.
SOURCE_DTYPE_BYTES = {stored: DTYPE_BYTES[name] for name, stored in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class SourceTensor:
    """One stored tensor.

    Attributes:
        name: as in the file.
        file: the safetensors file.
        dtype: safetensors' name of the type ("BF16").
        shape: as stored.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file; of the types that can be converted."""
        return prod(self.shape) * SOURCE_DTYPE_BYTES[self.dtype]

    def read(self) -> torch.Tensor:
        """Return the values, mapped from the file.

        The file is opened anew for every tensor: its pages leave memory with the tensor, so that a conversion holds
        one tensor and not one shard.

        Raises:
            CheckpointError: the file changed or is damaged.
        """
        try:
            with safe_open(str(self.file), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.file, error) from error
        return tensor


def read_index(folder: Path) -> dict[str, SourceTensor]:
    """List the tensors of a folder, one file or sharded.

    Raises:
        CheckpointError: no weights, a missing or damaged shard, or an index that disagrees with its shards.
    """
    if (folder / SINGLE_FILE).is_file():
        return _read_file(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder)
    raise CheckpointError(f"{folder}: {_what_is_there(folder)}")


def has_weights(folder: Path) -> bool:
    """Say whether a folder has safetensors weights, whole or not."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def _what_is_there(folder: Path) -> str:
    needed = f"needed {SINGLE_FILE} or {INDEX_FILE}."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return (
            f"found pickled PyTorch weights alone; {needed} Convert to safetensors: load the model with transformers "
            "and call save_pretrained."
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    return f"found {', '.join(found)}; {needed}" if found else f"found no weights; {needed}"


def _read_shards(folder: Path) -> dict[str, SourceTensor]:
    weight_map = _read_weight_map(folder / INDEX_FILE)
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_FILE}: found {len(files) - len(absent)} of its {len(files)} shards; needed "
            f"{', '.join(absent[:5])}{', ...' if absent[5:] else ''} as well. Download the missing shards."
        )
    index: dict[str, SourceTensor] = {}
    for name in files:
        stored = _read_file(folder / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        different = sorted(listed.symmetric_difference(stored))
        if different:
            raise CheckpointError(
                f"{folder / name}: found other tensors than {INDEX_FILE} lists for it ({', '.join(different[:5])}); "
                "needed the files of one model and version. Download the folder again."
            )
        index.update(stored)
    return index


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no readable weight_map ({error!r}). Download it again.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: found an empty weight_map; needed tensor -> shard. Download it again.")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: found shard {file!r}; needed the name of a file in the same folder. Download it again."
            )
    return weight_map


def _read_file(path: Path) -> dict[str, SourceTensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: SourceTensor(name, path, view.get_dtype(), tuple(view.get_shape()))
                for name, view in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read as safetensors ({error}). It is truncated or damaged; copy it again."
    )
