"""The numbers of the pipelined Mamba-2 step: which shapes it is for, its warps, stages and chunk buffers.

The kernel (``kernels/mamba2/pipelined_step.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.contract.geometry import DTYPE_BYTES

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""With bulk copies and 227 KiB of shared memory for a thread block; sm_120 has the copies, but too little memory."""
# Of a multiprocessor, and what the driver keeps of it for each block (CUDA programming guide, compute capability 9.0).
_SHARED_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
_WARP = 32
# State rows of a consumer warp: those of one tensor core product.
_MMA_ROWS = 16
_D_STATE, _MAX_HISTORY, _MAX_WINDOW = 128, 16, 8
_PADDING_BYTES = 16
_BARRIER_BYTES = 8
_CHUNK_DESCRIPTION_BYTES = 36
_SHARE_BYTES = 16


@dataclass(frozen=True)
class PipelineShape:
    """How a thread block of the pipelined step is made up; the words are those of ``pipeline/layout.cuh``.

    Attributes:
        blocks_per_sm: thread blocks that a multiprocessor has room for.
        tile_blocks: blocks of 16 state rows of a tile, the work of one consumer warp; they divide a head's.
        consumers: consumer warps, each with stages of its own.
        teams: teams of coefficient warps, which take chunks in turn.
        team_warps: warps of a team.
        num_stages: tiles that shared memory holds, a multiple of ``consumers``.
        chunk_heads: most heads of a chunk, a power of two that divides the heads of a group.
        chunk_buffers: chunks whose token rows shared memory holds.
        shared_bytes: all of it.
    """

    blocks_per_sm: int
    tile_blocks: int
    consumers: int
    teams: int
    team_warps: int
    num_stages: int
    chunk_heads: int
    chunk_buffers: int
    shared_bytes: int

    @property
    def block_threads(self) -> int:
        """Threads of a block: consumer warps, coefficient warps, the loader warp and the producer's warp."""
        return (self.consumers + self.teams * self.team_warps + 2) * _WARP

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "BLOCKS_PER_SM": str(self.blocks_per_sm),
            "IS_EARLY_START": str(int(self.blocks_per_sm > 1)),
            "TILE_BLOCKS": str(self.tile_blocks),
            "NUM_CONSUMERS": str(self.consumers),
            "COEFFICIENT_TEAMS": str(self.teams),
            "TEAM_WARPS": str(self.team_warps),
            "NUM_STAGES": str(self.num_stages),
            "CHUNK_HEADS": str(self.chunk_heads),
            "CHUNK_BUFFERS": str(self.chunk_buffers),
        }


def make_shape(
    *,
    head_dim: int,
    d_state: int,
    history: int,
    window: int,
    state_dtype: str,
    blocks_per_sm: int,
    tile_blocks: int,
    consumers: int,
    teams: int,
    team_warps: int,
    chunk_heads: int,
    chunk_buffers: int,
    most_stages: int = 64,
) -> PipelineShape | None:
    """Fill shared memory with stages; None if there is no room for one per consumer."""
    warps = consumers + teams * team_warps + 2
    stage_bytes = tile_blocks * _MMA_ROWS * d_state * DTYPE_BYTES[state_dtype] + 2 * _BARRIER_BYTES
    fixed = chunk_buffers * (_buffer_bytes(head_dim, chunk_heads, history, window, team_warps) + 3 * _BARRIER_BYTES)
    fixed += _SHARE_BYTES + 4 * warps
    room = _SHARED_BYTES // blocks_per_sm - _RESERVED_BYTES - fixed - 15
    num_stages = min(room // stage_bytes, most_stages) // consumers * consumers
    if num_stages < consumers:
        return None
    shared_bytes = -(-(num_stages * stage_bytes + fixed) // 16) * 16
    return PipelineShape(
        blocks_per_sm, tile_blocks, consumers, teams, team_warps, num_stages, chunk_heads, chunk_buffers, shared_bytes
    )  # fmt: skip


def pipeline_shape(
    *,
    head_dim: int,
    d_state: int,
    heads_per_group: int,
    history: int,
    window: int,
    activation_dtype: str,
    state_dtype: str,
) -> PipelineShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the pipelined step is not for."""
    is_fitting = (
        activation_dtype == "bfloat16"
        and state_dtype in ("float32", "bfloat16")
        and d_state == _D_STATE
        and head_dim % _MMA_ROWS == 0
        and history <= _MAX_HISTORY
        and window <= _MAX_WINDOW
    )
    if not is_fitting:
        return None
    is_fp32 = state_dtype == "float32"
    tile_blocks, consumers = _consumers(head_dim // _MMA_ROWS, is_fp32)
    chunk_heads, most_buffers = 4, 3
    while heads_per_group % chunk_heads:
        chunk_heads //= 2
    # Long windows of wide heads have large buffers: better fewer or smaller ones than a group with a single stage.
    choices = [(chunk_heads, most_buffers), *((chunk_heads >> shift, 2) for shift in range(chunk_heads.bit_length()))]
    for heads, chunk_buffers in choices:
        shape = make_shape(
            head_dim=head_dim,
            d_state=d_state,
            history=history,
            window=window,
            state_dtype=state_dtype,
            blocks_per_sm=1,
            tile_blocks=tile_blocks,
            consumers=consumers,
            teams=2,
            team_warps=2,
            chunk_heads=heads,
            chunk_buffers=chunk_buffers,
        )
        if shape is not None:
            return shape
    raise AssertionError("every fitting shape has a make-up")


def _consumers(row_blocks: int, is_fp32: bool) -> tuple[int, int]:
    """Return the blocks of a tile and the consumer warps for a head of this many blocks of 16 rows."""
    if row_blocks % 2 == 0:
        return 2, 8
    return (1, 10) if is_fp32 else (row_blocks, 4)


def _buffer_bytes(head_dim: int, chunk_heads: int, history: int, window: int, team_warps: int) -> int:
    """Count token rows of x, B and C, scores, weights, dt, decays, fold weights, the description; in whole 128 bytes."""
    token_rows = history + window
    x_bytes = token_rows * (2 * chunk_heads * head_dim + _PADDING_BYTES)
    bc_bytes = (token_rows + window) * (2 * _D_STATE + _PADDING_BYTES)
    scores = team_warps * window * 16 * 4
    per_head = window * (64 + 4) + 17 * 4 + token_rows * 4
    return -(-(x_bytes + bc_bytes + scores + chunk_heads * per_head + _CHUNK_DESCRIPTION_BYTES) // 128) * 128
