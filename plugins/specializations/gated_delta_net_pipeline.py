"""The numbers of the pipelined Gated DeltaNet step: which shapes it is for, its stages and chunk buffers.

The kernel (``kernels/gated_delta_net/pipelined_step.cu``) asserts at compile time that it needs what is counted here.
"""

from dataclasses import dataclass

from trtllm_replayssm.contract.geometry import DTYPE_BYTES
from trtllm_replayssm.plugins.specializations.pipeline import (
    CONSUMERS,
    PipelineShape,
    buffer_bytes,
    shared_bytes,
    stages_that_fit,
)

_HEAD_DIMS = (64, 128)
_MAX_HISTORY, _MAX_WINDOW = 16, 8
# A head's rows stand in parts, each so far from its place without gaps; lanes that read four of them have no conflict.
_PARTS, _PART_PADDING_BYTES = 4, 32
_WARP_COLUMNS = 32  # of a head, for one consumer warp
# Rows of each part in a tile: copies then have 4 KiB.
_TILE_ROWS = {"float32": 8, "bfloat16": 16}
# Three heads that share a key head bring its keys once, and fill less of the team that weighs them: worth it where a
# chunk costs much beside its state (docs/kernels.md).
_MAX_CHUNK_HEADS = {"float32": 2, "bfloat16": 3}
_MAX_LONG_WINDOW_HEADS, _LONG_WINDOW = 3, 5
_PADDING_BYTES = 16
_MMA_TOKENS = 16  # of one product


@dataclass(frozen=True)
class GatedDeltaNetPipelineShape(PipelineShape):
    """The same of Gated DeltaNet; the words are those of ``gated_delta_net/pipeline/layout.cuh``.

    Attributes:
        tile_rows: state rows of each part in a tile.
    """

    tile_rows: int = 16

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return super().defines() | {"TILE_ROWS": str(self.tile_rows)}


def pipeline_shape(
    *,
    key_dim: int,
    value_dim: int,
    heads_per_key: int,
    history: int,
    window: int,
    activation_dtype: str,
    state_dtype: str,
) -> GatedDeltaNetPipelineShape | None:
    """Return the fastest known make-up for a shape; None for a shape that the pipelined step is not for."""
    is_fitting = (
        activation_dtype == "bfloat16"
        and state_dtype in _TILE_ROWS
        and key_dim in _HEAD_DIMS
        and value_dim in _HEAD_DIMS
        and history <= _MAX_HISTORY
        and window <= _MAX_WINDOW
    )
    if not is_fitting:
        return None
    limit = _MAX_LONG_WINDOW_HEADS if window >= _LONG_WINDOW else _MAX_CHUNK_HEADS[state_dtype]
    most_heads = max(heads for heads in range(1, limit + 1) if heads_per_key % heads == 0)
    tile_rows = min(_TILE_ROWS[state_dtype], key_dim // _PARTS)
    # Long windows have large buffers: better fewer or smaller ones than less than a head in the stages of each group.
    for chunk_heads, chunk_buffers in ((most_heads, 3 if state_dtype == "bfloat16" else 2), (most_heads, 2), (1, 2)):
        shape = make_up(
            key_dim=key_dim,
            value_dim=value_dim,
            history=history,
            window=window,
            state_dtype=state_dtype,
            chunk_heads=chunk_heads,
            chunk_buffers=chunk_buffers,
            tile_rows=tile_rows,
        )
        heads_in_stages = shape.num_stages * _PARTS * tile_rows // key_dim
        if heads_in_stages >= _num_groups(value_dim):
            return shape
    raise AssertionError("every fitting shape has a make-up")


def make_up(
    *,
    key_dim: int,
    value_dim: int,
    history: int,
    window: int,
    state_dtype: str,
    chunk_heads: int,
    chunk_buffers: int,
    tile_rows: int,
) -> GatedDeltaNetPipelineShape:
    """Return the make-up with as many stages as fit."""
    row_bytes = value_dim * DTYPE_BYTES[state_dtype]
    stage_bytes = _PARTS * (tile_rows * row_bytes + _PART_PADDING_BYTES)
    payload_bytes = _payload_bytes(key_dim, value_dim, chunk_heads, history, window)
    fixed_bytes = chunk_buffers * buffer_bytes(payload_bytes)
    num_stages = stages_that_fit(stage_bytes, fixed_bytes, multiple_of=_num_groups(value_dim))
    return GatedDeltaNetPipelineShape(
        num_stages=num_stages,
        chunk_heads=chunk_heads,
        chunk_buffers=chunk_buffers,
        shared_bytes=shared_bytes(num_stages, stage_bytes, fixed_bytes),
        team_warps=-(-chunk_heads // 2),
        tile_rows=tile_rows,
    )


def _num_groups(value_dim: int) -> int:
    """Count the groups of consumer warps, each of which shares a head."""
    return CONSUMERS * _WARP_COLUMNS // value_dim


def _payload_bytes(key_dim: int, value_dim: int, chunk_heads: int, history: int, window: int) -> int:
    """Count keys and queries, u, v; weights of rows in columns, of tokens, of rows; g, raw gates and constants."""
    key_bytes = (_MMA_TOKENS + 2 * window) * (2 * key_dim + _PADDING_BYTES)
    u_bytes = history * (4 * chunk_heads * value_dim + 2 * _PADDING_BYTES)
    v_bytes = window * (2 * chunk_heads * value_dim + _PADDING_BYTES)
    token_bytes = 16 + 8 * (window + window % 2)
    per_head = 2 * window * 64 + window * token_bytes + 17 * 4 + history * 4 + 2 * window * 4 + 2 * 4
    return key_bytes + u_bytes + v_bytes + chunk_heads * per_head
