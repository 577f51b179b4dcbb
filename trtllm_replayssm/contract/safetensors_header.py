"""The header of a safetensors file: what it holds and where, read and checked without any tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import CheckpointError

LENGTH_BYTES = 8
# The format's own limit; a longer header means that the file is something else.
MAX_HEADER_BYTES = 100_000_000

DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The contract's type names -> safetensors' names."""


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a header.

    Attributes:
        dtype: safetensors' name of the type ("BF16").
        shape: as stored.
        begin: first byte, counted from the start of the file.
        end: the byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> bytes:
    """Return the first bytes of a file: the header with its length before it.

    Raises:
        CheckpointError: the length is not one that this file can have.
        OSError: the file cannot be read.
    """
    most = min(path.stat().st_size - LENGTH_BYTES, MAX_HEADER_BYTES)
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > most:
            raise CheckpointError(
                f"{path}: found a safetensors header of {num_bytes} bytes; needed at most {max(most, 0)} in this file. "
                "It is truncated or no safetensors file; copy it again."
            )
        return length + file.read(num_bytes)


def read_entries(path: Path) -> dict[str, StoredTensor]:
    """Return what a file's header says of each tensor.

    Raises:
        CheckpointError: the header is not one of a safetensors file, or places a tensor beyond the file's end.
        OSError: the file cannot be read.
    """
    header, num_bytes = read_header(path), path.stat().st_size
    try:
        table = json.loads(header[LENGTH_BYTES:])
        entries = {
            name: _entry(values, data_start=len(header)) for name, values in table.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: found a safetensors header that cannot be read ({error!r}). Copy the file again."
        ) from error
    for name, entry in entries.items():
        if not len(header) <= entry.begin <= entry.end <= num_bytes:
            raise CheckpointError(
                f"{path}: {name}: found bytes {entry.begin} to {entry.end}; needed {len(header)} to {num_bytes} at "
                "most. The file is truncated or damaged; copy it again."
            )
    return entries


def _entry(values: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = values["data_offsets"]
    return StoredTensor(values["dtype"], tuple(values["shape"]), data_start + begin, data_start + end)
