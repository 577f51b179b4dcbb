"""The plugins on a GPU, driven through TensorRT's interfaces, against the oracle and against the ops on the CPU."""

import pytest
import torch

from tests.cases import DEVICE_CASES, Mamba2Case
from tests.harness.plugin_harness import Harness
from tests.ops.driver import Row, bits, drive
from tests.plugins.plugin_ops import ConvolutionPair, PluginMamba2Driver, device_image, mamba2_specialization
from trtllm_replayssm.contract.geometry import ActivationDtype
from trtllm_replayssm.plugins.specialize import CausalConv1dSpecialization

pytestmark = pytest.mark.gpu

# TensorRT gives the plugin dt in the activation type.
CASES = [case for case in DEVICE_CASES if not case.dt]
VERIFY = next(case for case in CASES if case.max_draft_len == 3)


def driver_of(harness: Harness, case: Mamba2Case, **options: int) -> PluginMamba2Driver:
    return PluginMamba2Driver(harness, case, device_image(mamba2_specialization(case)), "cuda", **options)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize("accept", ["random", "all", "none"])
def test_decode_windows_flushes_rejections_and_prefill_follow_the_recurrence(
    harness: Harness, case: Mamba2Case, accept: str
) -> None:
    driver = driver_of(harness, case, num_slots=3, seed=5)
    drive(driver, 60, accept=accept)
    assert driver.flushes > 0
    assert harness.messages() == ""


@every_case
def test_a_long_prompt_then_decode_follow_the_recurrence(harness: Harness, case: Mamba2Case) -> None:
    driver = driver_of(harness, case, num_slots=2, seed=8)
    driver.run([Row(1, 200, 200), Row(-1, 0, 0), Row(0, 131, 131)], 200)
    for _ in range(2 * case.history + 3):
        driver.run([Row(0, case.window, case.window), Row(1, case.window, 1)], case.window)
    driver.assert_within_bounds()


def test_padding_rows_alone_change_nothing(harness: Harness) -> None:
    driver = driver_of(harness, VERIFY, seed=1)
    before = {name: bits(pool) for name, pool in driver.pools.items()}
    y = driver.run([Row(-1, 2, 0), Row(-1, 0, 0)], VERIFY.window)
    assert (bits(y) == 0).all()
    assert all(torch.equal(bits(pool), before[name]) for name, pool in driver.pools.items())


def test_equal_calls_give_equal_bits(harness: Harness) -> None:
    results = []
    for _ in range(3):
        driver = driver_of(harness, VERIFY, seed=3)
        drive(driver, 20)
        results.append({name: bits(pool) for name, pool in driver.pools.items()})
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_a_captured_step_equals_the_eager_one(harness: Harness) -> None:
    eager, captured = (driver_of(harness, VERIFY, seed=4) for _ in range(2))
    rows = [Row(slot, VERIFY.window, 1) for slot in (2, 0, 1)]
    window = eager.make_window([row.num_tokens for row in rows], VERIFY.window)
    static = captured.tensors(rows, window)
    static |= {name: static[name].contiguous() for name in ("x", "dt", "B", "C")}
    graph = torch.cuda.CUDAGraph()
    # No warm-up: attaching to the context loaded the kernels.
    with torch.cuda.graph(graph):
        y = captured.op(static)
    for _ in range(2 * VERIFY.history):
        window = eager.make_window([row.num_tokens for row in rows], VERIFY.window)
        for name, tensor in eager.tensors(rows, window).items():
            if name not in eager.pools:
                static[name].copy_(tensor)
        graph.replay()
        assert torch.equal(bits(eager.run(rows, VERIFY.window, window)), bits(y))
    for name, pool in eager.pools.items():
        assert torch.equal(bits(pool), bits(captured.pools[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize(("channels", "d_conv", "window"), [(256, 4, 4), (10, 2, 1), (1280, 4, 8)])
def test_the_convolution_follows_the_op_on_the_cpu(
    harness: Harness, channels: int, d_conv: int, window: int, silu: bool, dtype: ActivationDtype
) -> None:
    specialization = CausalConv1dSpecialization(channels, d_conv, dtype)
    image = device_image(specialization)
    ConvolutionPair(harness, specialization, image, "cuda", window=window, silu=silu).drive(60)
    assert harness.messages() == ""
