"""The numbers of the chunked Mamba-2 prefill: which shapes it is for, its warps, slices and shared memory.

The kernel (``kernels/mamba2/chunked_prefill.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.plugins.specializations.base import WARP

_MMA_TILE = 16
_CHUNK_SIZE = 64
_NUM_STAGES = 2
_MAX_WARPS = 16
# Columns of a warp's part of the state: 32 registers of a thread, and as many for what a chunk adds.
_WARP_COLUMNS = 64
# Elements between rows of x beyond its own: eight rows then start in different shared-memory banks.
_X_PADDING = 8
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class ChunkShape:
    """How a thread block of the chunked prefill is made up; the words are those of ``chunked/layout.cuh``.

    Attributes:
        head_slices: thread blocks that share the rows of a head.
        num_stages: chunks that are in a block at a time.
        block_threads: threads of a block.
        min_blocks: thread blocks that an SM of 227 KiB of shared memory is to hold, as far as registers go.
        shared_bytes: shared memory of a block.
    """

    head_slices: int
    num_stages: int
    block_threads: int
    min_blocks: int
    shared_bytes: int

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "CHUNK_SIZE": str(_CHUNK_SIZE),
            "WARP_COLUMNS": str(_WARP_COLUMNS),
            "HEAD_SLICES": str(self.head_slices),
            "NUM_STAGES": str(self.num_stages),
            "MIN_BLOCKS": str(self.min_blocks),
        }


def chunk_shape(*, head_dim: int, d_state: int, activation_dtype: str) -> ChunkShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the chunked prefill is not for."""
    if activation_dtype != "bfloat16" or head_dim % _MMA_TILE or d_state < _WARP_COLUMNS:
        return None
    row_tiles = head_dim // _MMA_TILE
    if row_tiles % 2 == 0:
        return make_shape(2, d_state, row_tiles // 2)
    is_small = _count_warps(row_tiles, d_state) <= _MAX_WARPS
    return make_shape(row_tiles, d_state, 1) if is_small else make_shape(1, d_state, row_tiles)


def make_shape(row_tiles: int, d_state: int, head_slices: int, num_stages: int = _NUM_STAGES) -> ChunkShape:
    """Return the make-up with these many row tiles of a slice, slices of a head, and stages."""
    num_warps = _count_warps(row_tiles, d_state)
    shared_bytes = _count_bytes(row_tiles, d_state, num_stages)
    # Two blocks of more warps would not have the registers.
    min_blocks = 2 if num_warps <= 9 and 2 * shared_bytes <= 224 * 1024 else 1
    return ChunkShape(head_slices, num_stages, num_warps * WARP, min_blocks, shared_bytes)


def _count_warps(row_tiles: int, d_state: int) -> int:
    """Count state warps, output warps, and the one that brings the chunks."""
    return row_tiles * (d_state // _WARP_COLUMNS) + _CHUNK_SIZE // _MMA_TILE + 1


def _count_bytes(row_tiles: int, d_state: int, num_stages: int) -> int:
    """Count a stage's B, C, x and four numbers a token; then the state in two parts, values, and barriers."""
    rows = row_tiles * _MMA_TILE
    stage = _CHUNK_SIZE * (2 * (2 * d_state + rows + _X_PADDING) + 4 * 4)
    values = 4 * 4 + 8 * num_stages  # of the block, and of each stage
    barriers = (2 * num_stages + 2) * _BARRIER_BYTES
    return (num_stages * stage + rows * d_state * 2 * 2 + values + barriers + 15) // 16 * 16
