"""The plugins on a GPU, driven through TensorRT's interfaces, against the oracle and against the ops on the CPU."""

from dataclasses import replace

import pytest
import torch

from tests.cases import ALL_CASES, GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.harness.plugin_harness import Harness
from tests.ops.driver import Row, bits, drive
from tests.plugins.plugin_ops import (
    ConvolutionPair,
    PluginDriver,
    device_image,
    plugin_driver,
    specialization_of_case,
)
from trtllm_replayssm.contract.geometry import ActivationDtype
from trtllm_replayssm.plugins.specializations import CausalConv1dSpecialization

pytestmark = pytest.mark.gpu


def as_plugins_take_it(case: ReplayCase) -> ReplayCase:
    """Return the case with dt, or a and b, in the activation type, as TensorRT gives them to a plugin."""
    if isinstance(case, GatedDeltaNetCase):
        return replace(case, gate="")
    assert isinstance(case, Mamba2Case)
    return replace(case, dt="")


def driver_of(harness: Harness, case: ReplayCase, **options: int) -> PluginDriver:
    return plugin_driver(harness, case, device_image(specialization_of_case(case)), "cuda", **options)


CASES = {case.name: as_plugins_take_it(case) for case in ALL_CASES}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
one_of_each = pytest.mark.parametrize(
    "case", [CASES[name] for name in ("nemotron_3-T4", "qwen3_next-T4")], ids=lambda case: case.name
)


@every_case
@pytest.mark.parametrize("accept", ["random", "all", "none"])
def test_decode_windows_flushes_rejections_and_prefill_follow_the_recurrence(
    harness: Harness, case: ReplayCase, accept: str
) -> None:
    driver = driver_of(harness, case, num_slots=3, seed=5)
    drive(driver, 60, accept=accept)
    assert driver.flushes > 0
    assert harness.messages() == ""


@every_case
def test_a_long_prompt_then_decode_follow_the_recurrence(harness: Harness, case: ReplayCase) -> None:
    driver = driver_of(harness, case, num_slots=2, seed=8)
    driver.run([Row(1, 200, 200), Row(-1, 0, 0), Row(0, 131, 131)], 200)
    for _ in range(2 * case.history + 3):
        driver.run([Row(0, case.window, case.window), Row(1, case.window, 1)], case.window)
    driver.assert_within_bounds()


@one_of_each
def test_padding_rows_alone_change_nothing(harness: Harness, case: ReplayCase) -> None:
    driver = driver_of(harness, case, seed=1)
    before = {name: bits(pool) for name, pool in driver.pools.items()}
    y = driver.run([Row(-1, 2, 0), Row(-1, 0, 0)], case.window)
    assert (bits(y) == 0).all()
    assert all(torch.equal(bits(pool), before[name]) for name, pool in driver.pools.items())


@one_of_each
def test_equal_calls_give_equal_bits(harness: Harness, case: ReplayCase) -> None:
    results = []
    for _ in range(3):
        driver = driver_of(harness, case, seed=3)
        drive(driver, 20)
        results.append({name: bits(pool) for name, pool in driver.pools.items()})
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


@one_of_each
def test_a_captured_step_equals_the_eager_one(harness: Harness, case: ReplayCase) -> None:
    eager, captured = (driver_of(harness, case, seed=4) for _ in range(2))
    rows = [Row(slot, case.window, 1) for slot in (2, 0, 1)]
    window = eager.make_window([row.num_tokens for row in rows], case.window)
    static = captured.tensors(rows, window)
    static |= {name: static[name].contiguous() for name in window._fields}
    graph = torch.cuda.CUDAGraph()
    # No warm-up: attaching to the context loaded the kernels.
    with torch.cuda.graph(graph):
        y = captured.op(static)
    for _ in range(2 * case.history):
        window = eager.make_window([row.num_tokens for row in rows], case.window)
        for name, tensor in eager.tensors(rows, window).items():
            if name not in eager.pools:
                static[name].copy_(tensor)
        graph.replay()
        assert torch.equal(bits(eager.run(rows, case.window, window)), bits(y))
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
