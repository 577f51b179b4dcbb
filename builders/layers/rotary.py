"""Rotary position embedding of the leading channels of a head."""

import torch

from trtllm_replayssm.builders import onnx_ops


def rotation(
    past_lengths: torch.Tensor, seq_len: int, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of a window's positions c .. c+S-1, the same for all layers.

    Args:
        past_lengths: [B] int32.
        seq_len: window tokens S.
        rotary_dim: rotated channels of a head.
        theta: base of the frequencies.
        dtype: of the result, the activations'; angles are fp32.

    Returns:
        (cos, sin), each [B, S, rotary_dim / 2].
    """
    device = past_lengths.device
    # Operation by operation as transformers has it: a last bit of a frequency grows to an angle in a long text.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    frequencies = 1.0 / theta**exponents
    positions = past_lengths[:, None] + torch.arange(seq_len, dtype=torch.int32, device=device)
    angles = positions[..., None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i with channel i + rotary_dim / 2 of every head; the channels from rotary_dim on stay.

    Args:
        x: [B, H, S, hd].
        cos: [B, S, rotary_dim / 2], x's type.
        sin: as cos.

    Returns:
        As x, computed in fp32 and rounded once.
    """
    if onnx_ops.is_exporting():
        return onnx_ops.rotary_embedding(x, cos, sin)
    return rotate_heads(x.transpose(1, 2), cos, sin).transpose(1, 2)


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as ``rotate`` does, with heads side by side: ``x [..., H, hd]``, ``cos [..., rotary_dim / 2]``."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :].float(), sin[..., None, :].float()
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), -1)
