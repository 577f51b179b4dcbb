"""``ops.mamba2_with_conv`` on the CPU is the two ops in turn; and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Mamba2Case
from tests.kernels.raw_steps import POOLS, assert_same_bits, random_step, run_in_turn, with_own_pools
from tests.ops.driver import bits, int32
from trtllm_replayssm import ops
from trtllm_replayssm.errors import OpArgumentError

CASE = Mamba2Case("small-T4", 4, 8, 6, 2, 16, 3, "float32")


def a_step() -> Any:
    return random_step(CASE, num_slots=6, num_paddings=1, seed=0)


@pytest.mark.parametrize("seq_len", [1, 4, 9])
def test_it_is_the_two_ops_in_turn(seq_len: int) -> None:
    step = a_step()
    generator = torch.Generator().manual_seed(seq_len)
    for name in ("xBC", "dt"):
        shape = (len(step["slot_ids"]), seq_len, step[name].shape[2])
        step[name] = torch.randn(shape, generator=generator)
    step["num_tokens"] = int32([seq_len] * len(step["slot_ids"]))
    found, expected = with_own_pools(step), with_own_pools(step)
    expected_y = run_in_turn(expected, ops.causal_conv1d, ops.mamba2)
    assert_same_bits(found, ops.mamba2_with_conv(**found), expected, expected_y)


def test_shapes_alone_give_the_shape_of_the_output() -> None:
    step: Any = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in a_step().items()}
    y = ops.mamba2_with_conv(**step)
    assert y.shape == (7, 4, 4, 8) and y.is_meta


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("xBC", torch.zeros(7, 4, 55), ["conv_weight: found shape (56, 4)", "conv_dim = 55 comes from xBC"]),
        ("conv_bias", torch.zeros(3), ["conv_bias: found shape (3,)"]),
        ("conv_ring", torch.zeros(6, 6, 56), ["rows R_conv: found 6", "at least 7"]),
        ("x_ring", torch.zeros(6, 20, 4, 9), ["x_ring: found shape (6, 20, 4, 9)", "P = 8"]),
        ("history", 17, ["found 20", "at least 21"]),
        ("history", 3, ["history"]),
        ("num_tokens", int32([5] * 7), ["num_tokens[", "found 5"]),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(name: str, value: Any, words: list[str]) -> None:
    step = a_step() | {name: value}
    before = {pool: bits(step[pool]) for pool in POOLS}
    with pytest.raises(OpArgumentError) as refusal:
        ops.mamba2_with_conv(**step)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert all(torch.equal(bits(step[pool]), before[pool]) for pool in POOLS)


def test_channels_that_are_not_those_of_the_heads_are_refused() -> None:
    step = a_step()
    step |= {name: step[name][..., :48].clone() for name in ("xBC", "conv_ring")}
    step |= {name: step[name][:48].clone() for name in ("conv_weight", "conv_bias")}
    with pytest.raises(OpArgumentError, match="channels: found 48; needed 56"):
        ops.mamba2_with_conv(**step)
