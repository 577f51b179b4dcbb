"""The memory of a case, and the gate before its time, with the CPU in the place of the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import kernels
from trtllm_replayssm.bench.cases import KernelCase, make_cases, make_prefill_cases
from trtllm_replayssm.bench.gate import OUTPUT_BOUND, ROUNDED_BOUND, relative_error, require
from trtllm_replayssm.bench.phases import StepOfFlushes, StepWithoutFlush
from trtllm_replayssm.bench.prefill import ReplayPrefill
from trtllm_replayssm.bench.recurrences import recurrence_of
from trtllm_replayssm.bench.shapes import Family
from trtllm_replayssm.bench.with_convolution import StepAfterConvolution, StepWithConvolution
from trtllm_replayssm.bench.workloads import CausalConv1dStep, ReplayStep
from trtllm_replayssm.errors import NumericsError
from trtllm_replayssm.plugins import layouts
from trtllm_replayssm.plugins.launch import MAMBA2_SLOTS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**19)


SMALL: dict[Family, str] = {"mamba2": "4x16x32x2", "gdn": "2x4x32x32"}
INPUTS: dict[Family, tuple[str, ...]] = {"mamba2": ("x", "dt", "B", "C"), "gdn": ("q", "k", "v", "a", "b")}
every_family = pytest.mark.parametrize("family", SMALL)


def make_case(
    family: Family = "mamba2", state_dtype: str = "float32", max_draft_len: int = 0, batch_size: int = 6
) -> KernelCase:
    (case,) = make_cases([SMALL[family]], [batch_size], [state_dtype], [max_draft_len], history=8, family=family)
    return case


@every_family
@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("max_draft_len", "batch_size"), [(0, 1), (0, 6), (3, 1), (3, 6)])
def test_the_gate_passes_what_is_right(family: Family, state_dtype: str, max_draft_len: int, batch_size: int) -> None:
    step = ReplayStep(make_case(family, state_dtype, max_draft_len, batch_size), CPU)
    assert 0 < step.check() <= OUTPUT_BOUND


@every_family
@pytest.mark.parametrize("max_draft_len", [0, 3, 7])
def test_a_phase_has_flushes_everywhere_or_nowhere_and_the_bytes_of_it(family: Family, max_draft_len: int) -> None:
    case = make_case(family, max_draft_len=max_draft_len)
    plain, flushing = (make(case, CPU) for make in (StepWithoutFlush, StepOfFlushes))
    assert (plain.flush_fraction, flushing.flush_fraction) == (0.0, 1.0)
    assert plain.traffic.state_written == 0.0 and flushing.traffic.state_written == plain.traffic.state_read
    # Evenly 0 .. W - T, and W - T + 1 .. W.
    counts = (range(8 - max_draft_len), range(8 - max_draft_len, 9))
    for step, pending in zip((plain, flushing), counts, strict=True):
        assert step.mean_pending is not None
        assert step.mean_pending == pytest.approx(sum(pending) / len(pending), abs=0.5)
        assert 0 < step.check() <= OUTPUT_BOUND
    assert plain.implementation.endswith(", no row flushes") and flushing.implementation.endswith(", all rows flush")


@every_family
@pytest.mark.parametrize("fault", ["output", "checkpoint", "nan"])
def test_the_gate_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch, family: Family, fault: str) -> None:
    def wrong(history: int, max_draft_len: int, **tensors: Tensor) -> Tensor:
        y = right(**tensors, history=history, max_draft_len=max_draft_len)
        if y.dtype == torch.bfloat16:  # the device's turn, not that of the reference
            if fault == "checkpoint":
                tensors["ssm_state"][:, 1] *= 1.01
            else:
                y[-1, 0, 2, 3] = torch.nan if fault == "nan" else y[-1, 0].abs().max() * 1.02
        return y

    case = make_case(family)
    step, recurrence = ReplayStep(case, CPU), recurrence_of(case.geometry)
    right: Callable[..., Tensor] = recurrence.op
    monkeypatch.setattr(ops, recurrence.name, wrong)
    with pytest.raises(NumericsError, match="checkpoint" if fault == "checkpoint" else "output"):
        step.check()


@every_family
def test_launches_rotate_over_disjoint_slots_and_all_memory_that_kernels_can_read(family: Family) -> None:
    case = make_case(family, max_draft_len=3)
    step, recurrence, inputs = ReplayStep(case, CPU), recurrence_of(case.geometry), INPUTS[family]
    assert step.num_sets > 2
    slots, addresses = set(), set()
    for index in range(step.num_sets):
        tensors = step._tensors(0, index)
        assert set(tensors) == set(recurrence.io.inputs)
        layouts.check(recurrence.name, tensors, strided=inputs, slots=dict.fromkeys(recurrence.pool_names[:-1], 16))
        slots |= set(tensors["slot_ids"].tolist())
        addresses |= {tensors[name].data_ptr() for name in inputs}
    assert slots == set(range(6 * step.num_sets))
    assert len(addresses) == len(inputs) * step.num_sets
    assert not any(step._tensors(0, 0)[name].is_contiguous() for name in inputs)


@every_family
def test_every_step_of_every_set_is_launched_once(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    case = make_case(family)
    step = ReplayStep(case, CPU)
    lengths = []

    def launched(tensors: dict[str, Tensor], *, history: int, max_draft_len: int) -> Tensor:
        pending = tensors["past_lengths"] - tensors["checkpoint_lengths"]
        lengths.append((tensors["slot_ids"][0].item(), pending.tolist()))
        assert (history, max_draft_len) == (8, 0)
        return tensors["slot_ids"]

    monkeypatch.setattr(f"trtllm_replayssm.plugins.launch.{recurrence_of(case.geometry).name}", launched)
    kernels._launch_all(step, step.num_steps)
    assert len(lengths) == step.num_sets * step.num_steps
    assert [slot for slot, _ in lengths[: step.num_sets]] == [6 * index for index in range(step.num_sets)]
    of_first_row = [pending[0] for slot, pending in lengths if slot == 0]
    assert of_first_row == list(range(1, 9)), "a whole flush cycle"


@every_family
@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_the_gate_of_the_convolution(family: Family, max_draft_len: int) -> None:
    step = CausalConv1dStep(make_case(family, max_draft_len=max_draft_len), CPU)
    assert 0 < step.check() <= OUTPUT_BOUND
    tensors = step._tensors(step.num_steps - 1, step.num_sets - 1)
    layouts.check("ops.causal_conv1d", tensors, strided=("x",), slots={"conv_ring": 16})
    assert step.num_sets * step.num_steps >= 256


@pytest.mark.parametrize("make", [StepWithConvolution, StepAfterConvolution])
@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_the_gate_of_a_step_with_its_convolution(make: type[StepWithConvolution], max_draft_len: int) -> None:
    case = make_case(max_draft_len=max_draft_len)
    step, alone = make(case, CPU), ReplayStep(case, CPU)
    assert 0 < step.check() <= ROUNDED_BOUND
    tensors = step._tensors(step.num_steps - 1, step.num_sets - 1)
    layouts.check("ops.mamba2_with_conv", tensors, strided=("xBC", "dt"), slots={"conv_ring": 16} | MAMBA2_SLOTS)
    row = 2 * case.geometry.conv_dim
    more = (
        6 * (3 + 1 + max_draft_len) * row + (4 + 1) * row
    )  # the convolution's history, its appended rows, its weights
    assert step.traffic.total - alone.traffic.total == pytest.approx(more)


@every_family
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_gate_of_our_prefill(family: Family, state_dtype: str) -> None:
    (case,) = make_prefill_cases([SMALL[family]], [2], [state_dtype], 80, history=8, family=family)
    prefill = ReplayPrefill(case, CPU)
    assert 0 < prefill.check() <= OUTPUT_BOUND
    assert prefill.launch(0, 0).shape == (2, 80, *recurrence_of(case.geometry).output)
    right = prefill.final_states
    prefill.final_states = lambda index: 1.1 * right(index)  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="last state of prefill"):
        prefill.check()


@pytest.mark.parametrize(
    ("family", "conv_width", "conv_offsets", "projection_width", "projection_offsets"),
    [
        # z 64 | x 64 | B 64 | C 64 | dt 4
        ("mamba2", 192, {"x": 0, "B": 64, "C": 128}, 260, {"conv": 64, "dt": 256}),
        # q 64 | k 64 | v 128 | z 128 | b 4 | a 4
        ("gdn", 256, {"q": 0, "k": 64, "v": 128}, 392, {"conv": 0, "b": 384, "a": 388}),
    ],
)
def test_inputs_lie_where_a_model_has_them(
    family: Family,
    conv_width: int,
    conv_offsets: dict[str, int],
    projection_width: int,
    projection_offsets: dict[str, int],
) -> None:
    recurrence = recurrence_of(make_case(family).geometry)
    convolved, projected = torch.empty(1, 1, conv_width), torch.empty(1, 1, projection_width)
    inputs = recurrence.inputs(convolved, projected)
    conv_input = recurrence.conv_input(projected)
    assert {name: inputs[name].storage_offset() for name in conv_offsets} == conv_offsets
    placed = {**inputs, "conv": conv_input}
    assert {name: placed[name].storage_offset() for name in projection_offsets} == projection_offsets
    assert conv_input.size(-1) == conv_width
    assert sum(inputs[name].numel() for name in conv_offsets) == conv_width


def test_errors_are_relative_to_the_largest_magnitude_along_the_first_axis() -> None:
    expected = torch.tensor([[4.0, 0.0], [100.0, 1.0]])
    assert relative_error(expected + torch.tensor([[0.0, 0.4], [0.0, 0.4]]), expected) == pytest.approx(0.1)
    assert relative_error(torch.full((2, 2), torch.nan), expected) == float("inf")
    with pytest.raises(NumericsError, match="found an error of inf against the CPU; needed at most 0.004"):
        require("x", float("inf"))
