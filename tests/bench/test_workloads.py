"""The memory of a case, and the gate before its time, with the CPU in the place of the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import kernels, workloads
from trtllm_replayssm.bench.cases import KernelCase, make_cases
from trtllm_replayssm.bench.workloads import CausalConv1dStep, Mamba2Step, relative_error, require
from trtllm_replayssm.errors import NumericsError
from trtllm_replayssm.plugins import layouts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**19)


def make_case(state_dtype: str = "float32", max_draft_len: int = 0, batch_size: int = 6) -> KernelCase:
    (case,) = make_cases(["4x16x32x2"], [batch_size], [state_dtype], [max_draft_len], history=8)
    return case


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("max_draft_len", "batch_size"), [(0, 1), (0, 6), (3, 1), (3, 6)])
def test_the_gate_passes_what_is_right(state_dtype: str, max_draft_len: int, batch_size: int) -> None:
    step = Mamba2Step(make_case(state_dtype, max_draft_len, batch_size), CPU)
    assert 0 < step.check() <= workloads.OUTPUT_BOUND


@pytest.mark.parametrize("fault", ["output", "checkpoint", "nan"])
def test_the_gate_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def wrong(history: int, max_draft_len: int, **tensors: Tensor) -> Tensor:
        y = right(**tensors, history=history, max_draft_len=max_draft_len)
        if tensors["x"].dtype == torch.bfloat16:  # the device's turn, not that of the reference
            if fault == "checkpoint":
                tensors["ssm_state"][:, 1] *= 1.01
            else:
                y[-1, 0, 2, 3] = torch.nan if fault == "nan" else y[-1, 0].abs().max() * 1.02
        return y

    step = Mamba2Step(make_case(), CPU)
    right: Callable[..., Tensor] = ops.mamba2
    monkeypatch.setattr(ops, "mamba2", wrong)
    with pytest.raises(NumericsError, match="checkpoint" if fault == "checkpoint" else "output"):
        step.check()


def test_launches_rotate_over_disjoint_slots_and_all_memory_that_kernels_can_read() -> None:
    step = Mamba2Step(make_case(max_draft_len=3), CPU)
    assert step.num_sets > 2
    slots, addresses = set(), set()
    for index in range(step.num_sets):
        tensors = step._tensors(0, index)
        layouts.check("ops.mamba2", tensors, strided=("x", "dt", "B", "C"), slots={"ssm_state": 16, "x_ring": 16})
        slots |= set(tensors["slot_ids"].tolist())
        addresses |= {tensors[name].data_ptr() for name in ("x", "dt", "B", "C")}
    assert slots == set(range(6 * step.num_sets))
    assert len(addresses) == 4 * step.num_sets
    assert not step._tensors(0, 0)["x"].is_contiguous()


def test_every_step_of_every_set_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Mamba2Step(make_case(), CPU)
    lengths = []

    def launched(tensors: dict[str, Tensor], *, history: int, max_draft_len: int) -> Tensor:
        pending = tensors["past_lengths"] - tensors["checkpoint_lengths"]
        lengths.append((tensors["slot_ids"][0].item(), pending.tolist()))
        assert (history, max_draft_len) == (8, 0)
        return tensors["x"]

    monkeypatch.setattr("trtllm_replayssm.plugins.launch.mamba2", launched)
    kernels._launch_all(step, step.num_steps)
    assert len(lengths) == step.num_sets * step.num_steps
    assert [slot for slot, _ in lengths[: step.num_sets]] == [6 * index for index in range(step.num_sets)]
    of_first_row = [pending[0] for slot, pending in lengths if slot == 0]
    assert of_first_row == list(range(1, 9)), "a whole flush cycle"


@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_the_gate_of_the_convolution(max_draft_len: int) -> None:
    step = CausalConv1dStep(make_case(max_draft_len=max_draft_len), CPU)
    assert 0 < step.check() <= workloads.OUTPUT_BOUND
    tensors = step._tensors(step.num_steps - 1, step.num_sets - 1)
    layouts.check("ops.causal_conv1d", tensors, strided=("x",), slots={"conv_ring": 16})
    assert step.num_sets * step.num_steps >= 256


def test_errors_are_relative_to_the_largest_magnitude_along_the_first_axis() -> None:
    expected = torch.tensor([[4.0, 0.0], [100.0, 1.0]])
    assert relative_error(expected + torch.tensor([[0.0, 0.4], [0.0, 0.4]]), expected) == pytest.approx(0.1)
    assert relative_error(torch.full((2, 2), torch.nan), expected) == float("inf")
    with pytest.raises(NumericsError, match="found an error of inf against the CPU; needed at most 0.004"):
        require("x", float("inf"))
