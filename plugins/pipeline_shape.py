"""The numbers of the pipelined Mamba-2 step: which shapes it is for, its warps, stages and chunk buffers.

The kernel (``kernels/mamba2/pipelined_step.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.contract.geometry import DTYPE_BYTES

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""With bulk copies and 227 KiB of shared memory for a thread block; sm_120 has the copies, but too little memory."""
_SHARED_BYTES = 227 * 1024
_WARP = 32
# State rows of a tile: those of one tensor core product.
_TILE_ROWS = 16
_D_STATE, _MAX_HISTORY, _MAX_WINDOW = 128, 32, 8
_PADDING_BYTES = 16
_BARRIER_BYTES = 8
_CHUNK_DESCRIPTION_BYTES = 36
CONSUMERS = 8
# A team shares a chunk, a half warp having one head; the other team has the next chunk meanwhile.
_TEAMS, _TEAM_WARPS = 2, 2
# As many warps as in the layout.cuh of each recurrence.
LOADERS = 3
_CONSTANTS = 3  # each head's A, D and dt_bias
# Of a buffer, where x, B and C come raw: when x is convolved, and when B and C are.
_CONV_BARRIERS = 2
# So many chunks' worth for each thread block are cut into the first number of parts that fits, to end together.
_TAIL_CHUNKS, _TAIL_PARTS = 3, (2, 3, 1)


@dataclass(frozen=True)
class PipelineShape:
    """How a thread block of a pipelined step is made up; the words are those of ``common/pipeline``.

    Attributes:
        num_stages: tiles that shared memory holds, a multiple of the consumer warps.
        chunk_heads: most heads of a chunk, a power of two that divides the heads of a group.
        chunk_buffers: chunks whose token rows shared memory holds.
        shared_bytes: all of it.
        team_warps: coefficient warps that share a chunk.
        is_raw: whether x, B and C come before their convolution.
    """

    num_stages: int
    chunk_heads: int
    chunk_buffers: int
    shared_bytes: int
    team_warps: int = _TEAM_WARPS
    is_raw: bool = False

    @property
    def block_threads(self) -> int:
        """Threads of a block: consumer, coefficient and loader warps and the producer's warp."""
        return (CONSUMERS + _TEAMS * self.team_warps + LOADERS + 1) * _WARP

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "NUM_CONSUMERS": str(CONSUMERS),
            "COEFFICIENT_TEAMS": str(_TEAMS),
            "TEAM_WARPS": str(self.team_warps),
            "IS_RAW": str(int(self.is_raw)),
            "NUM_STAGES": str(self.num_stages),
            "CHUNK_HEADS": str(self.chunk_heads),
            "CHUNK_BUFFERS": str(self.chunk_buffers),
            "TAIL_CHUNKS": str(_TAIL_CHUNKS),
            "TAIL_PARTS": str(next(parts for parts in _TAIL_PARTS if self.chunk_heads % parts == 0)),
        }


def pipeline_shape(
    *,
    head_dim: int,
    d_state: int,
    heads_per_group: int,
    history: int,
    window: int,
    activation_dtype: str,
    state_dtype: str,
    is_raw: bool = False,
) -> PipelineShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the pipelined step is not for."""
    is_fitting = (
        activation_dtype == "bfloat16"
        and state_dtype in ("float32", "bfloat16")
        and d_state == _D_STATE
        and head_dim % _TILE_ROWS == 0
        and history <= _MAX_HISTORY
        and window <= _MAX_WINDOW
    )
    if not is_fitting:
        return None
    chunk_heads = 4 if state_dtype == "bfloat16" else 2
    while heads_per_group % chunk_heads:
        chunk_heads //= 2
    tile_bytes = _TILE_ROWS * d_state * DTYPE_BYTES[state_dtype]
    # Long windows of wide heads have large buffers: better fewer or smaller ones than less than two tiles a consumer.
    choices = [(chunk_heads, 3), *((chunk_heads >> shift, 2) for shift in range(chunk_heads.bit_length()))]
    for heads, chunk_buffers in choices:
        buffer = buffer_bytes(_payload_bytes(head_dim, heads, history, window))
        fixed = chunk_buffers * (buffer + (_CONV_BARRIERS * _BARRIER_BYTES if is_raw else 0))
        num_stages = stages_that_fit(tile_bytes, fixed, multiple_of=CONSUMERS)
        if num_stages >= 2 * CONSUMERS:
            total = shared_bytes(num_stages, tile_bytes, fixed)
            return PipelineShape(num_stages, heads, chunk_buffers, total, is_raw=is_raw)
    raise AssertionError("every fitting shape has a make-up")


def _payload_bytes(head_dim: int, chunk_heads: int, history: int, window: int) -> int:
    """Count x, B and C, weights, dt, constants, decays, fold weights."""
    token_rows = history + window
    x_bytes = token_rows * (2 * chunk_heads * head_dim + _PADDING_BYTES)
    bc_bytes = (token_rows + window) * (2 * _D_STATE + _PADDING_BYTES)
    row_groups = -(-history // 16)
    per_head = window * (64 * row_groups + 4) + (16 * row_groups + 1) * 4 + (token_rows + _CONSTANTS) * 4
    return x_bytes + bc_bytes + chunk_heads * per_head


def buffer_bytes(payload_bytes: int) -> int:
    """Count a chunk buffer and its barriers.

    In whole 128 bytes what a recurrence keeps there, then the description, which begins at a multiple of 16.
    """
    described_bytes = -(-payload_bytes // 16) * 16 + _CHUNK_DESCRIPTION_BYTES
    return -(-described_bytes // 128) * 128 + (3 + LOADERS) * _BARRIER_BYTES


def shared_bytes(num_stages: int, stage_bytes: int, fixed_bytes: int) -> int:
    """Count stages with their barriers, and what is fixed, in whole 16 bytes."""
    return -(-(num_stages * (stage_bytes + 2 * _BARRIER_BYTES) + fixed_bytes) // 16) * 16


def stages_that_fit(stage_bytes: int, fixed_bytes: int, *, multiple_of: int) -> int:
    """Count the stages that shared memory has room for beside what is fixed."""
    stages = (_SHARED_BYTES - fixed_bytes - 15) // (stage_bytes + 2 * _BARRIER_BYTES)
    return stages // multiple_of * multiple_of
