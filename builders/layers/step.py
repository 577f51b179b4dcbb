"""What every layer of one step shares: the lengths, the slots, and the attention mask made of them."""

from dataclasses import dataclass

import torch

from trtllm_replayssm.builders.layers.flash_attention import FlashStep


@dataclass(frozen=True)
class Step:
    """The tensors of one step that are the same for all layers.

    Attributes:
        past_lengths: [B] int32, committed tokens c.
        checkpoint_lengths: [B] int32, folded tokens f.
        num_tokens: [B] int32, window tokens n of each row.
        slot_ids: [B] int32, -1 for a padding row.
        key_length: how many leading rows of the key/value caches the step may see, at most their capacity.
        attention_mask: [B, 1, S, key_length] bool, True where a token may look; None without attention layers, and
            where flash attention needs none.
        rotation: cosines and sines of the window's positions, [B, S, rotary_dim / 2] each; None without rotary
            position embedding.
        flash: what flash attention needs; None where it does not run.
        first_slot: row i has the key/value caches of slot first_slot + i. Flash attention finds them by ``slot_ids``.
    """

    past_lengths: torch.Tensor
    checkpoint_lengths: torch.Tensor
    num_tokens: torch.Tensor
    slot_ids: torch.Tensor
    key_length: int
    attention_mask: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    flash: FlashStep | None = None
    first_slot: int = 0

    def rows_of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the rows of the step in a cache of all slots, without a copy."""
        return cache[self.first_slot : self.first_slot + len(self.slot_ids)]


def attention_mask(past_lengths: torch.Tensor, seq_len: int, key_length: int) -> torch.Tensor:
    """Let the token at position c + s see the keys at positions 0 .. c + s.

    Args:
        past_lengths: [B] int32.
        seq_len: window tokens S.
        key_length: keys to mask.

    Returns:
        [B, 1, S, key_length] bool.
    """
    device = past_lengths.device
    query_positions = past_lengths[:, None] + torch.arange(seq_len, dtype=torch.int32, device=device)
    key_positions = torch.arange(key_length, dtype=torch.int32, device=device)
    return key_positions <= query_positions[:, None, :, None]
