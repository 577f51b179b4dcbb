"""The numbers of the chunked Mamba-2 prefill: which shapes it is for, its warps, slices and shared memory.

The kernel (``kernels/mamba2/chunked_prefill.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.plugins.specializations.base import SHARED_BYTES, WARP

_MMA_TILE = 16
_CHUNK_SIZE = 64
_MAX_WARPS = 16
# Columns of a warp's part of the state: 32 registers of a thread.
_MAX_WARP_COLUMNS = 64
# With 64 heads or fewer, one prompt would leave half of a large GPU without work. Measured on an H200: 64 heads of 64
# rows take 0.27 ms in slices and 0.32 ms without for one prompt of 4096 tokens, 1.36 ms and 0.91 ms for eight. Engines
# prefill one slot at a time, so one prompt decides.
_FEW_HEADS = 64
# Elements between rows of x beyond its own: eight rows then start in different shared-memory banks.
_X_PADDING = 8


@dataclass(frozen=True)
class ChunkShape:
    """How a thread block of the chunked prefill is made up; the words are those of ``chunked/layout.cuh``.

    Attributes:
        head_slices: thread blocks that share the rows of a head.
        column_splits: warps that share the columns of 16 rows.
        block_threads: threads of a block.
        min_blocks: thread blocks that an SM of 227 KiB of shared memory is to hold, as far as registers go.
        shared_bytes: shared memory of a block.
    """

    head_slices: int
    column_splits: int
    block_threads: int
    min_blocks: int
    shared_bytes: int

    def fits(self, architecture: str) -> bool:
        """Say whether every device that runs this architecture's cubins has the shared memory."""
        return self.shared_bytes <= SHARED_BYTES.get(architecture, 0)

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "CHUNK_SIZE": str(_CHUNK_SIZE),
            "HEAD_SLICES": str(self.head_slices),
            "COLUMN_SPLITS": str(self.column_splits),
            "MIN_BLOCKS": str(self.min_blocks),
        }


def chunk_shape(*, n_heads: int, head_dim: int, d_state: int, activation_dtype: str) -> ChunkShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the chunked prefill is not for."""
    if activation_dtype != "bfloat16" or head_dim % _MMA_TILE or d_state < 64:
        return None
    row_tiles = head_dim // _MMA_TILE
    is_wide = d_state > 2 * _MAX_WARP_COLUMNS
    head_slices = 2 if (n_heads <= _FEW_HEADS or is_wide) and row_tiles % 2 == 0 else 1
    row_tiles //= head_slices
    return make_shape(row_tiles, d_state, head_slices, 4 if row_tiles <= 2 or is_wide else 2)


def make_shape(row_tiles: int, d_state: int, head_slices: int, column_splits: int) -> ChunkShape | None:
    """Return the make-up with these many row tiles, slices and splits; None where a thread block has not the warps."""
    num_warps = row_tiles * column_splits
    if num_warps > _MAX_WARPS:
        return None
    shared_bytes = _count_bytes(row_tiles, d_state, column_splits)
    min_blocks = 2 if num_warps <= 8 and 2 * shared_bytes <= 224 * 1024 else 1
    return ChunkShape(head_slices, column_splits, num_warps * WARP, min_blocks, shared_bytes)


def _count_bytes(row_tiles: int, d_state: int, column_splits: int) -> int:
    """Count C, two buffers of B and x, two parts of the weights, the partial sums of state and C, and the decays."""
    token_tiles = _CHUNK_SIZE // _MMA_TILE
    token_bytes = 3 * d_state * 2 + 2 * (row_tiles * _MMA_TILE + _X_PADDING) * 2 + 2 * 5 * 4
    tile_elements = _MMA_TILE * _MMA_TILE
    weights = token_tiles * (token_tiles + 1) // 2 * tile_elements * 2 * 2
    partials = row_tiles * token_tiles * (column_splits - 1) * tile_elements * 4
    return _CHUNK_SIZE * token_bytes + weights + partials
