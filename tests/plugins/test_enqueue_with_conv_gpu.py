"""ReplayMamba2WithConv on a GPU, driven through TensorRT's interfaces: the bits of the two ops, by which kernels."""

from dataclasses import replace

import pytest
import torch

from tests.cases import ALL_CASES, Mamba2Case
from tests.harness.plugin_harness import Harness, PluginRefusedError
from tests.ops.driver import Row, bits, drive
from tests.plugins.plugin_ops import device_image, mamba2_specialization
from tests.plugins.with_conv_driver import WithConvDriver, specialization_with_conv
from trtllm_replayssm import ops
from trtllm_replayssm.plugins import kernel_image, loader
from trtllm_replayssm.plugins.specializations import CONV_PREFIX, PIPELINE_ARCHITECTURES

pytestmark = pytest.mark.gpu

# dt in the activation type, as TensorRT gives it to a plugin.
CASES = {case.name: replace(case, dt="") for case in ALL_CASES if isinstance(case, Mamba2Case)}
OF_TWO_LAUNCHES = ("N256-T2-W8", "W1-fp32", "state_fp16")
DRIVEN = [case for case in CASES.values() if mamba2_specialization(case).pipeline or case.name in OF_TWO_LAUNCHES]


def driver_of(
    harness: Harness, case: Mamba2Case, d_conv: int = 4, image: bytes | None = None, **options: int
) -> WithConvDriver:
    image = image or device_image(specialization_with_conv(case, d_conv))
    return WithConvDriver(harness, case, d_conv, image, "cuda", (ops.causal_conv1d, ops.mamba2), **options)


def image_of_one_launch(case: Mamba2Case) -> bytes:
    """Return an image without the convolution's steps, so that a step in two launches is refused."""
    if loader.device_architecture(torch.cuda.current_device()) not in PIPELINE_ARCHITECTURES:
        pytest.skip("this device has no step that convolves")
    constants, entries = kernel_image.unpack(device_image(specialization_with_conv(case, 4)))
    steps = {CONV_PREFIX + role for role in ("step", "one_token_step")}
    return kernel_image.pack(constants, [entry for entry in entries if entry.role not in steps])


@pytest.mark.parametrize("case", DRIVEN, ids=lambda case: case.name)
def test_windows_flushes_rejections_and_prefills_have_the_bits_of_the_two_ops(
    harness: Harness, case: Mamba2Case
) -> None:
    driver = driver_of(harness, case, num_slots=3, seed=5)
    drive(driver, 40)
    assert driver.flushes > 0
    assert harness.messages() == ""


@pytest.mark.parametrize("name", ["nemotron_h-T5", "state_fp16"])
def test_a_long_prompt_then_decode_have_the_bits_of_the_two_ops(harness: Harness, name: str) -> None:
    case = CASES[name]
    driver = driver_of(harness, case, num_slots=2, seed=8)
    driver.run([Row(1, 200, 200), Row(-1, 0, 0), Row(0, 131, 131)], 200)
    for _ in range(case.history // case.window + 3):
        driver.run([Row(0, case.window, case.window), Row(1, case.window, 1)], case.window)


def test_other_taps_have_the_bits_of_the_two_ops(harness: Harness) -> None:
    drive(driver_of(harness, CASES["nemotron_3-T4"], d_conv=3, num_slots=3), 20)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [1, 4])
def test_a_step_is_one_launch_where_that_is_faster(harness: Harness, window: int, state: str) -> None:
    case = Mamba2Case("many", 32, 64, 128, 4, 16, window - 1, state=state)
    num_slots = 40  # of 32 heads each: more chunks than a GPU takes in one launch with windows of four
    driver = driver_of(harness, case, image=image_of_one_launch(case), num_slots=num_slots, seed=2)
    driver.run([Row(slot, 40, 40) for slot in range(3)], 40)
    for _ in range(16 // window + 2):
        driver.run([Row(0, window, window), Row(-1, window, 0), Row(2, window, 1), Row(1, 0, 0)], window)
    everyone = [Row(slot, window, window) for slot in range(num_slots)]
    if window == 1:
        driver.run(everyone, 1)
    else:
        with pytest.raises(PluginRefusedError, match="no conv_step kernel"):
            driver.run(everyone, window)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("is_one_launch", [True, False], ids=["one_launch", "two_launches"])
def test_a_captured_step_equals_the_eager_one(harness: Harness, window: int, is_one_launch: bool) -> None:
    # Without taps for the step that convolves there are two launches.
    d_conv = 4 if is_one_launch else 3
    case = Mamba2Case("captured", 16, 64, 128, 2, 16, window - 1, state="bfloat16")
    image = image_of_one_launch(case) if is_one_launch else None
    eager, captured = (driver_of(harness, case, d_conv, image, seed=4) for _ in range(2))
    rows = [Row(slot, window, 1) for slot in (2, 0, 1)]
    static = captured.tensors(rows, captured.make_window([window] * 3, window))
    static |= {name: static[name].contiguous() for name in ("xBC", "dt")}
    graph = torch.cuda.CUDAGraph()
    # No warm-up: attaching to the context loaded the kernels.
    with torch.cuda.graph(graph):
        y = captured.op(static)
    for _ in range(case.history + 3):
        drawn = eager.make_window([window] * 3, window)
        for name, tensor in eager.tensors(rows, drawn).items():
            if name not in eager.pools:
                static[name].copy_(tensor)
        graph.replay()
        assert torch.equal(bits(eager.run(rows, window, drawn)), bits(y))
    for name, pool in eager.pools.items():
        assert torch.equal(bits(pool), bits(captured.pools[name]))
