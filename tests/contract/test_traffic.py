"""The bytes that must move, counted by hand for one layer of Nemotron-Nano-9B-v2 and of Qwen3.5-9B."""

import pytest

from trtllm_replayssm.bench.shapes import GATED_DELTA_NET, MAMBA2
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.traffic import conv_bytes, conventional_bytes, prefill_bytes, replay_bytes

NANO = MAMBA2["nano9b"]
STATE = 128 * 80 * 128  # heads x head_dim x d_state
X, B, DT = 128 * 80, 8 * 128, 128
RING_ROW = 2 * (X + B) + 4 * DT
INPUTS, OUTPUTS = 2 * (X + 2 * B + DT), 2 * X


def test_a_replayed_decode() -> None:
    found = replay_bytes(NANO, ReplayGeometry(), "bfloat16", batch_size=3, flush_fraction=1 / 16, mean_pending=8.5)
    assert found.state_read == 3 * 4 * STATE
    assert found.state_written == 3 * 4 * STATE / 16
    assert found.ring_read == 3 * 8.5 * RING_ROW
    assert found.ring_written == 3 * RING_ROW
    assert (found.inputs, found.outputs, found.weights) == (3 * INPUTS, 3 * OUTPUTS, 0)
    assert found.total == 3 * (4 * STATE * 17 / 16 + 9.5 * RING_ROW + INPUTS + OUTPUTS)


def test_a_replayed_verification_with_a_state_of_16_bits() -> None:
    replay = ReplayGeometry(max_draft_len=3, state_dtype="bfloat16")
    found = replay_bytes(NANO, replay, "bfloat16", batch_size=1, flush_fraction=0.2, mean_pending=8.0)
    assert found.total == pytest.approx(2 * STATE * 1.2 + (8 + 4) * RING_ROW + 4 * (INPUTS + OUTPUTS))


@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_a_conventional_step_writes_a_state_per_token(max_draft_len: int) -> None:
    window = 1 + max_draft_len
    replay = ReplayGeometry(max_draft_len=max_draft_len)
    found = conventional_bytes(NANO, replay, "bfloat16", batch_size=2)
    assert found.total == 2 * (4 * STATE * (1 + window) + window * (INPUTS + OUTPUTS))


def test_the_limits_are_those_of_the_published_measurements() -> None:
    """At 4.27 TB/s: 315.5 us for a conventional step of 128 rows with fp32 states, 174.4 us for a replayed one."""
    conventional = conventional_bytes(NANO, ReplayGeometry(), "bfloat16", batch_size=128)
    replayed = replay_bytes(NANO, ReplayGeometry(), "bfloat16", batch_size=128, flush_fraction=1 / 16, mean_pending=8.5)
    assert conventional.total / 4.272e12 == pytest.approx(315.5e-6, rel=0.01)
    assert replayed.total / 4.272e12 == pytest.approx(174.4e-6, rel=0.02)


def test_a_step_of_the_convolution() -> None:
    row = 2 * (X + 2 * B)
    found = conv_bytes(NANO, 4, "bfloat16", batch_size=2)
    assert found.total == 2 * (3 + 4 + 4 + 4) * row + 5 * row


def test_a_prefill_writes_one_state_for_each_prompt() -> None:
    found = prefill_bytes(NANO, "bfloat16", "bfloat16", batch_size=3, tokens=100)
    assert (found.state_read, found.state_written) == (0, 3 * 2 * STATE)
    assert (found.inputs, found.outputs) == (3 * 100 * INPUTS, 3 * 100 * OUTPUTS)
    assert found.total == 3 * (2 * STATE + 100 * (INPUTS + OUTPUTS))


QWEN = GATED_DELTA_NET["qwen9b"]
QWEN_STATE = 32 * 128 * 128  # value heads x key_dim x value_dim
QWEN_INPUTS, QWEN_OUTPUTS = 2 * (2 * 2048 + 4096 + 2 * 32), 2 * 4096


def test_a_replayed_decode_of_a_gated_delta_net() -> None:
    found = replay_bytes(QWEN, ReplayGeometry(), "bfloat16", batch_size=2, flush_fraction=1 / 16, mean_pending=8.5)
    state, ring_row = 4 * QWEN_STATE, 2 * 2048 + 4 * 4096 + 4 * 32
    assert (found.state_read, found.state_written) == (2 * state, 2 * state / 16)
    assert (found.ring_read, found.ring_written) == (2 * 8.5 * ring_row, 2 * ring_row)
    assert (found.inputs, found.outputs, found.weights) == (2 * QWEN_INPUTS, 2 * QWEN_OUTPUTS, 0)


@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_a_conventional_step_of_a_gated_delta_net(max_draft_len: int) -> None:
    window = 1 + max_draft_len
    replay = ReplayGeometry(max_draft_len=max_draft_len, state_dtype="bfloat16")
    found = conventional_bytes(QWEN, replay, "bfloat16", batch_size=2)
    assert found.total == 2 * (2 * QWEN_STATE * (1 + window) + window * (QWEN_INPUTS + QWEN_OUTPUTS))


def test_the_conventional_limits_of_a_gated_delta_net_are_those_of_the_published_measurements() -> None:
    """At 4.27 TB/s, 128 rows, fp32: 126.7 us for a token, 317.1 us for four tokens with a state for each."""
    for max_draft_len, microseconds in ((0, 126.7), (3, 317.1)):
        replay = ReplayGeometry(max_draft_len=max_draft_len)
        found = conventional_bytes(QWEN, replay, "bfloat16", batch_size=128)
        assert found.total / 4.272e12 == pytest.approx(1e-6 * microseconds, rel=0.01)


def test_a_prefill_of_a_gated_delta_net() -> None:
    found = prefill_bytes(QWEN, "float32", "bfloat16", batch_size=3, tokens=100)
    assert found.total == 3 * (4 * QWEN_STATE + 100 * (QWEN_INPUTS + QWEN_OUTPUTS))


def test_a_step_of_the_convolution_of_a_gated_delta_net() -> None:
    row = 2 * (2 * 2048 + 4096)
    assert conv_bytes(QWEN, 1, "bfloat16", batch_size=2).total == 2 * (3 + 1 + 1 + 1) * row + 5 * row
