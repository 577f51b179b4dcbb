"""The numbers of the pipelined Mamba-2 step: which shapes it is for, its warps, stages and chunk buffers.

The kernel (``kernels/mamba2/pipelined_step.cu``) asserts at compile time that it needs what is counted here.
"""

from trtllm_replayssm.contract.geometry import DTYPE_BYTES
from trtllm_replayssm.plugins.specializations.pipeline import (
    BARRIER_BYTES,
    CONSUMERS,
    PipelineShape,
    buffer_bytes,
    shared_bytes,
    stages_that_fit,
)

# State rows of a tile: those of one tensor core product.
_TILE_ROWS = 16
_D_STATE, _MAX_HISTORY, _MAX_WINDOW = 128, 32, 8
_PADDING_BYTES = 16
_CONSTANTS = 3  # each head's A, D and dt_bias
# Of a buffer, where x, B and C come raw: when x is convolved, and when B and C are.
_CONV_BARRIERS = 2


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
        fixed = chunk_buffers * (buffer + (_CONV_BARRIERS * BARRIER_BYTES if is_raw else 0))
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
