"""What changes logits before a token is chosen: bias, then penalties, then bans. Rows do not see one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trtllm_replayssm.runtime.transfer import to_device

TokenMask = npt.NDArray[np.uint32]
"""One bit for each token of the vocabulary, the lowest bit of a word first; set where the token is allowed."""

MASK_WORD_BITS = 32


@dataclass(frozen=True, eq=False)
class Penalties:
    """What the tokens before a position do to its logits.

    Attributes:
        repetition: a positive logit of a token that is there is divided by it, a negative one multiplied (Keskar et al.
            2019, "CTRL", with the sign taken into account).
        presence: taken off the logit of a token that is there.
        frequency: taken off as often as the token is there.
        tokens: the sequence before the position.
        num_ignored: so many of the first tokens count for repetition alone.
    """

    repetition: float
    presence: float
    frequency: float
    tokens: npt.NDArray[np.int64]
    num_ignored: int = 0


def allows(mask: TokenMask, token_id: int) -> bool:
    """Return a token's bit."""
    return bool(int(mask[token_id // MASK_WORD_BITS]) >> token_id % MASK_WORD_BITS & 1)


def adjust_logits(
    logits: torch.Tensor,
    biases: Sequence[Mapping[int, float]],
    penalties: Sequence[Penalties | None],
    bans: Sequence[frozenset[int]],
    masks: Sequence[TokenMask | None] = (),
) -> torch.Tensor:
    """Return logits as the rules of their rows want them; the argument stays as it is.

    Args:
        logits: [M, V] fp32.
        biases: M mappings of a token id to what is added.
        penalties: M penalties; None for none.
        bans: M sets of tokens, whose logits become -inf.
        masks: M sets of tokens as bits, the logits of all others becoming -inf; None, or no masks, for all tokens.
    """
    return _masked(_without_banned(_penalised(_biased(logits, biases), penalties), bans), masks)


def _biased(logits: torch.Tensor, biases: Sequence[Mapping[int, float]]) -> torch.Tensor:
    entries = [(row, token, value) for row, bias in enumerate(biases) for token, value in bias.items()]
    if not entries:
        return logits
    rows, tokens, values = zip(*entries, strict=True)
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return _finite(logits.index_put(where, logits.new_tensor(values), accumulate=True))


def _penalised(logits: torch.Tensor, penalties: Sequence[Penalties | None]) -> torch.Tensor:
    found = [(row, penalty) for row, penalty in enumerate(penalties) if penalty is not None]
    if not found:
        return logits
    rows = torch.tensor([row for row, _ in found], device=logits.device)
    own = logits[rows]

    def column(values: list[float]) -> torch.Tensor:
        return _finite(logits.new_tensor(values))[:, None]

    repetition = column([penalty.repetition for _, penalty in found])
    presence = column([penalty.presence for _, penalty in found])
    frequency = column([penalty.frequency for _, penalty in found])
    is_there = _counts(own, [penalty.tokens for _, penalty in found]) > 0
    counts = _counts(own, [penalty.tokens[penalty.num_ignored :] for _, penalty in found])
    repeated = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where(is_there, repeated, own) - presence * (counts > 0) - frequency * counts
    return logits.index_put((rows,), _finite(own))


def _counts(like: torch.Tensor, sequences: Sequence[npt.NDArray[np.int64]]) -> torch.Tensor:
    """Return how often each token is in each sequence, in the shape and type of ``like``."""
    rows = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    where = tuple(torch.from_numpy(index).to(like.device) for index in (rows, np.concatenate(sequences)))
    return torch.zeros_like(like).index_put_(where, like.new_ones(()), accumulate=True)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest fp32 values that are finite, so that no bias or penalty, however large, makes a NaN."""
    limits = torch.finfo(values.dtype)
    return values.clamp(limits.min, limits.max)


def _without_banned(logits: torch.Tensor, bans: Sequence[frozenset[int]]) -> torch.Tensor:
    pairs = [(row, token) for row, banned in enumerate(bans) for token in sorted(banned)]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    return logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))


def _masked(logits: torch.Tensor, masks: Sequence[TokenMask | None]) -> torch.Tensor:
    found = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not found:
        return logits
    rows = to_device(np.array([row for row, _ in found]), logits.device)
    # As bytes to the device and as bits there: an eighth of the copy.
    words = to_device(np.stack([mask for _, mask in found]).view(np.uint8), logits.device)
    bits = words[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
    return logits.index_put((rows,), logits[rows].masked_fill(~is_allowed, float("-inf")))
