"""Layouts that the kernels cannot read are refused by name, with the way out; those that they can are not."""

import pytest
import torch

from trtllm_replayssm.errors import OpArgumentError
from trtllm_replayssm.plugins.layouts import (
    are_heads_neighbours,
    is_in_pieces,
    require_contiguous,
    require_innermost_contiguous,
    require_slot_layout,
)


def test_slices_with_neighbouring_channels_are_accepted() -> None:
    packed = torch.zeros(2, 3, 40)
    require_innermost_contiguous("mamba2", "x", packed.as_strided((2, 3, 2, 8), (120, 40, 8, 1), 8))
    require_innermost_contiguous("mamba2", "dt", packed[..., 5:6])


def test_channels_that_are_no_neighbours_are_refused() -> None:
    with pytest.raises(OpArgumentError, match=r"x: found strides \(1, 2, 6\).*Pass x.contiguous\(\)"):
        require_innermost_contiguous("mamba2", "x", torch.zeros(4, 3, 2).permute(2, 1, 0))


def test_strided_lengths_are_refused() -> None:
    require_contiguous("mamba2", "slot_ids", torch.zeros(4))
    with pytest.raises(OpArgumentError, match="slot_ids"):
        require_contiguous("mamba2", "slot_ids", torch.zeros(8)[::2])


def test_pools_with_any_aligned_stride_between_slots_are_accepted() -> None:
    layers = torch.zeros(5, 3, 6, 8)
    require_slot_layout("mamba2", "x_ring", layers[:, 1], 16)
    require_slot_layout("mamba2", "x_ring", layers[::2, 2], 16)
    # An axis of length 1 is never stepped along: its stride may be anything.
    require_slot_layout("mamba2", "x_ring", layers.as_strided((2, 1, 8), (16, 77, 1)), 16)


def test_pools_whose_slots_are_not_contiguous_are_refused() -> None:
    with pytest.raises(OpArgumentError, match="x_ring.*each slot contiguous"):
        require_slot_layout("mamba2", "x_ring", torch.zeros(2, 3, 8)[..., :4], 16)
    with pytest.raises(OpArgumentError, match="each slot contiguous"):
        require_slot_layout("mamba2", "x_ring", torch.zeros(2, 8, 3).transpose(1, 2), 16)


def test_pools_off_the_alignment_are_refused() -> None:
    # torch aligns new memory to 64 bytes.
    with pytest.raises(OpArgumentError, match="multiples of 16 bytes"):
        require_slot_layout("mamba2", "ssm_state", torch.zeros(2 * 32 + 1)[1:].view(2, 4, 8), 16)
    with pytest.raises(OpArgumentError, match="132 bytes between slots"):
        require_slot_layout("mamba2", "ssm_state", torch.zeros(2, 33)[:, :32].view(2, 4, 8), 16)
    require_slot_layout("mamba2", "dt_ring", torch.zeros(2, 33)[:, :32].view(2, 4, 8), 4)


def test_activations_in_pieces_are_told_from_others() -> None:
    packed = torch.zeros(2, 3, 48, dtype=torch.bfloat16)
    assert is_in_pieces(packed[..., 8:40].view(2, 3, 2, 16), 16)
    assert not is_in_pieces(packed[..., 4:36].view(2, 3, 2, 16), 16)
    assert not is_in_pieces(torch.zeros(2, 3, 36, dtype=torch.bfloat16)[..., :32].view(2, 3, 2, 16), 16)
    # An axis of length 1 is never stepped along.
    assert is_in_pieces(torch.zeros(1, 1, 36, dtype=torch.bfloat16)[..., :32].view(1, 1, 2, 16), 16)


def test_heads_with_gaps_are_told_from_neighbours() -> None:
    heads = torch.zeros(2, 3, 4, 32)
    assert are_heads_neighbours(heads) and not are_heads_neighbours(heads[..., :16])
    assert are_heads_neighbours(heads[:, :, 1:3]) and are_heads_neighbours(heads[:, :, :1, :16])
