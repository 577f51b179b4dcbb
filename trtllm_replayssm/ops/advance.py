"""The torch face of ``contract.protocol.advance``: commit a step."""

from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.errors import OpArgumentError
from trtllm_replayssm.ops import checks

_OP = "ops.advance"

_TABLE = (
    checks.Argument("past_lengths", ("batch",), "int32"),
    checks.Argument("checkpoint_lengths", ("batch",), "int32"),
    checks.Argument("num_accepted_tokens", ("batch",), "int32"),
)


def advance(
    past_lengths: Tensor, checkpoint_lengths: Tensor, num_accepted_tokens: Tensor, *, history: int, max_draft_len: int
) -> tuple[Tensor, Tensor]:
    """Commit a decode or verification step: ``f' = c if flushed else f``, ``c' = c + accepted``.

    Call it once per step, for every row with a slot, whatever number of layers ran. A step whose window was longer
    than 1 + max_draft_len is a prefill: there everything is folded and ``f' = c' = c + n``.

    Args:
        past_lengths: [B] int32, committed tokens c before the step.
        checkpoint_lengths: [B] int32, folded tokens f before the step.
        num_accepted_tokens: [B] int32, window tokens to keep, the bonus token counted; 0 in an idle row.
        history: most pending rows W, as in the step.
        max_draft_len: most draft tokens of a window T - 1, as in the step.

    Returns:
        New tensors ``(past_lengths', checkpoint_lengths')``, int32 [B]; the arguments are left alone.

    Raises:
        OpArgumentError: wrong shape, type or device; history < 1 + max_draft_len; on the CPU also lengths that no step
            can have had (f < 0, f > c, c - f > history, or c + T beyond int32), or more accepted tokens than a window
            holds.

    Note:
        Lengths are int32, and positions must stay below 2^31 - T. On CUDA no value is read, so nothing refuses them
        there.
    """
    tensors = {
        "past_lengths": past_lengths,
        "checkpoint_lengths": checkpoint_lengths,
        "num_accepted_tokens": num_accepted_tokens,
    }
    checks.check_tensors(_OP, _TABLE, tensors)
    checks.check_window(_OP, history=history, max_draft_len=max_draft_len)
    if past_lengths.device.type == "cpu":
        window = protocol.window_length(max_draft_len)
        _check_values(past_lengths, checkpoint_lengths, num_accepted_tokens, window, history)
    return protocol.advance(
        past_lengths, checkpoint_lengths, num_accepted_tokens, history=history, max_draft_len=max_draft_len
    )


def _check_values(
    past_lengths: Tensor, checkpoint_lengths: Tensor, num_accepted_tokens: Tensor, window: int, history: int
) -> None:
    counters = (past_lengths.tolist(), checkpoint_lengths.tolist(), num_accepted_tokens.tolist())
    for row, (c, f, accepted) in enumerate(zip(*counters, strict=True)):
        checks.check_row(_OP, row, c, f, window=window, history=history)
        if not 0 <= accepted <= window:
            raise OpArgumentError(
                f"{_OP}: num_accepted_tokens[{row}]: found {accepted}; needed 0 to {window} (1 + max_draft_len). "
                "After a prefill both lengths are c + n."
            )
