"""The numbers of the chunked Gated DeltaNet prefill: which shapes it is for, its warps, slices and shared memory.

The kernel (``kernels/gated_delta_net/chunked_prefill.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.plugins.specializations.base import WARP

_MMA_TILE = 16
_CHUNK_SIZE = 32
_TILE_PAIRS = 3  # of a chunk's two tiles of tokens, those j <= t
# Of chunks in a block, and of warps that prepare them: as many as fit everywhere; and where an SM has 227 KiB, in which
# one prompt of 4096 tokens took 0.29 ms instead of 0.36 with 32 heads, 0.34 instead of 0.43 with 64 (H200).
_NUM_STAGES = _NUM_SOLVERS = 3
_NUM_DEEP = 4
# With this many thread blocks or fewer one prompt would leave much of a large GPU idle: then heads are cut finer,
# although each slice has to invert for itself.
_FEW_BLOCKS = 80
# Elements between rows of v beyond its own: eight rows then start in different shared-memory banks.
_V_PADDING = 8
_COEFFICIENTS = 10
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class DeltaChunkShape:
    """How a thread block of the chunked prefill is made up; the words are those of ``chunked/layout.cuh``.

    Attributes:
        slice_dim: columns of a head's state that a thread block has.
        key_splits: warps that share the rows of 16 columns, 1 or 2.
        num_stages: chunks that are in a block at a time.
        num_solvers: warps that prepare chunks.
        block_threads: threads of a block.
        min_blocks: thread blocks that an SM of 227 KiB of shared memory is to hold.
        shared_bytes: shared memory of a block.
    """

    slice_dim: int
    key_splits: int
    num_stages: int
    num_solvers: int
    block_threads: int
    min_blocks: int
    shared_bytes: int

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "CHUNK_SIZE": str(_CHUNK_SIZE),
            "SLICE_DIM": str(self.slice_dim),
            "KEY_SPLITS": str(self.key_splits),
            "NUM_STAGES": str(self.num_stages),
            "NUM_SOLVERS": str(self.num_solvers),
            "MIN_BLOCKS": str(self.min_blocks),
        }


def chunk_shape(
    *,
    n_value_heads: int,
    key_dim: int,
    value_dim: int,
    activation_dtype: str,
    state_dtype: str,
    is_deep: bool = False,
) -> DeltaChunkShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the chunked prefill is not for.

    A deep one has more chunks under way, and needs more shared memory than some GPUs have.
    """
    if activation_dtype != "bfloat16" or key_dim not in (64, 128) or value_dim % 32:
        return None
    is_wide = value_dim % 64 == 0 and n_value_heads * (value_dim // 64) > _FEW_BLOCKS
    slice_dim, key_splits = (64, 1) if is_wide else (32, 2)
    depth = {"num_stages": _NUM_DEEP, "num_solvers": _NUM_DEEP} if is_deep else {}
    return make_shape(key_dim, state_dtype, slice_dim=slice_dim, key_splits=key_splits, **depth)


def make_shape(
    key_dim: int,
    state_dtype: str,
    *,
    slice_dim: int,
    key_splits: int,
    num_stages: int = _NUM_STAGES,
    num_solvers: int = _NUM_SOLVERS,
) -> DeltaChunkShape:
    """Return the make-up with these many columns, splits, stages and solvers."""
    num_warps = slice_dim // _MMA_TILE * key_splits + num_solvers
    shared_bytes = _count_bytes(slice_dim, key_splits, num_stages, key_dim, state_dtype)
    # Two blocks of more warps would not have the registers.
    min_blocks = 2 if num_warps <= 6 and 2 * shared_bytes <= 224 * 1024 else 1
    return DeltaChunkShape(slice_dim, key_splits, num_stages, num_solvers, num_warps * WARP, min_blocks, shared_bytes)


def _count_bytes(slice_dim: int, key_splits: int, num_stages: int, key_dim: int, state_dtype: str) -> int:
    """Count a stage's k, q and v, the parts of inverse and weights, and coefficients; then exchanges and barriers."""
    parts = 3 if state_dtype == "float32" else 2
    token_bytes = 2 * (2 * key_dim + slice_dim + _V_PADDING) + 4 * _COEFFICIENTS
    tile_bytes = 2 * _MMA_TILE * _MMA_TILE
    # The inverse is made where its parts are stored afterwards: padded fp32 rows, and decays.
    makings = 4 * _CHUNK_SIZE * (_CHUNK_SIZE + 4 + 12)
    inverse = -(-max(_TILE_PAIRS * parts * tile_bytes, makings) // 256) * 256
    stage = _CHUNK_SIZE * token_bytes + inverse + _TILE_PAIRS * 2 * tile_bytes
    value_tiles, is_split = slice_dim // _MMA_TILE, key_splits == 2
    # Of two splits each gives what it read by all keys of the chunk, and by half of the queries.
    exchanges = value_tiles * 2 * 4 * _MMA_TILE * (_CHUNK_SIZE + _CHUNK_SIZE // 2) if is_split else 0
    return (num_stages * stage + exchanges + 2 * num_stages * _BARRIER_BYTES + 15) // 16 * 16
