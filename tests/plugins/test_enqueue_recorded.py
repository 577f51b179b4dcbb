"""What enqueue asks of the driver, seen by a recording driver: launches, modules, copies, and errors in words.

Of plugins that launch one kernel for a call; ``test_enqueue_with_conv.py`` has the other one.
"""

import ctypes
import math
from dataclasses import replace

import pytest

from tests.harness.plugin_harness import Harness, HarnessPlugin, PluginRefusedError, shapes_of
from tests.harness.recorded_run import NUM_MULTIPROCESSORS, Call, Launch, run
from tests.plugins.plugin_calls import INTS, right_tensors
from tests.plugins.plugin_networks import placeholder_image, specialization_of
from tests.plugins.recorded_calls import PARAMS, addresses_of, call_of, entry, image_of, require_quiet, scenario
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2, PLUGINS, PluginIO
from trtllm_replayssm.plugins import kernel_image

every_plugin = pytest.mark.parametrize("io", PLUGINS, ids=lambda io: io.op_type)
of_one_kernel = pytest.mark.parametrize("io", [CAUSAL_CONV1D, MAMBA2, GATED_DELTA_NET], ids=lambda io: io.op_type)


def strides_of(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def expected_params(io: PluginIO, call: Call, counter: int | None) -> ctypes.Structure:
    """Fill the struct by its fields' names: ``x_stride_token`` is the stride of x along its second axis."""
    axes = {"batch": 0, "slot": 0, "token": 1, "head": 2, "group": 2}
    shapes = {name: shape for name, (shape, _) in call.tensors.items()}
    addresses = dict(zip(io.inputs, call.addresses, strict=False)) | {io.outputs[0]: call.addresses[len(io.inputs)]}
    for k, source in io.aliases.items():
        addresses[io.inputs[source]] = call.addresses[len(io.inputs) + k]
    num_rows, seq_len = shapes[io.inputs[0]][:2]
    numbers = {
        "seq_len": seq_len,
        "ring_rows": next(shapes[name][1] for name in io.inputs if name.endswith("_ring")),
        "num_rows": num_rows,
        "num_slots": shapes["ssm_state"][0] if "ssm_state" in shapes else None,
        "activation": INTS[io.op_type].get("activation"),
    }
    params = PARAMS[io.op_type]()
    value: int | None
    for name, ctype in PARAMS[io.op_type]._fields_:  # type: ignore[misc]
        if name == "num_taken":
            value = counter
        elif ctype is ctypes.c_void_p:
            value = addresses[name]
        elif "_stride_" in name:
            tensor, _, axis = name.rpartition("_stride_")
            value = strides_of(shapes[tensor])[axes[axis]]
        else:
            value = numbers[name]
        setattr(params, name, value)
    return params


def fields_of(params: ctypes.Structure) -> dict[str, int | None]:
    return {name: getattr(params, name) for name, *_ in params._fields_}


def require_params(io: PluginIO, launch: Launch, call: Call, counter: int | None = None) -> None:
    found = PARAMS[io.op_type].from_buffer_copy(launch.argument)
    assert fields_of(found) == fields_of(expected_params(io, call, counter))


@of_one_kernel
def test_steps_and_prefills_launch_their_kernel_with_packed_params(io: PluginIO) -> None:
    calls = [call_of(io, 2, 1), call_of(io, 3, 4, stream=0x77), call_of(io, 1, 33)]
    recording = run(scenario(io, *calls))
    require_quiet(recording)
    launches = recording.launches()
    assert [(launch.grid, launch.block, launch.stream) for launch in launches] == [
        ((11, 2, 1), (160, 1, 1), 0),
        ((11, 3, 1), (160, 1, 1), 0x77),
        ((7, 1, 1), (64, 1, 1), 0),
    ]
    for launch, call in zip(launches, calls, strict=True):
        require_params(io, launch, call)


@pytest.mark.parametrize(
    ("io", "longest"),
    [(CAUSAL_CONV1D, 8), (MAMBA2, 4), (GATED_DELTA_NET, 4)],
    ids=["conv", "mamba2", "gated_delta_net"],
)
def test_the_longest_step_window_is_the_last_before_prefill(io: PluginIO, longest: int) -> None:
    recording = run(scenario(io, call_of(io, 2, longest), call_of(io, 2, longest + 1)))
    assert [launch.grid[0] for launch in recording.launches()] == [11, 7]


@of_one_kernel
def test_attachment_loads_all_kernels_so_that_launches_can_be_captured(io: PluginIO) -> None:
    recording = run(scenario(io, call_of(io), call_of(io)))
    names = [name for name, _ in recording.driver_calls]
    assert names.count("cuModuleLoadData") == 1, "both entries share the cubin"
    assert recording.named("cuModuleGetFunction") == ["symbol_step", "symbol_prefill"]
    first_launch = names.index("cuLaunchKernelEx")
    assert set(names[first_launch:]) == {"cuLaunchKernelEx"}


@of_one_kernel
def test_without_attachment_the_first_enqueue_loads_what_it_needs(io: PluginIO) -> None:
    recording = run(scenario(io, call_of(io, 2, 1), call_of(io, 2, 2), attach=False))
    require_quiet(recording)
    assert recording.named("cuModuleGetFunction") == ["symbol_step"]
    assert len(recording.launches()) == 2


@every_plugin
def test_nothing_is_launched_for_an_empty_step(io: PluginIO) -> None:
    recording = run(scenario(io, call_of(io, 0, 4), call_of(io, 2, 0)))
    require_quiet(recording)
    assert recording.launches() == []


@every_plugin
def test_more_rows_than_a_grid_holds_are_refused(io: PluginIO) -> None:
    recording = run(scenario(io, call_of(io, 65535, 1), call_of(io, 65536, 1)))
    assert recording.refusals[0] is None
    assert recording.refusals[1] is not None
    assert "found 65536 rows; needed at most 65535" in recording.refusals[1]
    assert {launch.grid[1] for launch in recording.launches()} == {65535}


@of_one_kernel
def test_much_shared_memory_is_asked_for_before_the_launch(io: PluginIO) -> None:
    image = image_of(io, entry("step", dynamic_shared_bytes=49153), entry("prefill", dynamic_shared_bytes=49152))
    recording = run(scenario(io, call_of(io, 2, 1), call_of(io, 2, 40), image=image))
    require_quiet(recording)
    assert recording.named("cuFuncSetAttribute") == ["8 49153"]
    assert [launch.shared_bytes for launch in recording.launches()] == [49153, 49152]


@of_one_kernel
@pytest.mark.parametrize(
    ("device", "chosen"), [(90, "exact"), (86, "sm86"), (89, "sm86"), (80, "sm80"), (120, None), (75, None)]
)
def test_the_kernel_for_the_device_is_chosen(io: PluginIO, device: int, chosen: str | None) -> None:
    def both(capability: int, is_exact: bool, symbol: str) -> list[kernel_image.KernelEntry]:
        changes = {"compute_capability": capability, "is_exact": is_exact, "symbol": symbol, "cubin": symbol.encode()}
        return [entry(role, **changes) for role in ("step", "prefill")]

    entries = [*both(80, False, "sm80"), *both(86, False, "sm86"), *both(90, False, "sm90"), *both(90, True, "exact")]
    recording = run(scenario(io, call_of(io), image=image_of(io, *entries), compute_capability=device))
    if chosen is not None:
        require_quiet(recording)
        assert recording.named("cuModuleGetFunction") == [chosen, chosen]
        assert recording.named("cuModuleLoadData") == [chosen]
        return
    reason = f"kernel for compute capability {device // 10}.{device % 10}; the engine carries 8.0, 8.6, 9.0"
    assert recording.attach_refusal is not None and reason in recording.attach_refusal
    assert recording.refusals[0] is not None and reason in recording.refusals[0]
    assert recording.launches() == []


def pipelined(**changes: object) -> kernel_image.KernelEntry:
    return entry("pipelined_step", grid_x=8, block_x=416, is_persistent=True, is_exact=True, **changes)


@pytest.mark.parametrize("io", [MAMBA2, GATED_DELTA_NET], ids=lambda io: io.op_type)
def test_a_persistent_kernel_gets_no_more_blocks_than_multiprocessors_or_work(io: PluginIO) -> None:
    image = image_of(io, entry("step"), entry("prefill"), pipelined())
    calls = [call_of(io, 2, 1), call_of(io, 3, 4), call_of(io, 65535, 1), call_of(io, 2, 5)]
    recording = run(scenario(io, *calls, image=image))
    require_quiet(recording)
    launches = recording.launches()
    assert [(launch.grid, launch.block[0]) for launch in launches] == [
        ((16, 1, 1), 416),
        ((NUM_MULTIPROCESSORS, 1, 1), 416),
        ((NUM_MULTIPROCESSORS, 1, 1), 416),
        ((11, 2, 1), 160),
    ]
    (allocation,) = recording.named("cuMemAlloc")
    num_bytes, counter = allocation.split()
    assert num_bytes == "4"
    assert recording.named("cuMemsetD32") == [f"{counter} 0 1"]
    for launch, call in zip(launches, calls, strict=True):
        require_params(io, launch, call, int(counter))


@pytest.mark.parametrize("attach", [True, False])
def test_a_counter_is_there_before_a_launch_may_be_captured(attach: bool) -> None:
    """Attached plugins have it from then on, one that is not attached with the first launch; any stream may read it."""
    image = image_of(MAMBA2, entry("step"), entry("prefill"), pipelined())
    recording = run(scenario(MAMBA2, call_of(MAMBA2), call_of(MAMBA2), image=image, attach=attach))
    require_quiet(recording)
    names = [name for name, _ in recording.driver_calls if name.startswith(("cuMem", "cuStream", "cuLaunch"))]
    assert names == ["cuMemAlloc", "cuMemsetD32", "cuStreamSynchronize", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    assert recording.named("cuStreamSynchronize") == ["0"]


def test_plugins_without_persistent_kernels_have_no_counter() -> None:
    recording = run(scenario(MAMBA2, call_of(MAMBA2)))
    require_quiet(recording)
    assert recording.named("cuMemAlloc") == []


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemsetD32", "cuStreamSynchronize"])
@pytest.mark.parametrize("attach", [True, False])
def test_a_counter_that_cannot_be_made_is_named(call: str, attach: bool) -> None:
    image = image_of(MAMBA2, entry("step"), entry("prefill"), pipelined())
    recording = run(scenario(MAMBA2, call_of(MAMBA2), image=image, failing_call=call, attach=attach))
    refusal = recording.attach_refusal if attach else recording.refusals[0]
    assert refusal is not None and f"{call}: CUDA_ERROR_INVALID_VALUE" in refusal
    assert len(recording.named("cuMemFree")) == len(recording.named("cuMemsetD32"))
    if not attach:
        assert recording.launches() == []


IN_PIECES = [(MAMBA2, name) for name in ("x", "B", "C", "ssm_state", "x_ring", "B_ring")]
IN_PIECES += [(GATED_DELTA_NET, name) for name in ("q", "k", "v", "ssm_state", "k_ring", "u_ring")]


@pytest.mark.parametrize(("io", "name"), IN_PIECES)
def test_a_tensor_that_is_not_in_16_byte_pieces_takes_the_generic_step(io: PluginIO, name: str) -> None:
    image = image_of(io, entry("step"), entry("prefill"), pipelined())
    call = call_of(io, 2, 1)
    names = [*io.inputs, *io.outputs]
    moved = [address + 8 * (names[k] == name) for k, address in enumerate(call.addresses)]
    recording = run(scenario(io, replace(call, addresses=moved), image=image))
    require_quiet(recording)
    assert [launch.grid for launch in recording.launches()] == [(11, 2, 1)]


@of_one_kernel
@pytest.mark.parametrize(("device", "attributes"), [(90, "6=1,"), (100, "6=1,"), (120, "6=1,"), (89, "")])
def test_a_kernel_that_waits_by_itself_is_launched_before_the_one_before_it_has_finished(
    io: PluginIO, device: int, attributes: str
) -> None:
    changes = {"compute_capability": device, "is_dependent_launch": True}
    image = image_of(io, entry("step", **changes), entry("prefill", **changes | {"is_dependent_launch": False}))
    recording = run(scenario(io, call_of(io, 2, 1), call_of(io, 2, 40), image=image, compute_capability=device))
    require_quiet(recording)
    assert [launch.attributes for launch in recording.launches()] == [attributes, ""]


@of_one_kernel
def test_blocks_of_several_rows_make_a_smaller_grid(io: PluginIO) -> None:
    image = image_of(io, entry("step", rows_per_block=4), entry("prefill", grid_x=7))
    recording = run(scenario(io, *(call_of(io, rows, 1) for rows in (1, 4, 5)), call_of(io, 5, 40), image=image))
    require_quiet(recording)
    assert [launch.grid for launch in recording.launches()] == [(11, 1, 1), (11, 1, 1), (11, 2, 1), (7, 5, 1)]


def test_the_convolution_of_one_token_has_its_own_kernel_where_the_image_has_one() -> None:
    one = entry("one_token_step", grid_x=5, block_x=64, rows_per_block=2)
    calls = [call_of(CAUSAL_CONV1D, 3, 1), call_of(CAUSAL_CONV1D, 3, 2), call_of(CAUSAL_CONV1D, 3, 9)]
    for image, first in (
        (image_of(CAUSAL_CONV1D, entry("step"), entry("prefill", grid_x=7), one), (5, 2, 1)),
        (image_of(CAUSAL_CONV1D, entry("step"), entry("prefill", grid_x=7)), (11, 3, 1)),
    ):
        recording = run(scenario(CAUSAL_CONV1D, *calls, image=image))
        require_quiet(recording)
        assert [launch.grid for launch in recording.launches()] == [first, (11, 3, 1), (7, 3, 1)]


def test_a_device_without_a_pipelined_step_takes_the_generic_one() -> None:
    others = [entry(role, compute_capability=80, symbol=f"sm80_{role}") for role in ("step", "prefill")]
    image = image_of(MAMBA2, entry("step"), entry("prefill"), pipelined(), *others)
    recording = run(scenario(MAMBA2, call_of(MAMBA2, 2, 1), image=image, compute_capability=86))
    require_quiet(recording)
    assert recording.named("cuModuleGetFunction") == ["sm80_step", "sm80_prefill"]
    assert [launch.grid for launch in recording.launches()] == [(11, 2, 1)]


@every_plugin
def test_a_builder_may_have_a_gpu_that_the_engine_is_not_for(io: PluginIO) -> None:
    recording = run(scenario(io, compute_capability=120, deserialize=False))
    assert recording.attach_refusal is None
    assert recording.driver_calls == []


@of_one_kernel
def test_a_state_at_another_address_is_copied_first_and_warned_about_once(io: PluginIO) -> None:
    name = io.outputs[1]
    calls = [call_of(io, 2, 1, stream=5, move=(name,)), call_of(io, 2, 1, move=(name,))]
    recording = run(scenario(io, *calls))
    assert set(recording.refusals) == {None}
    source, destination = calls[0].addresses[io.aliases[1]], calls[0].addresses[len(io.inputs) + 1]
    shape, dtype = calls[0].tensors[io.inputs[io.aliases[1]]]
    size = math.prod(shape) * {"float32": 4, "bfloat16": 2}[dtype]
    assert recording.named("cuMemcpyDtoDAsync") == [f"{destination} {source} {size} {s}" for s in (5, 0)]
    assert recording.messages.count("has another address than its input") == 1
    assert recording.messages.startswith(f'warning: [trtllm_replayssm] {io.op_type} "layer": output {name}')
    order = [n for n, _ in recording.driver_calls if n in ("cuMemcpyDtoDAsync", "cuLaunchKernelEx")]
    assert order == ["cuMemcpyDtoDAsync", "cuLaunchKernelEx"] * 2
    for launch, call in zip(recording.launches(), calls, strict=True):
        require_params(io, launch, call)


@of_one_kernel
@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("cuInit", "cuInit: CUDA_ERROR_INVALID_VALUE"),
        ("cuModuleLoadData", "cuModuleLoadData: CUDA_ERROR_INVALID_VALUE for the step kernel of 9.0"),
        ("cuModuleGetFunction", "cuModuleGetFunction: CUDA_ERROR_INVALID_VALUE for the symbol symbol_step"),
        ("cuFuncSetAttribute", "cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE for 50000 bytes of shared memory"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"),
        ("cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_driver_error_is_named_and_returned(io: PluginIO, call: str, named: str) -> None:
    image = image_of(io, *(entry(role, dynamic_shared_bytes=50000) for role in ("step", "prefill")))
    order = scenario(io, call_of(io, 2, 1, move=io.outputs[1:]), image=image, failing_call=call, attach=False)
    refusal = run(order).refusals[0]
    assert refusal is not None
    assert f'error: [trtllm_replayssm] {io.op_type} "layer": {named}' in refusal


@every_plugin
def test_without_a_driver_enqueue_says_so(harness: Harness, io: PluginIO) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    plugin = (
        HarnessPlugin.of(harness, io, INTS[io.op_type], placeholder_image(specialization_of(io)))
        .deserialized()
        .attached()
    )
    inputs, outputs = shapes_of(io, right_tensors(io))
    with pytest.raises(PluginRefusedError, match=r"libcuda\.so\.1: .*; needed NVIDIA's driver"):
        plugin.enqueue(inputs, outputs, addresses_of(io))
