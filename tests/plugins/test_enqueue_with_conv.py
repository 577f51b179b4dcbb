"""What enqueue of ReplayMamba2WithConv asks of the driver: one kernel or two, and which, with which arguments."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.recorded_run import NUM_MULTIPROCESSORS, Call, Launch, Recording, run
from tests.plugins.recorded_calls import call_of, entry, image_of, require_quiet, scenario
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, MAMBA2, MAMBA2_WITH_CONV
from trtllm_replayssm.plugins.kernel_image import KernelEntry
from trtllm_replayssm.plugins.layouts import split_projection
from trtllm_replayssm.plugins.params import (
    CausalConv1dParams,
    Mamba2Params,
    Mamba2WithConvParams,
    causal_conv1d_params,
    mamba2_params,
    mamba2_with_conv_params,
)

CONV_GRID, STEP_GRID, PREFILL_GRID, BOTH_GRID = 3, 11, 7, 4
GENERIC = (
    entry("conv_step", grid_x=CONV_GRID),
    entry("conv_prefill", grid_x=CONV_GRID + 10),
    entry("step", grid_x=STEP_GRID),
    entry("prefill", grid_x=PREFILL_GRID),
)


def both(**changes: object) -> KernelEntry:
    shape = {"grid_x": BOTH_GRID, "block_x": 512, "is_persistent": True, "is_exact": True}
    return entry("step_with_conv", **shape | changes)


def enqueued(*calls: Call, entries: tuple[KernelEntry, ...] = GENERIC, **changes: object) -> Recording:
    image = image_of(MAMBA2_WITH_CONV, *entries)
    return run(scenario(MAMBA2_WITH_CONV, *calls, image=image, **changes))


def grids(recording: Recording) -> list[tuple[int, int]]:
    return [launch.grid[:2] for launch in recording.launches()]


class Tensors:
    """The tensors of one call in memory: their addresses and strides are what the arguments must have."""

    def __init__(self, batch: int, seq_len: int) -> None:
        described = call_of(MAMBA2_WITH_CONV, batch, seq_len).tensors
        self.named = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in described.items()
        }
        self.workspace = torch.empty_like(self.named["xBC"])
        self.y = torch.empty(batch, seq_len, *self.named["x_ring"].shape[2:], dtype=torch.bfloat16)
        addresses = [self.named[name].data_ptr() for name in MAMBA2_WITH_CONV.inputs]
        states = [addresses[source] for source in MAMBA2_WITH_CONV.aliases.values()]
        self.call = Call(described, [*addresses, self.y.data_ptr(), *states], workspace=self.workspace.data_ptr())

    def convolution(self) -> CausalConv1dParams:
        names = {"x": "xBC", "weight": "conv_weight", "bias": "conv_bias"}
        named = self.named | {name: self.named[ours] for name, ours in names.items()}
        return causal_conv1d_params(tuple(named[name] for name in CAUSAL_CONV1D.inputs), self.workspace, is_silu=True)

    def recurrence_inputs(self, channels: Tensor) -> tuple[Tensor, ...]:
        x, B, C = split_projection(channels, n_heads=4, head_dim=16, n_groups=2, d_state=32)
        return tuple((self.named | {"x": x, "B": B, "C": C})[name] for name in MAMBA2.inputs)

    def recurrence(self) -> Mamba2Params:
        return mamba2_params(self.recurrence_inputs(self.workspace), self.y, 0)

    def both(self, counter: int) -> Mamba2WithConvParams:
        convolution = (self.named["conv_weight"], self.named["conv_bias"], self.named["conv_ring"])
        return mamba2_with_conv_params(self.recurrence_inputs(self.named["xBC"]), convolution, self.y, counter)


def require_argument(launch: Launch, expected: ctypes.Structure) -> None:
    assert values_of(type(expected).from_buffer_copy(launch.argument)) == values_of(expected)


def values_of(params: ctypes.Structure) -> dict[str, object]:
    values = {name: getattr(params, name) for name, *_ in params._fields_}
    return {name: values_of(v) if isinstance(v, ctypes.Structure) else v for name, v in values.items()}


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [
        (2, [(CONV_GRID, 2), (STEP_GRID, 2)]),
        (4, [(CONV_GRID, 2), (STEP_GRID, 2)]),
        (5, [(CONV_GRID, 2), (PREFILL_GRID, 2)]),
        (8, [(CONV_GRID, 2), (PREFILL_GRID, 2)]),
        (9, [(CONV_GRID + 10, 2), (PREFILL_GRID, 2)]),
    ],
)
def test_without_a_kernel_for_both_they_run_in_turn_by_the_workspace(
    seq_len: int, expected: list[tuple[int, int]]
) -> None:
    tensors = Tensors(2, seq_len)
    recording = enqueued(replace(tensors.call, stream=0x77))
    require_quiet(recording)
    assert grids(recording) == expected
    convolution, recurrence = recording.launches()
    assert convolution.stream == recurrence.stream == 0x77
    require_argument(convolution, tensors.convolution())
    require_argument(recurrence, tensors.recurrence())


def test_each_of_the_two_runs_by_the_special_kernel_that_there_is_for_it() -> None:
    special = (
        entry("conv_one_token_step", grid_x=5, rows_per_block=2),
        entry("pipelined_step", grid_x=8, is_persistent=True),
    )
    calls = [call_of(MAMBA2_WITH_CONV, 2, seq_len) for seq_len in (1, 2, 5)]
    recording = enqueued(*calls, entries=(*GENERIC, *special))
    require_quiet(recording)
    assert grids(recording) == [(5, 1), (16, 1), (CONV_GRID, 2), (16, 1), (CONV_GRID, 2), (PREFILL_GRID, 2)]


@pytest.mark.parametrize("seq_len", [2, 4])
def test_a_step_is_one_launch_where_there_is_a_kernel_for_it(seq_len: int) -> None:
    tensors = Tensors(3, seq_len)
    recording = enqueued(replace(tensors.call, workspace=0), entries=(*GENERIC, both()))
    require_quiet(recording)
    (launch,) = recording.launches()
    assert (launch.grid, launch.block) == ((12, 1, 1), (512, 1, 1))
    (allocation,) = recording.named("cuMemAlloc")
    require_argument(launch, tensors.both(counter=int(allocation.split()[1])))


def test_a_prefill_is_two_launches_always() -> None:
    recording = enqueued(call_of(MAMBA2_WITH_CONV, 2, 5), entries=(*GENERIC, both()))
    require_quiet(recording)
    assert grids(recording) == [(CONV_GRID, 2), (PREFILL_GRID, 2)]


@pytest.mark.parametrize(("most", "longest"), [(4, NUM_MULTIPROCESSORS), (6, 30), (0, None)])
def test_many_rows_take_two_launches_where_these_are_faster(most: int, longest: int | None) -> None:
    rows = [1, 65535] if longest is None else [longest, longest + 1]
    calls = [call_of(MAMBA2_WITH_CONV, count, 4) for count in rows]
    recording = enqueued(*calls, entries=(*GENERIC, both(most_blocks_per_multiprocessor=most)))
    require_quiet(recording)
    first, *rest = grids(recording)
    assert first == (min(BOTH_GRID * rows[0], NUM_MULTIPROCESSORS), 1)
    both_again, in_turn = [(NUM_MULTIPROCESSORS, 1)], [(CONV_GRID, rows[1]), (STEP_GRID, rows[1])]
    assert rest == (both_again if longest is None else in_turn)


IN_PIECES = ("xBC", "conv_weight", "conv_bias", "conv_ring", "ssm_state", "x_ring", "B_ring")


@pytest.mark.parametrize("name", MAMBA2_WITH_CONV.inputs)
def test_a_tensor_that_is_not_in_16_byte_pieces_takes_two_launches(name: str) -> None:
    call = call_of(MAMBA2_WITH_CONV, 2, 1)
    names = [*MAMBA2_WITH_CONV.inputs, *MAMBA2_WITH_CONV.outputs]
    moved = [address + 8 * (names[k] == name) for k, address in enumerate(call.addresses)]
    pipelined = entry("pipelined_step", grid_x=8, is_persistent=True)
    recording = enqueued(replace(call, addresses=moved), entries=(*GENERIC, pipelined, both()))
    require_quiet(recording)
    recurrence = (STEP_GRID, 2) if name in ("ssm_state", "x_ring", "B_ring") else (16, 1)
    assert grids(recording) == ([(CONV_GRID, 2), recurrence] if name in IN_PIECES else [(8, 1)])


def test_a_workspace_that_is_not_in_16_byte_pieces_takes_the_generic_step() -> None:
    call = call_of(MAMBA2_WITH_CONV, 2, 1)
    pipelined = entry("pipelined_step", grid_x=8, is_persistent=True)
    recording = enqueued(replace(call, workspace=call.workspace + 8), entries=(*GENERIC, pipelined))
    assert grids(recording) == [(CONV_GRID, 2), (STEP_GRID, 2)]


def test_two_launches_without_a_workspace_are_refused_with_what_it_takes() -> None:
    recording = enqueued(replace(call_of(MAMBA2_WITH_CONV, 2, 4), workspace=0))
    (refusal,) = recording.refusals
    assert refusal is not None and f"found no workspace; needed {2 * 4 * 192 * 2} bytes" in refusal
    assert recording.launches() == []


def test_attachment_loads_all_kernels_of_the_device_so_that_launches_can_be_captured() -> None:
    calls = [call_of(MAMBA2_WITH_CONV, 2, seq_len) for seq_len in (1, 9)]
    recording = enqueued(*calls, entries=(*GENERIC, both()))
    roles = ("conv_step", "conv_prefill", "step", "prefill", "step_with_conv")
    assert recording.named("cuModuleGetFunction") == [f"symbol_{role}" for role in roles]
    names = [name for name, _ in recording.driver_calls]
    assert names.count("cuModuleLoadData") == 1, "the entries share the cubin"
    assert set(names[names.index("cuLaunchKernelEx") :]) == {"cuLaunchKernelEx"}


@pytest.mark.parametrize("attach", [True, False])
def test_a_device_without_the_kernel_for_both_runs_them_in_turn(attach: bool) -> None:
    of_80 = [replace(generic, compute_capability=80, symbol=f"sm80_{generic.role}") for generic in GENERIC]
    calls = [call_of(MAMBA2_WITH_CONV, 2, 4)] * 2
    recording = enqueued(*calls, entries=(*GENERIC, both(), *of_80), compute_capability=86, attach=attach)
    require_quiet(recording)
    assert grids(recording) == [(CONV_GRID, 2), (STEP_GRID, 2)] * 2
    roles = ("conv_step", "conv_prefill", "step", "prefill") if attach else ("conv_step", "step")
    assert recording.named("cuModuleGetFunction") == [f"sm80_{role}" for role in roles]


def test_a_device_without_any_kernel_is_refused_by_its_name() -> None:
    recording = enqueued(call_of(MAMBA2_WITH_CONV), compute_capability=120)
    reason = "no conv_step kernel for compute capability 12.0; the engine carries 9.0"
    assert recording.attach_refusal is not None and reason in recording.attach_refusal
    assert recording.refusals[0] is not None and reason in recording.refusals[0]
    assert recording.launches() == []


@pytest.mark.parametrize("name", MAMBA2_WITH_CONV.outputs[1:])
@pytest.mark.parametrize("entries", [GENERIC, (*GENERIC, both())], ids=["two_launches", "one_launch"])
def test_a_state_at_another_address_is_copied_before_all_launches_and_read_there(
    name: str, entries: tuple[KernelEntry, ...]
) -> None:
    call = call_of(MAMBA2_WITH_CONV, 2, 1, move=(name,))
    recording = enqueued(call, entries=entries)
    assert recording.messages.count("has another address than its input") == 1
    index = MAMBA2_WITH_CONV.outputs.index(name)
    source, destination = call.addresses[MAMBA2_WITH_CONV.aliases[index]], call.addresses[16 + index]
    (copy,) = recording.named("cuMemcpyDtoDAsync")
    assert copy.split()[:2] == [str(destination), str(source)]
    order = [n for n, _ in recording.driver_calls if n in ("cuMemcpyDtoDAsync", "cuLaunchKernelEx")]
    assert order == ["cuMemcpyDtoDAsync", *["cuLaunchKernelEx"] * (2 if entries is GENERIC else 1)]
    last = recording.launches()[-1].argument
    if entries is GENERIC:
        conv_ring = CausalConv1dParams.from_buffer_copy(recording.launches()[0].argument).conv_ring
        step = Mamba2Params.from_buffer_copy(last)
    else:
        params = Mamba2WithConvParams.from_buffer_copy(last)
        conv_ring, step = params.conv_ring, params.step
    found = conv_ring if name == "conv_ring" else getattr(step, name)
    assert found == destination


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("cuInit", "cuInit: CUDA_ERROR_INVALID_VALUE"),
        ("cuModuleLoadData", "cuModuleLoadData: CUDA_ERROR_INVALID_VALUE for the step_with_conv kernel of 9.0"),
        ("cuFuncSetAttribute", "cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE for 200000 bytes of shared memory"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_an_error_of_the_kernel_for_both_is_named_and_not_covered_by_two_launches(call: str, named: str) -> None:
    entries = (*GENERIC, both(dynamic_shared_bytes=200000))
    recording = enqueued(call_of(MAMBA2_WITH_CONV, 2, 1), entries=entries, failing_call=call, attach=False)
    (refusal,) = recording.refusals
    assert refusal is not None and f'error: [trtllm_replayssm] ReplayMamba2WithConv "layer": {named}' in refusal
    assert len(recording.launches()) == (call == "cuLaunchKernelEx")


def test_the_second_launch_is_not_tried_after_the_first_has_failed() -> None:
    recording = enqueued(call_of(MAMBA2_WITH_CONV, 2, 4), failing_call="cuLaunchKernelEx")
    assert recording.refusals[0] is not None and len(recording.launches()) == 1
