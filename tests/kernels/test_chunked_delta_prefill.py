"""The chunked prefill of Gated DeltaNet, on a GPU and emulated: borders of chunks, hostile inputs, dead memory."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases import GatedDeltaNetCase
from tests.kernels import prompts
from tests.kernels.emulation import EmulationError, Emulator
from tests.ops.driver import Row, bits, relative_error
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver, Window
from tests.ops.test_gated_delta_net import (
    HOSTILE,
    ILL_CONDITIONED,
    Spoil,
    rounded,
    sequential,
    tokens_of,
    values_of_all_sizes_on_nearly_parallel_keys,
)
from tests.plugins.plugin_ops import gated_delta_net_specialization
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.loader import device_architecture
from trtllm_replayssm.plugins.specializations import Kernel

# Every key_dim, value_dim and state type; heads cut finely and coarsely; more pending rows than a chunk has tokens.
CASES = (
    GatedDeltaNetCase("K128-V32", 1, 2, 128, 32, 16, 3),
    GatedDeltaNetCase("K64-V96-state_bf16", 2, 2, 64, 96, 8, 1, state="bfloat16"),
    GatedDeltaNetCase("K64-V32-W64-T8", 1, 1, 64, 32, 64, 7, gate="float32", spare_ring_rows=3),
    GatedDeltaNetCase("K64-V64-wide", 1, 81, 64, 64, 16, 0),
    GatedDeltaNetCase("K128-V128-few_heads", 4, 8, 128, 128, 16, 3),
    GatedDeltaNetCase("K128-V128-many_heads", 6, 42, 128, 128, 16, 0, gate="float32"),
    GatedDeltaNetCase("K128-V128-state_bf16", 21, 42, 128, 128, 16, 0, state="bfloat16"),
    GatedDeltaNetCase("K128-V256-state_fp16", 2, 4, 128, 256, 16, 0, state="float16"),
    GatedDeltaNetCase("K128-V256-many_heads", 1, 21, 128, 256, 32, 7),
)
CHUNK = 32
# Emulation is slow: few shapes, and fewer lengths and places.
EMULATED = {"K128-V32", "K64-V96-state_bf16", "K64-V32-W64-T8"}
WIDE = CASES[3]


def longest(case: GatedDeltaNetCase) -> int:
    """Tokens of a long prompt: the oracle takes head by head, so many heads get shorter ones."""
    return 4096 if case.n_value_heads <= 8 else 400


def by_case(*, is_emulated: bool = True) -> pytest.MarkDecorator:
    return prompts.by_case(CASES, EMULATED if is_emulated else ())


@pytest.fixture(autouse=True)
def _runs_the_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("device", "cpu") == "cpu":
        use(monkeypatch, Emulator(prefill="chunked_prefill"))
        return
    architecture = device_architecture(torch.cuda.current_device())
    if gated_delta_net_specialization(parameters["case"]).kernel("prefill", architecture) == "prefill":
        pytest.skip(f"no chunked prefill for {parameters['case'].name} on {architecture}")


def use(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    monkeypatch.setattr(ops, "gated_delta_net", emulator.gated_delta_net)


def with_pending(case: GatedDeltaNetCase, device: str, seed: int) -> GatedDeltaNetDriver:
    return prompts.with_pending(GatedDeltaNetDriver(case, device, num_slots=3, seed=seed))


@by_case()
def test_prompts_of_any_length_around_the_borders_of_chunks(case: GatedDeltaNetCase, device: str) -> None:
    T, tile = case.window, 16
    borders = [k * CHUNK for k in (1, 2, 3, 4, 7)] + [tile]
    lengths = sorted({T + 1, T + 2, *(border + shift for border in borders for shift in (-1, 0, 1))})
    if device == "cpu" or longest(case) < 4096:
        lengths = [tile + 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5]
    for seq_len in (length for length in lengths if length > T):
        driver = with_pending(case, device, seed=seq_len)
        rows = [Row(0, seq_len, seq_len), Row(-1, 3, 0), Row(2, seq_len, seq_len), Row(1, seq_len - 1, seq_len - 1)]
        driver.run(rows, seq_len)
        driver.run([Row(1, 0, 0), Row(2, T, T), Row(0, 1, 1)], T + 1)
        driver.assert_within_bounds()


KERNELS: tuple[Kernel, ...] = ("chunked_prefill", "deep_chunked_prefill")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_descending", [False, True])
def test_coarse_slices_follow_the_recurrence(
    is_descending: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Emulator(prefill=kernel, is_descending=is_descending))
    driver = with_pending(WIDE, "cpu", seed=1)
    driver.run([Row(1, 3 * CHUNK + 7, 3 * CHUNK + 7)], 3 * CHUNK + 7)
    driver.assert_within_bounds()


@by_case(is_emulated=False)
def test_long_prompts_in_chunks_and_what_is_decoded_after_them(case: GatedDeltaNetCase, device: str) -> None:
    T = case.window
    driver = with_pending(case, device, seed=1)
    for length in (longest(case) + 5, longest(case) // 4):
        driver.run([Row(1, length, length), Row(0, 77, 77), Row(2, length - 90, length - 90)], length)
        for _ in range(case.history // T + 2):
            driver.run([Row(0, T, T), Row(2, T, 1), Row(1, 1, 1)], T)
    driver.assert_within_bounds()


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize(
    ("case", "device"),
    [
        pytest.param(CASES[0], "cpu", id="cpu"),
        *(pytest.param(CASES[i], "cuda", id=f"{CASES[i].name}-cuda", marks=pytest.mark.gpu) for i in (4, 5)),
    ],
)
def test_hostile_inputs_cost_no_more_than_fp32_costs_the_plain_recurrence(
    case: GatedDeltaNetCase, device: str, spoil: Spoil
) -> None:
    """Within the bounds of all inputs; where those are ill-conditioned, near the sequential fp32 recurrence."""
    driver = GatedDeltaNetDriver(case, device, num_slots=1, seed=3)
    in_fp32, in_fp64 = sequential(driver, np.float32), sequential(driver, np.float64)
    bound = case.bound(device)
    outputs, checkpoints = [bound.output], [bound.checkpoint]
    for length in (150 if device == "cpu" else longest(case) // 4, 70, 33):
        window = rounded(spoil(driver.make_window([length], length), driver.generator), case)
        driver.run([Row(0, length, length)], length, window)
        found = torch.tensor(in_fp32.run(*tokens_of(window, length, np.float32)))
        outputs.append(ILL_CONDITIONED * relative_error(found, in_fp64.run(*tokens_of(window, length, np.float64))))
        error = relative_error(torch.tensor(in_fp32.state)[None], in_fp64.state[None])
        checkpoints.append(ILL_CONDITIONED * error)
    print(f"output {driver.output_error:.1e}, checkpoint {driver.checkpoint_error:.1e}")  # noqa: T201
    assert driver.checkpoint_error <= max(checkpoints)
    # Outputs are made of 16 bits of each factor. Where values of eight orders of magnitude cancel, that is not enough.
    if spoil is not values_of_all_sizes_on_nearly_parallel_keys:
        assert driver.output_error <= max(outputs)


@by_case(is_emulated=False)
def test_a_state_that_forgets_nothing_keeps_its_digits(case: GatedDeltaNetCase, device: str) -> None:
    """Thousands of tokens of one sign, hardly decaying: what truncates or rounds to one side adds up here."""
    driver = GatedDeltaNetDriver(case, device, num_slots=1, seed=2)
    driver.weights = {"A_log": torch.full_like(driver.weights["A_log"], -4.0), "dt_bias": driver.weights["dt_bias"] - 5}
    driver.sequences[0] = driver.new_sequence()
    for length in (longest(case), longest(case) // 2):
        q, k, v, a, b = driver.make_window([length], length)
        driver.run([Row(0, length, length)], length, Window(q.abs(), k, v.abs(), a, b - 3))
    driver.assert_within_bounds()


@by_case()
def test_a_token_that_is_not_finite_reaches_no_earlier_output(case: GatedDeltaNetCase, device: str) -> None:
    seq_len = CHUNK + 25
    clean = None
    values = (torch.nan, torch.inf, -torch.inf) if device == "cuda" else (torch.nan, torch.inf)
    places = (21, CHUNK, CHUNK + 3) if device == "cuda" else (21,)
    for name, value, spoilt in itertools.product((None, "q", "k", "v", "a", "b"), values, places):
        driver = with_pending(case, device, seed=3)
        window = driver.make_window([seq_len], seq_len)
        if name is not None:
            getattr(window, name)[:, spoilt] = value
        o = driver.call([Row(1, seq_len, 0)], window).cpu()
        clean = o if clean is None else clean
        assert torch.equal(bits(o[:, :spoilt]), bits(clean[:, :spoilt])), f"{name} = {value} at {spoilt}"
        is_limit = name in driver.saturating and value != value  # NaN has no limit
        if name is None or (name in driver.saturating and not is_limit):
            continue
        assert not o[:, spoilt].isfinite().any(), f"{name} = {value} at {spoilt} is lost"
        if name != "q":
            assert not o[:, spoilt:].isfinite().any(), f"{name} = {value} at {spoilt} is forgotten"
            assert not driver.pools["ssm_state"][1].isfinite().any()


def test_a_spoilt_value_stays_in_its_column() -> None:
    case, seq_len = CASES[0], CHUNK + 9
    outputs = []
    for is_spoilt in (False, True):
        driver = with_pending(case, "cpu", seed=3)
        window = driver.make_window([seq_len], seq_len)
        if is_spoilt:
            window.v[0, 5, 1, 17] = torch.nan
        outputs.append(driver.call([Row(1, seq_len, 0)], window))
    is_equal = bits(outputs[0]) == bits(outputs[1])
    assert is_equal[0, :, 0].all() and is_equal[0, :5].all()
    assert is_equal[0, :, 1, [i for i in range(case.value_dim) if i != 17]].all()
    assert outputs[1][0, 5:, 1, 17].isnan().all()


@pytest.mark.parametrize("exponent", [20.0, 30.0])
def test_a_key_whose_square_overflows_is_no_key(exponent: float) -> None:
    """As in the token-by-token kernels, where its length is infinite: nothing of it is left, and nothing is spoilt."""
    results = []
    for is_zero in (False, True):
        driver = with_pending(CASES[0], "cpu", seed=3)
        window = driver.make_window([CHUNK + 9], CHUNK + 9)
        window.k[0, 7] *= 0.0 if is_zero else 10.0**exponent
        results.append((bits(driver.call([Row(1, CHUNK + 9, 0)], window)), bits(driver.pools["ssm_state"])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@by_case()
def test_inputs_off_any_alignment_give_the_same_bits(case: GatedDeltaNetCase, device: str) -> None:
    seq_len = CHUNK + 25
    outputs = []
    for is_shifted in (False, True):
        driver = with_pending(case, device, seed=4)
        window = driver.make_window([seq_len - 2], seq_len)
        if is_shifted:
            window = Window(*(_shifted_by_one(part) for part in window))
        outputs.append([bits(driver.call([Row(1, seq_len - 2, 0)], window)), bits(driver.pools["ssm_state"])])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def _shifted_by_one(part: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=part.dtype), part.reshape(-1)])[1:].view(part.shape)


def test_results_do_not_depend_on_the_order_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for is_descending, kernel in itertools.product((False, True), KERNELS):
        use(monkeypatch, Emulator(prefill=kernel, is_descending=is_descending))
        driver = with_pending(CASES[2], "cpu", seed=8)
        o = driver.call([Row(1, 5 * CHUNK, 0)], driver.make_window([5 * CHUNK], 5 * CHUNK))
        outputs.append([bits(o), bits(driver.pools["ssm_state"])])
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_lengths_that_break_the_protocol_stay_within_the_pools() -> None:
    driver = GatedDeltaNetDriver(CASES[0], num_slots=3, seed=1)
    guard = {name: bits(pool[2]) for name, pool in driver.pools.items()}
    driver.past, driver.checkpoint = [100, 3, 0], [0, 9, 0]
    driver.call([Row(0, 99, 0), Row(1, -5, 0)], driver.make_window([1, 1], 9))
    for name, pool in driver.pools.items():
        assert torch.equal(bits(pool[2]), guard[name])


BARRIERS = (
    ("solve.cuh", "    ptx::wait_for_copies();"),
    ("solve.cuh", "  __syncwarp();  // A is there"),
    ("solve.cuh", "    __syncwarp();  // everybody has read A where T goes now"),
    ("solve.cuh", "    ptx::barrier_wait(shared.is_free(place.stage()), place.parity() ^ 1);"),
    ("outputs.cuh", "  meet_partner();  // both have given"),
    ("../chunked_prefill.cu", "      ptx::barrier_wait(shared.is_solved(place.stage()), place.parity());"),
)


@pytest.mark.parametrize(("file", "barrier"), BARRIERS)
def test_a_kernel_without_a_barrier_is_found_out(
    file: str, barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "kernels"
    shutil.copytree(SOURCE_DIR, altered)
    source = altered / "gated_delta_net" / "chunked" / file
    text = source.read_text()
    assert barrier in text
    source.write_text(text.replace(barrier, ""))
    found = []
    for is_descending in (False, True):
        use(monkeypatch, Emulator(prefill="chunked_prefill", source_dir=altered, is_descending=is_descending))
        driver = GatedDeltaNetDriver(CASES[0], num_slots=1, seed=2)
        try:
            driver.run([Row(0, 8 * CHUNK, 8 * CHUNK)], 8 * CHUNK)
        except EmulationError:
            return
        found.append(driver.exceeds_bounds())
    assert any(found)
