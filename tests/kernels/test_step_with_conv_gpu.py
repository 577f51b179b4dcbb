"""The step that convolves, on a device: the bits of the convolution and the step in turn, and when it runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import DEVICE_CASES, SHAPE_CASES, Mamba2Case
from tests.kernels.raw_steps import POOLS, assert_same_bits, random_step, run_in_turn, with_own_pools
from tests.plugins.plugin_ops import mamba2_specialization
from trtllm_replayssm import ops
from trtllm_replayssm.plugins import launch, launch_with_conv, loader
from trtllm_replayssm.plugins.specializations import PIPELINE_ARCHITECTURES

pytestmark = pytest.mark.gpu

PIPELINED = [case for case in (*DEVICE_CASES, *SHAPE_CASES) if mamba2_specialization(case).pipeline is not None]
MAIN = next(case for case in PIPELINED if case.name == "nemotron_3-T4")


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles of the launched kernels, in order."""
    if loader.device_architecture(torch.cuda.current_device()) not in PIPELINE_ARCHITECTURES:
        pytest.skip("this device has no pipelined step")
    found: list[str] = []

    def load(specialization: Any, role: Any, device_index: int) -> loader.LoadedKernel:
        found.append(role)
        return loader.load(specialization, role, device_index)

    for module in (launch, launch_with_conv):
        monkeypatch.setattr(module, "load", load)
    return found


def a_step(case: Mamba2Case, num_slots: int, num_paddings: int, *, has_bias: bool = True) -> Any:
    step = random_step(case, num_slots, num_paddings, seed=num_slots, has_bias=has_bias)
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in step.items()}


def require_the_bits_of_both(step: Any, run: Callable[..., Tensor] = ops.mamba2_with_conv) -> None:
    found, expected = with_own_pools(step), with_own_pools(step)
    expected_y = run_in_turn(expected, ops.causal_conv1d, ops.mamba2)
    assert_same_bits(found, run(**found), expected, expected_y)


def in_one_launch(*, history: int, max_draft_len: int, **tensors: Any) -> Tensor:
    kernel = launch_with_conv.find_kernel(tensors, history=history, max_draft_len=max_draft_len)
    assert kernel is not None
    return launch_with_conv.launch_step(kernel, tensors)


@pytest.mark.parametrize("case", PIPELINED, ids=lambda case: case.name)
def test_one_launch_gives_the_bits_of_two(case: Mamba2Case, roles: list[str]) -> None:
    require_the_bits_of_both(a_step(case, 9, 2, has_bias=case.window > 1), in_one_launch)
    assert roles[-1] == "step_with_conv" and len(roles) == 3


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_many_rows_give_the_bits_of_two_launches(state: str, window: int, roles: list[str]) -> None:
    """Every thread block takes many chunks: all buffers are used over and over. Long windows then take two launches."""
    step = a_step(Mamba2Case("many", 32, 64, 128, 4, 16, window - 1, state=state), 200, 20)
    require_the_bits_of_both(step, in_one_launch)
    assert roles[-1] == "step_with_conv"
    require_the_bits_of_both(step)
    assert (roles[-1] == "step_with_conv") == (window == 1)


def test_what_is_not_in_pieces_takes_two_launches(roles: list[str]) -> None:
    step = a_step(MAIN, 4, 1)
    for name in ("xBC", "conv_weight", "conv_bias"):
        base = torch.empty(step[name].numel() + 4, dtype=step[name].dtype, device="cuda")
        roles.clear()
        require_the_bits_of_both(step | {name: base[4:].view(step[name].shape).copy_(step[name])})
        assert roles == ["step", "pipelined_step"] * 2, name


def test_a_prefill_takes_two_launches(roles: list[str]) -> None:
    step = a_step(MAIN, 2, 1)
    step |= {name: torch.randn(3, 40, step[name].shape[2], device="cuda").bfloat16() for name in ("xBC", "dt")}
    step |= {"num_tokens": torch.full((3,), 40, dtype=torch.int32, device="cuda")}
    require_the_bits_of_both(step)
    assert "step_with_conv" not in roles


@pytest.mark.parametrize("window", [1, 4])
def test_a_captured_step_repeats(window: int, roles: list[str]) -> None:
    step = a_step(Mamba2Case("captured", 16, 64, 128, 2, 16, window - 1, state="bfloat16"), 9, 2)
    expected = with_own_pools(step)
    y = ops.mamba2_with_conv(**expected)
    found = with_own_pools(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_y = ops.mamba2_with_conv(**found)
    for _ in range(3):
        for name in POOLS:
            found[name].copy_(step[name])
        captured_y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(found, captured_y, expected, y)
    assert roles == ["step_with_conv"] * 2
