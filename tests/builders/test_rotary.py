"""Rotary embedding against ``transformers``, bit for bit, to the end of the longest text."""

import pytest
import torch

from trtllm_replayssm.builders.layers.rotary import rotate, rotation

LONGEST = 262144


@pytest.mark.parametrize(("head_dim", "factor", "theta"), [(256, 0.25, 1e7), (32, 0.25, 1e4), (24, 1.0, 5e5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_those_of_transformers_at_every_distance(
    head_dim: int, factor: float, theta: float, dtype: torch.dtype
) -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=rope))
    past = torch.tensor([0, 77, LONGEST - 40], dtype=torch.int32)
    window, rotary_dim = 40, int(head_dim * factor)
    cos, sin = rotation(past, window, rotary_dim, theta, dtype)
    positions = past[:, None].long() + torch.arange(window)
    x = torch.randn(3, 2, window, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected_cos, expected_sin = theirs(x, positions)
    assert torch.equal(cos, expected_cos[..., : rotary_dim // 2])
    assert torch.equal(sin, expected_sin[..., : rotary_dim // 2])
    expected, _ = apply_rotary_pos_emb(x, x, expected_cos, expected_sin)
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.04)
    assert torch.equal(rotate(x, cos, sin)[..., rotary_dim:], x[..., rotary_dim:])
