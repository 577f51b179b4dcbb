"""Token embeddings and the head that turns hidden states into logits."""

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """A table of one row per token.

    Args:
        vocab_size: rows.
        d_model: columns.
        dtype: of the weight.
    """

    def __init__(self, vocab_size: int, d_model: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, dtype=dtype), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look ``input_ids [B, S]`` int32 up: [B, S, d_model]."""
        return functional.embedding(input_ids, self.weight)


def gather_positions(hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
    """Take the window positions whose logits are wanted, so that the head runs on those alone.

    Args:
        hidden: [B, S, d_model].
        logits_indices: [B, J] int32; clamped into [0, S - 1], since padding rows may carry anything.

    Returns:
        [B, J, d_model].
    """
    batch, seq_len = hidden.shape[0], hidden.shape[1]
    first = torch.arange(batch, dtype=torch.int32, device=hidden.device)[:, None] * seq_len
    rows = first + logits_indices.clamp(min=0).minimum(torch.full_like(logits_indices, seq_len - 1))
    return functional.embedding(rows, hidden.flatten(0, 1))
