"""Log-probabilities of the likeliest tokens beside the chosen ones, under the model's own logits."""

from collections.abc import Sequence

import torch

from trtllm_replayssm.runtime.outputs import Logprob


def top_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[dict[int, Logprob] | None]:
    """Return for each row the likeliest tokens, and the chosen one last where it is none of them.

    Args:
        logits: [M, V] fp32.
        tokens: M chosen tokens.
        wanted: M numbers of likeliest tokens, at most V; 0 for the chosen token alone, None for nothing.
    """
    found: list[dict[int, Logprob] | None] = [None] * len(tokens)
    rows = [row for row, count in enumerate(wanted) if count is not None]
    if not rows:
        return found
    own = logits[torch.tensor(rows, device=logits.device)]
    own = own - own.logsumexp(dim=-1, keepdim=True)
    chosen = own.gather(-1, torch.tensor([tokens[row] for row in rows], device=own.device)[:, None])
    top, top_ids = own.topk(max(count for count in wanted if count is not None), dim=-1)
    top_ranks = 1 + (top[:, None, :] > top[:, :, None]).sum(dim=-1)  # equals share a rank
    chosen_ranks = 1 + (own > chosen).sum(dim=-1)
    columns = (top_ids.tolist(), top.tolist(), top_ranks.tolist(), chosen.tolist(), chosen_ranks.tolist())
    for row, ids, values, ranks, (chosen_value,), chosen_rank in zip(rows, *columns, strict=True):
        entries = {token: Logprob(value, rank) for token, value, rank in zip(ids, values, ranks, strict=True)}
        kept = dict(list(entries.items())[: wanted[row]])
        kept.setdefault(tokens[row], Logprob(chosen_value, chosen_rank))
        found[row] = kept
    return found
