"""Logits become tokens, in fp32: greedy, or by temperature, top-k, top-p and min-p.

Random numbers come from a counter-based generator keyed by the request's seed and the number of the sequence, the
counter being the token's position in its sequence. So a token depends on its own logits, seed and position: neither on
the batch it runs in nor on how many drafts were tried before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from trtllm_replayssm.contract.memory_plan import SAMPLED_LOGITS
from trtllm_replayssm.runtime.logit_rules import Penalties, TokenMask, adjust_logits
from trtllm_replayssm.runtime.transfer import to_device

_SMALLEST_TEMPERATURE = 1e-30  # dividing by less overflows fp32; at this value all weight is on the maximum


@dataclass(frozen=True)
class TokenRule:
    """How a token is chosen; where no token is banned and none has penalties or a mask, how all of a sequence are.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely; 0 keeps all.
        top_p: keep the fewest whose probability reaches top_p, after top_k.
        seed: key of the random numbers.
        banned: tokens that may not be chosen.
        min_p: of what top_p left, keep what is at least so likely relative to the most likely.
        bias: token id -> what is added to its logit.
        penalties: what the tokens before this one change; None for nothing.
        mask: tokens that may be chosen, as bits; None for all.
        sequence: key of the random numbers beside the seed: the number of the sequence among those of its prompt.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    banned: frozenset[int] = frozenset()
    min_p: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    penalties: Penalties | None = None
    mask: TokenMask | None = None
    sequence: int = 0


def choose_tokens(
    logits: torch.Tensor, rules: Sequence[TokenRule], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Choose one token for each row of logits.

    Args:
        logits: [M, V] fp32.
        rules: M rules.
        positions: M counters of the random number: the position of each token in its sequence.

    Returns:
        M token ids, and M natural log-probabilities under the unchanged logits (NaN where those are not finite).
        Greedy takes the lowest id among equals.
    """
    assert len(rules) == len(positions) == len(logits), "a rule and a position for each row"
    adjusted = adjust_logits(
        logits,
        [rule.bias for rule in rules],
        [rule.penalties for rule in rules],
        [rule.banned for rule in rules],
        [rule.mask for rule in rules],
    )
    tokens = adjusted.argmax(dim=-1)
    sampled = [index for index, rule in enumerate(rules) if rule.temperature > 0.0]
    most = max(1, SAMPLED_LOGITS // logits.shape[-1])  # sorting takes many times the logits' memory
    for start in range(0, len(sampled), most):
        part = sampled[start : start + most]
        where = to_device(np.array(part), logits.device)
        tokens[where] = _sample(adjusted[where], [(rules[index], positions[index]) for index in part])
    # One pass over the logits and one result of their size; logsumexp makes two and passes five times.
    logprobs = -functional.cross_entropy(logits, tokens, reduction="none")
    # One copy to the host, which waits for the step here and nowhere else; fp64 holds both as they are.
    ids, values = torch.stack((tokens.double(), logprobs.double())).tolist()
    return list(map(int, ids)), values


def uniform(seed: int, position: int, sequence: int = 0) -> float:
    """Return the random number of one token, in [0, 1): Philox, with seed and sequence as key, position as counter."""
    # The key has 128 bits, of which the seed has the lower half: no seed meets another's second sequence.
    philox = np.random.Philox(key=seed % 2**64 + (sequence << 64), counter=position)
    return float(np.random.Generator(philox).random())


def _sample(logits: torch.Tensor, draws: Sequence[tuple[TokenRule, int]]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    columns = [
        (
            max(rule.temperature, _SMALLEST_TEMPERATURE),
            rule.top_k or vocab_size,
            rule.top_p,
            rule.min_p,
            uniform(rule.seed, position, rule.sequence),
        )
        for rule, position in draws
    ]
    packed = to_device(np.array(columns, dtype=np.float64).T.copy(), logits.device)[..., None]
    temperature, top_k, top_p, min_p, uniforms = packed.unbind()
    temperature = temperature.float()

    # The maximum is taken off before the division, so that no temperature overflows. The sort is stable: equal logits
    # keep the order of their ids on every device.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=logits.device)
    probabilities = scaled.masked_fill(ranks >= top_k, float("-inf")).softmax(dim=-1).double()
    before = probabilities.cumsum(dim=-1) - probabilities
    is_out = (before >= top_p) | (probabilities < min_p * probabilities[:, :1])
    cumulative = probabilities.masked_fill(is_out, 0.0).cumsum(dim=-1)
    # The first token whose cumulative probability exceeds u * total; a token of probability 0 is never that one.
    rank = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return order.gather(-1, rank.clamp(max=vocab_size - 1))[:, 0]
