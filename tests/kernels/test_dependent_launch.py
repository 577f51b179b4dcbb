"""Every kernel keeps to the rules of ``common/dependent_launch.cuh``; chains of them keep the order of the stream."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import DEVICE_CASES, Mamba2Case
from tests.kernels.test_specializations import NANO_9B
from tests.ops.driver import bits, int32
from tests.ops.mamba2_driver import make_pools, make_weights
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.plugins import build, launch
from trtllm_replayssm.plugins.specializations import (
    ROLES,
    CausalConv1dSpecialization,
    Mamba2WithConvSpecialization,
    Role,
    Specialization,
)

CONV = CausalConv1dSpecialization(2560, 4, "bfloat16")
KERNELS: list[tuple[Specialization, Role]] = [
    *((specialization, role) for specialization in (CONV, NANO_9B) for role in ROLES),
    (CONV, "one_token_step"),
    (NANO_9B, "pipelined_step"),
    (Mamba2WithConvSpecialization(NANO_9B, 4), "step_with_conv"),
]
# Loads, stores and copies of anything but parameters and shared memory. Prefetches into L2 are no accesses, and relaxed
# loads, which pass the L1 cache, are for guessing what to prefetch.
GLOBAL_ACCESS = re.compile(
    r"\b(?:ld|st|red|atom)\.(?!param|shared|local|relaxed)[\w.:]+|\bcp\.async\.(?!bulk\.prefetch)(?:ca|cg|bulk)[\w.:]*"
)
END = re.compile(r"\b(?:ret|exit);")


def ptx_of(specialization: Specialization, role: Role, architecture: str) -> str:
    """Return the instructions of a kernel, from its entry on."""
    nvrtc: Any = build.cuda_module("bindings.nvrtc")
    source = (build.SOURCE_DIR / specialization.folder / f"{role}.cu").read_bytes()
    options = [f"-arch={architecture.replace('sm', 'compute')}", "-std=c++17"]
    options += [f"-I{folder}" for folder in (build.SOURCE_DIR, build.SOURCE_DIR / "nvrtc")]
    options += [f"-D{name}={value}" for name, value in specialization.defines(role).items()]
    _, program = nvrtc.nvrtcCreateProgram(source, role.encode(), 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    text = ptx.decode()
    return text[text.index(".entry") :]


def first(pattern: str | re.Pattern[str], text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern}"
    return found.start()


def require_rules(ptx: str) -> None:
    wait, start = first(r"griddepcontrol\.wait;", ptx), first(r"griddepcontrol\.launch_dependents;", ptx)
    assert wait < start, "the next kernel may start before this one has waited"
    assert wait < first(GLOBAL_ACCESS, ptx), "a tensor is read or written before the kernel has waited"
    assert wait < first(END, ptx), "a block may end without having waited"


@pytest.mark.parametrize(("specialization", "role"), KERNELS, ids=lambda value: str(value).partition("(")[0])
def test_kernels_wait_before_they_touch_a_tensor_and_then_let_the_next_start(
    specialization: Specialization, role: Role
) -> None:
    ptx = ptx_of(specialization, role, "sm_90a")
    require_rules(ptx)
    late = ptx.replace("griddepcontrol.wait;", "", 1)
    for broken in (late, late + "griddepcontrol.wait;"):
        with pytest.raises(AssertionError):
            require_rules(broken)
    if role in specialization.roles("sm_80"):
        assert "griddepcontrol" not in ptx_of(specialization, role, "sm_80")


# A convolution over all channels of a head, so that its input can be the output of the kernel before it.
CASES = [case for case in DEVICE_CASES if case.name in ("nemotron_h-decode", "nemotron_3-T4", "W2-N256-P80")]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_rows = pytest.mark.parametrize("num_rows", [1, 300])


class Chain:
    """Steps of convolution, Mamba-2, Mamba-2 on the same slots: each reads what the kernel before it has just written.

    The inputs of the first kernel of a step are the outputs of the last one before, so no other kernel runs in between.
    """

    NUM_STEPS = 40

    def __init__(self, case: Mamba2Case, num_rows: int) -> None:
        torch.manual_seed(1)
        T, H, P = case.window, case.n_heads, case.head_dim
        self.case = case
        self.first = torch.randn(num_rows, T, H, P).to("cuda", case.activation_dtype)
        weight = torch.randn(H * P, 4) / 4
        self.conv = {
            "weight": weight.to("cuda", case.activation_dtype),
            "bias": torch.randn(H * P).to("cuda", case.activation_dtype),
            "conv_ring": torch.zeros(num_rows, 3 + T, H * P, dtype=case.activation_dtype, device="cuda"),
        }
        self.weights = {name: weight.to("cuda") for name, weight in make_weights(case, seed=2).items()}
        self.pools = {name: pool.zero_() for name, pool in make_pools(case, num_rows, "cuda").items()}
        # Scaled, so that a step does not amplify what it is fed with.
        groups = (case.n_groups, case.d_state)
        B, C = torch.randn(2, num_rows, T, *groups).to("cuda", case.activation_dtype) / case.d_state**0.5
        self.inputs = {"dt": torch.randn(num_rows, T, H).to("cuda", case.dt_dtype), "B": B, "C": C}
        self.rows = {
            "num_tokens": int32([T] * num_rows, "cuda"),
            "slot_ids": int32([*reversed(range(num_rows))], "cuda"),
        }
        self.lengths = list(self._lengths(num_rows))
        torch.cuda.synchronize()

    def _lengths(self, num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        history, draft = self.case.history, self.case.max_draft_len
        rows = [(min(row % 7, history), 0) for row in range(num_rows)]
        for step in range(2 * self.NUM_STEPS):
            yield int32([past for past, _ in rows], "cuda"), int32([folded for _, folded in rows], "cuda")
            accepted = [1 + (step + row) % self.case.window for row in range(num_rows)]
            rows = [
                protocol.advance(past, folded, more, history=history, max_draft_len=draft)
                for (past, folded), more in zip(rows, accepted, strict=True)
            ]

    def run(self, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Run all steps, with a call after every kernel; returns every output, then all memory."""
        y, outputs = self.first, []
        for step in range(self.NUM_STEPS):
            first, second = self.lengths[2 * step : 2 * step + 2]
            for kernel in range(3):
                if kernel == 0:
                    y = self._convolve(y, first[0])
                else:
                    y = self._mamba2(y, *(first if kernel == 1 else second))
                outputs.append(y)
                between()
        return [*outputs, self.conv["conv_ring"], *self.pools.values()]

    def _convolve(self, y: Tensor, past: Tensor) -> Tensor:
        tensors = {"x": y.flatten(2), **self.conv, **self.rows, "past_lengths": past}
        return launch.causal_conv1d(tensors, activation="silu").view(y.shape)

    def _mamba2(self, y: Tensor, past: Tensor, checkpoint: Tensor) -> Tensor:
        tensors = {"x": y, **self.inputs, **self.weights, **self.pools, **self.rows}
        tensors |= {"past_lengths": past, "checkpoint_lengths": checkpoint}
        return launch.mamba2(tensors, history=self.case.history, max_draft_len=self.case.max_draft_len)


def require_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.cuda.synchronize()
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert b.isfinite().all() and b.any()
        assert torch.equal(bits(a), bits(b)), f"launch {index} of {len(expected)}"


@pytest.mark.gpu
@by_case
@by_rows
def test_chains_of_kernels_equal_launches_that_are_waited_for(case: Mamba2Case, num_rows: int) -> None:
    expected = Chain(case, num_rows).run(torch.cuda.synchronize)
    require_equal(Chain(case, num_rows).run(), expected)
    captured = Chain(case, num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run()
    graph.replay()
    require_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_what_another_kernel_or_a_copy_wrote_just_before_is_seen(is_captured: bool) -> None:
    """Lengths, slots, weights and x of a convolution all come from launches of torch right before it."""
    slots, channels = 64, 10240
    ring, weight = torch.zeros(slots, 7, channels, device="cuda"), torch.zeros(channels, 4, device="cuda")
    one = torch.ones(slots, 1, channels, device="cuda")
    x, order = torch.zeros_like(one), int32(range(slots), "cuda")
    past, num_tokens, slot_ids = order.clone(), order.clamp(1, 1), order.clone()
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "bias": None, "conv_ring": ring}
    tensors |= {"past_lengths": past, "num_tokens": num_tokens, "slot_ids": slot_ids}
    launch.causal_conv1d(tensors, activation=None)

    def run() -> list[Tensor]:
        outputs = []
        for step in range(48):
            # The last writer before the launch takes turns; every second step all rows are padding.
            for turn in range(5):
                match (turn + step) % 5:
                    case 0:
                        torch.mul(one, float(step), out=x)
                    case 1:
                        torch.add(order, -100 * (step % 2), out=slot_ids).clamp_(min=-1)
                    case 2:
                        past.fill_(step)
                    case 3:
                        weight.fill_(step + 1)
                    case _:
                        num_tokens.copy_(order.clamp(1, 1))
            outputs.append(launch.causal_conv1d(tensors, activation=None))
        return outputs

    ring.zero_()
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        graph.replay()
    else:
        outputs = run()
    torch.cuda.synchronize()
    history = [0.0, 0.0, 0.0]
    for step, y in enumerate(outputs):
        expected = 0.0 if step % 2 else (step + 1) * (step + sum(history))
        assert (y == expected).all(), f"step {step}"
        # A padding row leaves the ring as it is: the row of its position holds what stood there seven steps ago.
        history = [*history[1:], float(step) if step % 2 == 0 else max(step - 7.0, 0.0)]
