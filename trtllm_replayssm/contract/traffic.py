"""The bytes that a launch must move between memory and the chip: the limit that a time is held to.

Counted: states, ring rows, and the inputs and outputs of every row, each once. Not counted: lengths and slot ids (16
bytes a row), and the constants of the heads (A, D, dt_bias), which all rows share.
"""

from typing import NamedTuple

from trtllm_replayssm.contract.geometry import DTYPE_BYTES, GatedDeltaNetGeometry, RecurrenceGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory import layer_checkpoint_bytes, layer_ring_row_bytes


class LaunchBytes(NamedTuple):
    """Bytes of one launch, averaged over launches.

    Attributes:
        state_read: checkpoints, or the states of a conventional decode.
        state_written: the same, written.
        ring_read: live ring rows.
        ring_written: appended ring rows.
        inputs: the window's tensors.
        outputs: the window's results.
        weights: read once per launch, whatever the batch.
    """

    state_read: float
    state_written: float
    ring_read: float
    ring_written: float
    inputs: float
    outputs: float
    weights: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def replay_bytes(
    m: RecurrenceGeometry,
    replay: ReplayGeometry,
    dtype: str,
    *,
    batch_size: int,
    flush_fraction: float,
    mean_pending: float,
) -> LaunchBytes:
    """Return what a replayed step moves; every pending row is read once, in a flush too.

    Args:
        m: shape of the layer.
        replay: window and state type.
        dtype: activation type.
        batch_size: rows of the step.
        flush_fraction: rows that write their checkpoint, of all rows.
        mean_pending: pending ring rows of a row.
    """
    state, ring_row = layer_checkpoint_bytes(m, replay.state_dtype), layer_ring_row_bytes(m, dtype)
    inputs, outputs = _window_bytes(m, dtype)
    return LaunchBytes(
        state_read=batch_size * state,
        state_written=batch_size * flush_fraction * state,
        ring_read=batch_size * mean_pending * ring_row,
        ring_written=batch_size * replay.window * ring_row,
        inputs=batch_size * replay.window * inputs,
        outputs=batch_size * replay.window * outputs,
        weights=0,
    )


def conventional_bytes(m: RecurrenceGeometry, replay: ReplayGeometry, dtype: str, *, batch_size: int) -> LaunchBytes:
    """Return what a step without replay moves: one state read, and one written for every token of the window."""
    state = layer_checkpoint_bytes(m, replay.state_dtype)
    inputs, outputs = _window_bytes(m, dtype)
    return LaunchBytes(
        state_read=batch_size * state,
        state_written=batch_size * replay.window * state,
        ring_read=0,
        ring_written=0,
        inputs=batch_size * replay.window * inputs,
        outputs=batch_size * replay.window * outputs,
        weights=0,
    )


def prefill_bytes(m: RecurrenceGeometry, state_dtype: str, dtype: str, *, batch_size: int, tokens: int) -> LaunchBytes:
    """Return what the prefill of fresh prompts moves: their tensors, and one state written for each."""
    inputs, outputs = _window_bytes(m, dtype)
    return LaunchBytes(
        state_read=0,
        state_written=batch_size * layer_checkpoint_bytes(m, state_dtype),
        ring_read=0,
        ring_written=0,
        inputs=batch_size * tokens * inputs,
        outputs=batch_size * tokens * outputs,
        weights=0,
    )


def conv_bytes(m: RecurrenceGeometry, window: int, dtype: str, *, batch_size: int) -> LaunchBytes:
    """Return what a step of the convolution moves; its weight and bias are another layer's in every launch."""
    row = m.conv_dim * DTYPE_BYTES[dtype]
    return LaunchBytes(
        state_read=0,
        state_written=0,
        ring_read=batch_size * (m.d_conv - 1) * row,
        ring_written=batch_size * window * row,
        inputs=batch_size * window * row,
        outputs=batch_size * window * row,
        weights=(m.d_conv + 1) * row,
    )


def with_conv_bytes(m: RecurrenceGeometry, replay: ReplayGeometry, dtype: str, step: LaunchBytes) -> LaunchBytes:
    """Return what a replayed step and the convolution before it move, the convolution's results not counted.

    Args:
        m: shape of the layer.
        replay: window and state type.
        dtype: activation type.
        step: what the step moves by itself, as ``replay_bytes`` counts it.
    """
    row = m.conv_dim * DTYPE_BYTES[dtype]
    batch_size = step.state_read / layer_checkpoint_bytes(m, replay.state_dtype)
    return step._replace(
        ring_read=step.ring_read + batch_size * (m.d_conv - 1) * row,
        ring_written=step.ring_written + batch_size * replay.window * row,
        weights=step.weights + (m.d_conv + 1) * row,
    )


def _window_bytes(m: RecurrenceGeometry, dtype: str) -> tuple[int, int]:
    """Return the bytes of one token's inputs (x, B, C and dt, or q, k, v, a and b), and of its outputs."""
    size = DTYPE_BYTES[dtype]
    if isinstance(m, GatedDeltaNetGeometry):
        return (m.conv_dim + 2 * m.n_value_heads) * size, m.d_value * size
    return (m.conv_dim + m.n_heads) * size, m.d_inner * size
