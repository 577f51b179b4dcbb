"""The kernel image: compiled kernels and their launch table as one block of bytes.

A plugin carries one in its ``kernels`` field, hence inside the engine; ``plugins/cpp/kernel_image.h`` reads it. All
integers are little-endian.

    header   magic "RSSMKIMG", uint32 version, uint32 entry count, char[256] constants
    entry    char[32] role, char[64] symbol, int32 compute capability (10 * major + minor),
             int32 is_exact (1: runs on that capability alone, as sm_90a; 0: also on later minors of the same major),
             int32 grid_x, int32 block_x, int32 dynamic_shared_bytes, int32 is_persistent,
             int32 is_dependent_launch, int32 rows_per_block, int32 most_blocks_per_multiprocessor, 4 bytes of zero,
             uint64 cubin offset from the image's start, uint64 cubin bytes
    cubins   entries may share one

``constants`` is what the kernels were compiled for (``specializations.constants_of``); a plugin refuses an image whose
constants are not those of its tensors and fields.

A kernel is launched with block (block_x, 1, 1) and grid (grid_x, rows of the step / rows_per_block rounded up, 1), a
persistent one with grid (min(multiprocessors of the device, rows * grid_x), 1, 1); its single argument is the
``Params`` struct of its folder. One with is_dependent_launch is launched with programmatic stream serialization.
Roles: "step" (window of at most 1 + max_draft_len tokens), "prefill" (longer), and, where there is one,
"pipelined_step" (as "step", for tensors in 16-byte pieces) or "one_token_step" (as "step", for windows of one token).
An image of a convolution and what comes after it has the convolution's roles as "conv_step" and so on, and, where there
is one, "step_with_conv": as "conv_step" and "step", for tensors in 16-byte pieces, where it is the faster way. It is so
while rows * grid_x is at most most_blocks_per_multiprocessor for each multiprocessor of the device; 0: always.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_replayssm.errors import BuildError

MAGIC = b"RSSMKIMG"
VERSION = 7
_HEADER = struct.Struct("<8sII256s")
_ENTRY = struct.Struct("<32s64siiiiiiiii4xQQ")


@dataclass(frozen=True)
class KernelEntry:
    """One launchable kernel for one architecture."""

    role: str
    symbol: str
    compute_capability: int
    is_exact: bool
    grid_x: int
    block_x: int
    dynamic_shared_bytes: int
    cubin: bytes
    is_persistent: bool = False
    is_dependent_launch: bool = False
    rows_per_block: int = 1
    most_blocks_per_multiprocessor: int = 0


def pack(constants: str, entries: Sequence[KernelEntry]) -> bytes:
    """Serialise entries that were compiled for the same constants; equal cubins are stored once."""
    texts = [(constants, 256), *((entry.role, 32) for entry in entries), *((entry.symbol, 64) for entry in entries)]
    for text, most in texts:
        assert len(text.encode()) <= most, f"kernel image: found {text!r}; needed at most {most} bytes, or it is cut"
    offset = _HEADER.size + _ENTRY.size * len(entries)
    offsets: dict[bytes, int] = {}
    for entry in entries:
        if entry.cubin not in offsets:
            offsets[entry.cubin] = offset
            offset += len(entry.cubin)
    table = b"".join(
        _ENTRY.pack(
            entry.role.encode(),
            entry.symbol.encode(),
            entry.compute_capability,
            int(entry.is_exact),
            entry.grid_x,
            entry.block_x,
            entry.dynamic_shared_bytes,
            int(entry.is_persistent),
            int(entry.is_dependent_launch),
            entry.rows_per_block,
            entry.most_blocks_per_multiprocessor,
            offsets[entry.cubin],
            len(entry.cubin),
        )
        for entry in entries
    )
    return _HEADER.pack(MAGIC, VERSION, len(entries), constants.encode()) + table + b"".join(offsets)


def unpack(image: bytes) -> tuple[str, tuple[KernelEntry, ...]]:
    """Read the constants and the entries of an image back.

    Raises:
        BuildError: not an image, another version, or truncated.
    """
    if len(image) < _HEADER.size:
        raise BuildError(f"kernel image: found {len(image)} bytes; needed at least {_HEADER.size}, its header.")
    magic, version, count, constants = _HEADER.unpack_from(image)
    if magic != MAGIC or version != VERSION:
        raise BuildError(
            f"kernel image: found magic {magic!r}, version {version}; needed {MAGIC!r}, version {VERSION}."
        )
    if len(image) < _HEADER.size + count * _ENTRY.size:
        raise BuildError(
            f"kernel image: found {len(image)} bytes; needed at least {_HEADER.size + count * _ENTRY.size}, a table of "
            f"{count} entries. Build the engine again."
        )
    return constants.rstrip(b"\0").decode(), tuple(_read_entry(image, index) for index in range(count))


def _read_entry(image: bytes, index: int) -> KernelEntry:
    role, symbol, capability, exact, grid, block, shared, persistent, dependent, rows, blocks, offset, size = (
        _ENTRY.unpack_from(image, _HEADER.size + index * _ENTRY.size)
    )
    if offset + size > len(image):
        raise BuildError(
            f"kernel image: found {len(image)} bytes; needed {offset + size}, where entry {index} ends. "
            "Build the engine again."
        )
    return KernelEntry(
        role=role.rstrip(b"\0").decode(),
        symbol=symbol.rstrip(b"\0").decode(),
        compute_capability=capability,
        is_exact=bool(exact),
        grid_x=grid,
        block_x=block,
        dynamic_shared_bytes=shared,
        cubin=image[offset : offset + size],
        is_persistent=bool(persistent),
        is_dependent_launch=bool(dependent),
        rows_per_block=rows,
        most_blocks_per_multiprocessor=blocks,
    )
