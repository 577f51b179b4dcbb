"""Byte counts of one layer's state, worked out by hand."""

from trtllm_replayssm.contract import memory
from trtllm_replayssm.contract.geometry import GatedDeltaNetGeometry, Mamba2Geometry

MAMBA2 = Mamba2Geometry(n_heads=128, head_dim=80, d_state=128, n_groups=8, d_conv=4)
GATED_DELTA_NET = GatedDeltaNetGeometry(n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, d_conv=4)


def test_a_checkpoint_is_one_matrix_per_head() -> None:
    assert memory.mamba2_checkpoint_bytes(MAMBA2, "float32") == 128 * 80 * 128 * 4
    assert memory.gated_delta_net_checkpoint_bytes(GATED_DELTA_NET, "float32") == 32 * 128 * 128 * 4
    assert memory.gated_delta_net_checkpoint_bytes(GATED_DELTA_NET, "bfloat16") == 32 * 128 * 128 * 2


def test_a_ring_row_holds_what_a_token_adds_to_the_state() -> None:
    assert memory.mamba2_ring_row_bytes(MAMBA2, "bfloat16") == (128 * 80 + 8 * 128) * 2 + 128 * 4
    # k in the activation type; u and g in fp32 whatever the activations are.
    assert memory.gated_delta_net_ring_row_bytes(GATED_DELTA_NET, "bfloat16") == 16 * 128 * 2 + 32 * 128 * 4 + 32 * 4
    assert memory.gated_delta_net_ring_row_bytes(GATED_DELTA_NET, "float32") == 16 * 128 * 4 + 32 * 128 * 4 + 32 * 4


def test_the_convolution_runs_over_q_k_and_v() -> None:
    assert (GATED_DELTA_NET.d_key, GATED_DELTA_NET.d_value, GATED_DELTA_NET.conv_dim) == (2048, 4096, 8192)
