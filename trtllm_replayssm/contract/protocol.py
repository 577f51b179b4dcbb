"""The checkpoint-and-ring protocol: everything is addressed by token position.

Per slot there are two absolute counters. ``past_lengths`` c counts committed tokens; ``checkpoint_lengths`` f counts
the tokens folded into the checkpoint, f <= c. The rows of tokens [f, c) are pending in the ring; the row of token t is
``t mod ring_rows``. A step runs n <= T = 1 + max_draft_len window tokens at positions c .. c+n-1.

The functions take ints, numpy arrays or torch tensors alike. ``plugins/kernels/common/protocol.h`` is the same
predicates for C++ and CUDA; a test compares the two exhaustively.
"""

from typing import TypeVar

from trtllm_replayssm.errors import ConfigError

Lengths = TypeVar("Lengths")


def window_length(max_draft_len: int) -> int:
    """Return T, the most tokens of a decode or verification window."""
    return 1 + max_draft_len


def is_prefill(seq_len: int, max_draft_len: int) -> bool:
    """Say whether a window of ``seq_len`` tokens is a prefill, ``S > T``: it folds everything. Else it is a step."""
    return seq_len > window_length(max_draft_len)


def needs_flush(past_lengths: Lengths, checkpoint_lengths: Lengths, *, history: int, max_draft_len: int) -> Lengths:
    """Say whether a step folds its pending rows first: ``c - f + T > W``.

    Args:
        past_lengths: committed tokens c.
        checkpoint_lengths: folded tokens f.
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        A bool, or a boolean array of the arguments' shape.
    """
    return past_lengths - checkpoint_lengths + window_length(max_draft_len) > history  # type: ignore[operator,no-any-return]


def advance(
    past_lengths: Lengths,
    checkpoint_lengths: Lengths,
    num_accepted_tokens: Lengths,
    *,
    history: int,
    max_draft_len: int,
) -> tuple[Lengths, Lengths]:
    """Commit a decode or verification step: ``f' = c if flushed else f``, ``c' = c + accepted``.

    Args:
        past_lengths: committed tokens c before the step.
        checkpoint_lengths: folded tokens f before the step.
        num_accepted_tokens: tokens of the window to keep, the bonus token counted, 0 <= accepted <= n.
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        ``(past_lengths', checkpoint_lengths')``.
    """
    flushed = needs_flush(past_lengths, checkpoint_lengths, history=history, max_draft_len=max_draft_len)
    new_checkpoint = checkpoint_lengths + flushed * (past_lengths - checkpoint_lengths)  # type: ignore[operator]
    return past_lengths + num_accepted_tokens, new_checkpoint  # type: ignore[operator]


def advance_prefill(past_lengths: Lengths, num_tokens: Lengths) -> tuple[Lengths, Lengths]:
    """Commit a prefill step (window longer than T): everything is folded, ``f' = c' = c + n``."""
    committed = past_lengths + num_tokens  # type: ignore[operator]
    return committed, committed


def min_ring_rows(history: int, max_draft_len: int) -> int:
    """Return the fewest ring rows R: ``W + T``, so that a window never lands on a live row."""
    return history + window_length(max_draft_len)


def min_conv_ring_rows(d_conv: int, max_draft_len: int) -> int:
    """Return the fewest convolution ring rows: ``(d_conv - 1) + T``."""
    return d_conv - 1 + window_length(max_draft_len)


def check_history(history: int, max_draft_len: int) -> None:
    """Refuse a history that cannot hold one window.

    Raises:
        ConfigError: history < 1, max_draft_len < 0, or history < 1 + max_draft_len.
    """
    if max_draft_len < 0:
        raise ConfigError(f"max_draft_len: found {max_draft_len}; needed 0 or more.")
    if history < window_length(max_draft_len):
        raise ConfigError(
            f"history: found {history} with max_draft_len={max_draft_len}; needed at least "
            f"{window_length(max_draft_len)} (1 + max_draft_len). Raise history or lower max_draft_len."
        )
