"""Launches on a device: repeatable, capturable, true to strides and to 64-bit offsets. The numbers: ``tests/ops``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import (
    ALL_CASES,
    DEVICE_CASES,
    GATED_DELTA_NET_SHAPE_CASES,
    SHAPE_CASES,
    GatedDeltaNetCase,
    Mamba2Case,
    ReplayCase,
)
from tests.ops.driver import Driver, Row, bits, int32
from tests.ops.drivers import replayed
from tests.ops.mamba2_driver import Mamba2Driver, make_pools
from tests.plugins.plugin_ops import gated_delta_net_specialization, mamba2_specialization
from trtllm_replayssm import ops
from trtllm_replayssm.errors import OpArgumentError
from trtllm_replayssm.plugins import launch, loader
from trtllm_replayssm.plugins.specializations import PIPELINE_ARCHITECTURES

pytestmark = pytest.mark.gpu

CASES = {case.name: case for case in DEVICE_CASES}
CHECKED = [
    case
    for case in ALL_CASES
    if case.name in ("nemotron_h-T5", "state_bf16", "W2-N256-P80", "qwen3_next-T4", "gdn-state_bf16", "gdn-W1-fp32")
]


def is_pipelined(case: ReplayCase) -> bool:
    if isinstance(case, Mamba2Case):
        return mamba2_specialization(case).pipeline is not None
    assert isinstance(case, GatedDeltaNetCase)
    return gated_delta_net_specialization(case).pipeline is not None


PIPELINED = [case for case in ALL_CASES if is_pipelined(case)]
PIPELINED_SHAPES = [case for case in (*SHAPE_CASES, *GATED_DELTA_NET_SHAPE_CASES) if is_pipelined(case)]
# What the pipelined step reads in 16-byte pieces, first what it reads by chunks of heads; and what both copy.
IN_PIECES = {"mamba2": ("x", "B", "C"), "gated_delta_net": ("v", "q", "k")}
COPIED = {"mamba2": ("x_ring", "B_ring"), "gated_delta_net": ("k_ring",)}

by_case = pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)


def arguments(driver: Driver, rows: list[Row], seq_len: int) -> dict[str, Tensor]:
    """The op's tensors on the device, strided as a model has them."""
    window = driver.make_window([row.num_tokens if row.slot >= 0 else 0 for row in rows], seq_len)
    lengths = {
        "past_lengths": [driver.past[row.slot] if row.slot >= 0 else 0 for row in rows],
        "checkpoint_lengths": [driver.checkpoint[row.slot] if row.slot >= 0 else 0 for row in rows],
        "num_tokens": [row.num_tokens for row in rows],
        "slot_ids": [row.slot for row in rows],
    }
    return {
        **{name: part.to("cuda") for name, part in window._asdict().items()},
        **{name: weight.to("cuda") for name, weight in driver.weights.items()},
        **driver.pools,
        **{name: int32(values, "cuda") for name, values in lengths.items()},
    }


def call(case: ReplayCase, tensors: dict[str, Tensor]) -> Tensor:
    run = launch.mamba2 if isinstance(case, Mamba2Case) else launch.gated_delta_net
    return run(tensors, history=case.history, max_draft_len=case.max_draft_len)


def in_mid_life(case: ReplayCase) -> Driver:
    """Three slots at different cursors: about to flush, just begun, and in between; all dead memory poisoned."""
    driver = replayed(case, "cuda", num_slots=3, seed=4)
    T = case.window
    driver.run([Row(0, T + 9, T + 9), Row(2, 3, 3)], T + 9)
    while not driver.is_due(0):
        driver.run([Row(0, T, T), Row(2, T, 1)], T)
    driver.poison_unused()
    return driver


def pool_names(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name in tensors if name == "ssm_state" or name.endswith("_ring")]


def memory(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [bits(tensors[name]) for name in pool_names(tensors)]


@by_case
@pytest.mark.parametrize("is_prefill", [False, True], ids=["step", "prefill"])
def test_repeated_launches_give_the_same_bits(case: ReplayCase, is_prefill: bool) -> None:
    driver = in_mid_life(case)
    seq_len = case.window + (70 if is_prefill else 0)
    tensors = arguments(driver, [Row(2, 1, 0), Row(-1, 0, 0), Row(0, seq_len, 0), Row(1, seq_len, 0)], seq_len)
    before = {name: tensors[name].clone() for name in pool_names(tensors)}
    results = []
    for _ in range(10):
        for name in pool_names(tensors):
            tensors[name].copy_(before[name])
        results.append([bits(call(case, tensors)), *memory(tensors)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@by_case
def test_a_captured_graph_gives_the_bits_of_the_eager_launch(case: ReplayCase) -> None:
    driver = in_mid_life(case)
    T = case.window
    tensors = arguments(driver, [Row(0, T, 0), Row(1, T, 0), Row(-1, 0, 0)], T)
    inputs = {name: tensors[name].clone() for name in tensors}
    # Loaded outside of the capture; with padding rows alone the call changes nothing.
    tensors["slot_ids"].fill_(-1)
    call(case, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(case, tensors)
    # The graph must see what stands in the tensors at its replay, other lengths and slots too.
    for slots in ([0, 1, -1], [2, -1, 1], [-1, -1, -1]):
        results = []
        for is_replay in (False, True):
            for name, value in inputs.items():
                tensors[name].copy_(value)
            tensors["slot_ids"].copy_(int32(slots))
            for name, lengths in (("past_lengths", driver.past), ("checkpoint_lengths", driver.checkpoint)):
                tensors[name].copy_(int32([lengths[slot] if slot >= 0 else 0 for slot in slots]))
            if is_replay:
                graph.replay()
            results.append([bits(y if is_replay else call(case, tensors)), *memory(tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), f"slots {slots}"


@by_case
def test_pools_with_strides_between_slots_are_written_in_place(case: ReplayCase) -> None:
    pools, bases = {}, {}
    for name, pool in replayed(case, "cuda", num_slots=3).make_pools().items():
        bases[name] = torch.full((3, pool[0].numel() + 64), 7.0, dtype=pool.dtype, device="cuda")
        pools[name] = bases[name][:, : pool[0].numel()].view(pool.shape)
        pools[name].fill_(torch.nan)
    driver = replayed(case, "cuda", num_slots=3, seed=4, pools=pools)
    T = case.window
    driver.run([Row(0, T + 9, T + 9), Row(2, 3, 3)], T + 9)
    for _ in range(2 * case.history):
        driver.run([Row(2, T, T), Row(0, T, 1)], T)
    driver.assert_within_bounds()
    assert driver.flushes > 2
    for name, base in bases.items():
        assert (base[:, -64:] == 7.0).all(), f"{name}: written between the slots"


@by_case
def test_rows_without_tokens_flush_when_due(case: ReplayCase) -> None:
    driver = in_mid_life(case)
    flushes = driver.flushes
    y = driver.run([Row(0, 0, 0), Row(1, 0, 0)], 1)
    assert driver.flushes == flushes + 1 and driver.checkpoint[0] == driver.past[0]
    assert (bits(y) == 0).all()
    driver.assert_within_bounds()


def test_layouts_that_the_kernels_do_not_read_are_refused_before_anything_is_written() -> None:
    case = CASES["nemotron_h-T5"]
    driver = in_mid_life(case)
    T = case.window
    good = arguments(driver, [Row(0, T, 0)], T)
    before = memory(good)
    transposed = good["ssm_state"].transpose(2, 3).contiguous().transpose(2, 3)
    wrong = {
        "x": good["x"].transpose(2, 3).contiguous().transpose(2, 3),
        "B": good["B"].repeat_interleave(2, -1)[..., ::2],
        "ssm_state": transposed,
        "dt_ring": good["dt_ring"].repeat_interleave(2, -1)[..., ::2],
        "A": good["A"].repeat_interleave(2)[::2],
        "x_ring": torch.zeros(good["x_ring"].numel() + 1, dtype=good["x_ring"].dtype, device="cuda")[1:].view(
            good["x_ring"].shape
        ),
    }
    for name, tensor in wrong.items():
        with pytest.raises(OpArgumentError, match=f"{name}: found"):
            call(case, good | {name: tensor})
    assert all(torch.equal(a, b) for a, b in zip(before, memory(good), strict=True))


def test_slots_beyond_two_to_the_31_elements_are_addressed() -> None:
    """One layer's view of a pool whose slots are gigabytes apart; offsets in 32 bits would wrap."""
    case = CASES["state_bf16"]
    elements = case.n_heads * case.head_dim * case.d_state
    stride = 2**31 // 2 + 1024
    if torch.cuda.mem_get_info()[0] < 8 * stride * 2:
        pytest.skip("less than 18 GB of free device memory")
    pools = make_pools(case, 4, "cuda")
    huge = torch.empty(3 * stride + elements, dtype=case.state_dtype, device="cuda")
    shape = pools["ssm_state"].shape
    pools["ssm_state"] = huge.as_strided(shape, (stride, *pools["ssm_state"].stride()[1:]))
    ring_elements = pools["x_ring"][0].numel()
    rings = torch.empty(3 * stride + ring_elements, dtype=case.activation_dtype, device="cuda")
    pools["x_ring"] = rings.as_strided(pools["x_ring"].shape, (stride, *pools["x_ring"].stride()[1:]))
    for name in ("ssm_state", "x_ring"):
        pools[name].fill_(torch.nan)
    far = Mamba2Driver(case, "cuda", num_slots=4, seed=2, pools=pools)
    near = Mamba2Driver(case, "cuda", num_slots=4, seed=2)
    T = case.window
    for seq_len in (T + 20, *[T] * (2 * case.history // T)):
        window = far.make_window([seq_len, seq_len], seq_len)
        rows = [Row(3, seq_len, seq_len), Row(2, seq_len, 1 if seq_len == T else seq_len)]
        assert torch.equal(bits(far.run(rows, seq_len, window)), bits(near.run(rows, seq_len, window)))
        for slot in (2, 3):
            assert torch.equal(bits(far.pools["ssm_state"][slot]), bits(near.pools["ssm_state"][slot]))
            assert torch.equal(bits(far.pools["x_ring"][slot]), bits(near.pools["x_ring"][slot]))
    far.assert_within_bounds()
    assert far.flushes > 2


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles of the launched kernels, in order."""
    if loader.device_architecture(torch.cuda.current_device()) not in PIPELINE_ARCHITECTURES:
        pytest.skip("this device has no pipelined step")
    found: list[str] = []

    def load(specialization: Any, role: Any, device_index: int) -> loader.LoadedKernel:
        found.append(role)
        return loader.load(specialization, role, device_index)

    monkeypatch.setattr(launch, "load", load)
    return found


def off_pieces(tensor: Tensor) -> Tensor:
    """The same values, four elements off the start of an allocation."""
    base = torch.empty(tensor.numel() + 4, dtype=tensor.dtype, device=tensor.device)
    return base[4:].view(tensor.shape).copy_(tensor)


def require_agreement(case: ReplayCase, tensors: dict[str, Tensor], roles: list[str]) -> None:
    """Hold the pipelined step to the generic one, which runs for an input that is not in 16-byte pieces."""
    before = {name: tensors[name].clone() for name in pool_names(tensors)}
    results = []
    roles.clear()
    op_name = op_name_of(case)
    input_name = IN_PIECES[op_name][0]
    for tensor in (tensors[input_name], off_pieces(tensors[input_name])):
        for name in pool_names(tensors):
            tensors[name].copy_(before[name])
        y = call(case, tensors | {input_name: tensor})
        results.append({"y": y} | {name: tensors[name].clone() for name in pool_names(tensors)})
    assert roles == ["pipelined_step", "step"]
    found, expected = results
    for name in COPIED[op_name]:
        assert torch.equal(bits(found[name]), bits(expected[name])), name
    bound = case.bound("cuda")
    errors = {"y": bound.output, "ssm_state": bound.checkpoint}
    if op_name == "mamba2":
        errors |= {"dt_ring": 1e-6}
    else:
        errors |= {"g_ring": 1e-6, "u_ring": bound.checkpoint}
    for name, error in errors.items():
        largest = expected[name].float().nan_to_num(posinf=0.0, neginf=0.0).abs().amax().item()
        torch.testing.assert_close(
            found[name].float(), expected[name].float(), rtol=0, atol=error * largest, equal_nan=True, msg=name
        )


def op_name_of(case: ReplayCase) -> str:
    return "mamba2" if isinstance(case, Mamba2Case) else "gated_delta_net"


by_pipelined_case = pytest.mark.parametrize("case", PIPELINED, ids=lambda case: case.name)
by_main_case = pytest.mark.parametrize(
    "case",
    [case for case in PIPELINED if case.name in ("nemotron_h-T5", "gdn-state_bf16")],
    ids=lambda case: case.name,
)


@pytest.mark.parametrize("case", [*PIPELINED, *PIPELINED_SHAPES], ids=lambda case: case.name)
def test_both_steps_agree_with_dead_memory_poisoned(case: ReplayCase, roles: list[str]) -> None:
    T = case.window
    driver = in_mid_life(case)
    for rows in (
        [Row(0, T, 0), Row(-1, 0, 0), Row(1, T, 0), Row(2, 1, 0)],
        [Row(2, 0, 0), Row(0, 0, 0), Row(-1, 0, 0)],
    ):
        require_agreement(case, arguments(driver, rows, T), roles)
    require_agreement(case, arguments(driver, [Row(0, 1, 0), Row(1, 1, 0), Row(2, 0, 0)], 1), roles)


@by_pipelined_case
def test_both_steps_agree_over_many_turns_of_every_buffer(case: ReplayCase, roles: list[str]) -> None:
    num_slots = 600
    driver = replayed(case, "cuda", num_slots=num_slots, seed=6)
    generator = torch.Generator("cuda").manual_seed(1)
    for name, pool in driver.pools.items():
        pool.normal_(generator=generator)
        if name in ("dt_ring", "g_ring"):
            pool.abs_().mul_(0.1 if name == "dt_ring" else -0.1)
    for slot in range(num_slots):
        driver.checkpoint[slot] = slot % 7 * 13
        driver.past[slot] = driver.checkpoint[slot] + slot % (case.history + 1)
    rows = [Row(slot if slot % 11 else -1, slot % (case.window + 1), 0) for slot in reversed(range(num_slots))]
    require_agreement(case, arguments(driver, rows, case.window), roles)


@by_main_case
def test_a_checkpoint_that_is_not_a_number_shows_in_the_outputs(case: ReplayCase, roles: list[str]) -> None:
    driver = in_mid_life(case)
    # The NaN that arithmetic makes: rounding must not wrap it into a number.
    driver.pools["ssm_state"][2].view(torch.int32).fill_(0x7FFFFFFF)
    tensors = arguments(driver, [Row(2, case.window, 0)], case.window)
    roles.clear()
    assert call(case, tensors).isnan().all()
    assert roles == ["pipelined_step"]


@by_main_case
def test_tensors_that_are_not_in_pieces_run_the_generic_step(case: ReplayCase, roles: list[str]) -> None:
    driver = in_mid_life(case)
    tensors = arguments(driver, [Row(0, case.window, 0)], case.window)
    names = IN_PIECES[op_name_of(case)]
    by_heads = tensors[names[0]]
    gaps = torch.nn.functional.pad(by_heads, (0, 16))[..., : by_heads.shape[-1]]
    for name in names:
        roles.clear()
        for changes in ({name: off_pieces(tensors[name])}, {names[0]: gaps}, {}):
            call(case, tensors | changes)
        assert roles == ["step", "step", "pipelined_step"], name


@pytest.mark.parametrize("seq_len", [1, 8, 9, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_convolution_repeats_captures_and_equals_the_cpu(seq_len: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seq_len)
    conv_dim, slots = 1032, 3
    packed = torch.randn(2, seq_len, conv_dim + 5).to(dtype)
    weight, bias = torch.randn(conv_dim, 4).to(dtype), torch.randn(conv_dim).to(dtype)
    ring = torch.randn(slots, 11, conv_dim).to(dtype)
    lengths = [int32([5, 40]), int32([seq_len, seq_len - 1]), int32([2, 0])]
    expected_ring = ring.clone()
    expected = ops.causal_conv1d(packed[..., 5:], weight, bias, expected_ring, *lengths)
    x, weight, bias, *lengths = (t.to("cuda") for t in (packed, weight, bias, *lengths))
    x, device_ring = x[..., 5:], ring.to("cuda")

    def run(**changes: Tensor) -> Tensor:
        tensors = {"x": x, "weight": weight, "bias": bias, "conv_ring": device_ring}
        tensors |= dict(zip(("past_lengths", "num_tokens", "slot_ids"), lengths, strict=True))
        return launch.causal_conv1d(tensors | changes, activation="silu")

    eager = run()
    assert torch.equal(bits(device_ring), bits(expected_ring))
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(eager.cpu(), expected, rtol=tolerance, atol=tolerance)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    device_ring.copy_(ring)
    graph.replay()
    assert torch.equal(bits(captured), bits(eager)) and torch.equal(bits(device_ring), bits(expected_ring))
    wrong = torch.zeros(slots, conv_dim, 11, dtype=dtype, device="cuda").transpose(1, 2)
    with pytest.raises(OpArgumentError, match="conv_ring"):
        run(conv_ring=wrong)
    with pytest.raises(OpArgumentError, match="x: found strides"):
        run(x=wrong.transpose(1, 2)[..., ::2])
