"""Write a safetensors file tensor by tensor: the header first, from specs alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.contract.geometry import DTYPE_BYTES
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.safetensors_header import DTYPE_NAMES, LENGTH_BYTES
from trtllm_replayssm.contract.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8


def write_safetensors(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> int:
    """Write a file, holding one tensor at a time.

    Args:
        path: file to create.
        specs: what the file holds.
        tensors: each spec's name and values (its shape and type), in any order.
        on_bytes: called with the bytes just written.

    Returns:
        The bytes of the file.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    import torch

    header, offsets, total = _layout(specs)
    pending = {spec.name: spec for spec in specs}
    with path.open("wb") as file:
        file.truncate(len(header) + total)
        file.write(header)
        for name, values in tensors:
            spec = pending.pop(name)
            assert (str(values.dtype), tuple(values.shape)) == (f"torch.{spec.dtype}", spec.shape), name
            file.seek(len(header) + offsets[name])
            on_bytes(file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data))
        assert not pending, f"tensors that were never written: {sorted(pending)}"
        file.flush()
        os.fsync(file.fileno())
    return len(header) + total


def _layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Place the tensors, widest type first: every one is then aligned for its type when the file is mapped."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype]):
        offsets[spec.name], end = end, end + tensor_bytes(spec)
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[spec.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, offsets, end
