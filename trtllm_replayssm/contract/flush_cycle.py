"""How often a slot flushes and how much is pending meanwhile: the long run of the protocol, worked out exactly.

A decode or verification step commits between 1 and T tokens. How many is the one thing that the protocol leaves to
chance, and here is the one description of it; lengths are drawn and averages computed from the same.
"""

from typing import Final, NamedTuple

from trtllm_replayssm.contract import protocol

ACCEPTANCE: Final = 0.7
"""Probability that a draft token is accepted, each by itself, as long as those before it were."""


class FlushCycle(NamedTuple):
    """Averages over the steps of one slot in the long run.

    Attributes:
        flush_fraction: steps that fold their pending rows, of all steps.
        mean_pending: pending rows before a step.
        mean_accepted: tokens that a step commits, the bonus token counted.
    """

    flush_fraction: float
    mean_pending: float
    mean_accepted: float


def accepted_probabilities(max_draft_len: int, acceptance: float = ACCEPTANCE) -> tuple[float, ...]:
    """Return the probabilities of 1, 2, .. T committed tokens.

    A step keeps its first token, and the drafts after it up to the first one that is rejected.

    Args:
        max_draft_len: draft tokens of every step, T - 1.
        acceptance: of a draft token whose predecessors were accepted.
    """
    stopped = [acceptance**drafts * (1 - acceptance) for drafts in range(max_draft_len)]
    return (*stopped, acceptance**max_draft_len)


def flush_cycle(history: int, max_draft_len: int, acceptance: float = ACCEPTANCE) -> FlushCycle:
    """Return the averages of the protocol in the long run; with T = 1, a flush every ``history`` steps.

    A step that flushes leaves behind the tokens that it commits, whatever was pending: every cycle begins anew. So the
    average over a cycle is the average over all time, and a cycle's steps are counted by going through the numbers of
    pending rows from below: each is met by a step after the flush, or from a smaller number by a step without one.

    Args:
        history: most pending rows W, at least T.
        max_draft_len: draft tokens of every step, T - 1.
        acceptance: of a draft token whose predecessors were accepted.

    Raises:
        ConfigError: history < 1 + max_draft_len.
    """
    protocol.check_history(history, max_draft_len)
    probabilities = dict(enumerate(accepted_probabilities(max_draft_len, acceptance), start=1))
    # Pending rows before a step -> how many steps of a cycle, on average, find so many.
    visits = [0.0] * (1 + history)
    for pending in range(1, 1 + history):
        visits[pending] = probabilities.get(pending, 0.0) + sum(
            visits[pending - accepted] * probability
            for accepted, probability in probabilities.items()
            if accepted < pending
            and not protocol.needs_flush(pending - accepted, 0, history=history, max_draft_len=max_draft_len)
        )
    steps = sum(visits)
    return FlushCycle(
        flush_fraction=1 / steps,
        mean_pending=sum(pending * count for pending, count in enumerate(visits)) / steps,
        mean_accepted=sum(accepted * probability for accepted, probability in probabilities.items()),
    )
