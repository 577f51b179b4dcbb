"""The header of a safetensors file, against what the library writes and against damage."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtllm_replayssm.contract.safetensors_header import DTYPE_NAMES, MAX_HEADER_BYTES, read_entries, read_header
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.ops.dtypes import torch_dtype


def with_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_every_tensor_of_the_librarys_files_is_where_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    tensors = {dtype: torch.arange(6).view(2, 3).to(torch_dtype(dtype)) for dtype in DTYPE_NAMES}
    save_file(tensors, path, metadata={"format": "pt"})
    entries, content = read_entries(path), path.read_bytes()
    assert entries.keys() == tensors.keys()
    assert content.startswith(read_header(path))
    for dtype, entry in entries.items():
        assert (entry.dtype, entry.shape) == (DTYPE_NAMES[dtype], (2, 3))
        stored = torch.frombuffer(bytearray(content[entry.begin : entry.end]), dtype=torch_dtype(dtype)).view(2, 3)
        assert torch.equal(stored, tensors[dtype])


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 16, (3).to_bytes(8, "little") + b"{}"])
def test_a_header_longer_than_the_file_is_refused_unread(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file: found a safetensors header of \d+ bytes; needed at most \d+ in"):
        read_entries(tmp_path / "file")


def test_a_header_beyond_the_formats_limit_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match="needed at most 100000000"):
        read_header(tmp_path / "file")


@pytest.mark.parametrize(
    "header",
    [[1], {"a": 1}, {"a": {"dtype": "F32", "shape": [1]}}, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}],
    ids=["list", "number", "no-place", "half-a-place"],
)
def test_a_header_of_another_form_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(CheckpointError, match="header that cannot be read"):
        read_entries(with_header(tmp_path / "file", header))


def test_a_tensor_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    path = with_header(tmp_path / "file", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    assert read_entries(path)["a"].end == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"a: found bytes \d+ to \d+; needed"):
        read_entries(path)
