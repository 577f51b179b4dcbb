"""The chunked prefill against the oracle, on a GPU and emulated: borders of chunks, extreme steps, dead memory."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from tests.cases import Mamba2Case
from tests.kernels import prompts
from tests.kernels.emulation import EmulationError, Emulator
from tests.ops.driver import Row, bits
from tests.ops.mamba2_driver import Mamba2Driver, Window
from tests.plugins.plugin_ops import mamba2_specialization
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.loader import device_architecture

# Every head_dim, d_state and state type, and every way to share out a head between blocks and warps.
CASES = (
    Mamba2Case("P16", 4, 16, 128, 2, 16, 0),
    Mamba2Case("P32-N64", 4, 32, 64, 1, 16, 3),
    Mamba2Case("P48-state_bf16", 4, 48, 128, 2, 8, 1, state="bfloat16"),
    Mamba2Case("P64-few_heads", 8, 64, 128, 2, 16, 3, spare_ring_rows=3),
    Mamba2Case("P64-many_heads", 72, 64, 128, 8, 16, 0),
    Mamba2Case("P80", 4, 80, 128, 2, 16, 0, dt="float32"),
    Mamba2Case("P80-state_fp16", 4, 80, 128, 1, 16, 0, state="float16"),
    Mamba2Case("P96-N256", 2, 96, 256, 1, 16, 0),
    Mamba2Case("P112", 2, 112, 128, 1, 64, 7),
    Mamba2Case("P128", 2, 128, 128, 1, 16, 0),
)
CHUNK = 64
# Emulation is slow: few shapes, and fewer lengths and places.
EMULATED = {"P16", "P48-state_bf16"}


def by_case(*, is_emulated: bool = True) -> pytest.MarkDecorator:
    return prompts.by_case(CASES, EMULATED if is_emulated else ())


@pytest.fixture(autouse=True)
def _runs_the_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    case, device = (request.node.callspec.params[name] for name in ("case", "device"))
    if device == "cpu":
        monkeypatch.setattr(ops, "mamba2", Emulator(prefill="chunked_prefill").mamba2)
        return
    architecture = device_architecture(torch.cuda.current_device())
    if mamba2_specialization(case).kernel("prefill", architecture) != "chunked_prefill":
        pytest.skip(f"no chunked prefill for {case.name} on {architecture}")


def with_pending(case: Mamba2Case, device: str, seed: int) -> Mamba2Driver:
    return prompts.with_pending(Mamba2Driver(case, device, num_slots=3, seed=seed))


@by_case()
def test_prompts_of_any_length_around_the_borders_of_chunks(case: Mamba2Case, device: str) -> None:
    T, tile = case.window, 16
    borders = [k * CHUNK for k in (1, 2, 3)] + [tile, 2 * tile, 3 * tile]
    lengths = sorted({T + 1, T + 2, *(border + shift for border in borders for shift in (-1, 0, 1))})
    if device == "cpu":
        lengths = [CHUNK, CHUNK + 1]
    for seq_len in (length for length in lengths if length > T):
        driver = with_pending(case, device, seed=seq_len)
        rows = [Row(0, seq_len, seq_len), Row(-1, 3, 0), Row(2, seq_len, seq_len), Row(1, seq_len - 1, seq_len - 1)]
        driver.run(rows, seq_len)
        driver.run([Row(1, 0, 0), Row(2, T, T), Row(0, 1, 1)], T + 1)
        driver.assert_within_bounds()


@by_case(is_emulated=False)
def test_long_prompts_in_chunks_and_what_is_decoded_after_them(case: Mamba2Case, device: str) -> None:
    T = case.window
    driver = with_pending(case, device, seed=1)
    for length in (4096 + 5, 1000):
        driver.run([Row(1, length, length), Row(0, 77, 77), Row(2, length - 500, length - 500)], length)
        for _ in range(case.history // T + 2):
            driver.run([Row(0, T, T), Row(2, T, 1), Row(1, 1, 1)], T)
    driver.assert_within_bounds()


@by_case(is_emulated=False)
def test_a_state_that_forgets_nothing_keeps_its_digits(case: Mamba2Case, device: str) -> None:
    """Thousands of tokens of one sign, hardly decaying: what truncates or rounds to one side adds up here."""
    driver = Mamba2Driver(case, device, num_slots=1, seed=2)
    driver.weights["A"] = -torch.exp(-2.0 - 6.0 * torch.rand(case.n_heads, generator=driver.generator))
    driver.sequences[0] = driver.new_sequence()
    for length in (4096, 2000):
        x, dt, B, C = driver.make_window([length], length)
        driver.run([Row(0, length, length)], length, Window(x.abs(), dt, B.abs(), C.abs()))
    driver.assert_within_bounds()


@by_case()
@pytest.mark.parametrize("raw", [25.0, 1e3, 1e6])
def test_a_huge_step_size_neither_overflows_nor_blurs_its_neighbours(case: Mamba2Case, device: str, raw: float) -> None:
    seq_len = 2 * CHUNK + 40
    raw = min(raw, 1e3) if case.state == "float16" else raw  # the state itself ends at 65504
    places = ([0], [15, 16], [CHUNK - 1], [CHUNK, 2 * CHUNK + 3], list(range(20, 100, 7)))
    for seed, spikes in enumerate(places if device == "cuda" else places[3:]):
        driver = with_pending(case, device, seed)
        window = driver.make_window([seq_len], seq_len)
        window.dt[0, spikes] = raw
        # Of one sign: outputs that cancel would measure the inputs' condition instead.
        window = window._replace(B=window.B.abs(), C=window.C.abs())
        driver.run([Row(2, seq_len, seq_len)], seq_len, window)
        driver.assert_within_bounds()


@by_case()
def test_a_token_that_is_not_finite_reaches_no_earlier_output(case: Mamba2Case, device: str) -> None:
    seq_len = CHUNK + 40
    clean = None
    values = (torch.nan, torch.inf, -torch.inf) if device == "cuda" else (torch.inf,)
    for name, value, spoilt in itertools.product((None, "x", "dt", "B", "C"), values, (21, CHUNK + 3)):
        driver = with_pending(case, device, seed=3)
        window = driver.make_window([seq_len], seq_len)
        if name is not None:
            getattr(window, name)[:, spoilt] = value
        y = driver.call([Row(1, seq_len, 0)], window).cpu()
        clean = y if clean is None else clean
        assert torch.equal(bits(y[:, :spoilt]), bits(clean[:, :spoilt])), f"{name} = {value} at {spoilt}"
        # A step of minus infinity is one of length 0, which is a number.
        if name is not None and not (name == "dt" and value == -torch.inf):
            assert not y[:, spoilt].isfinite().any(), f"{name} = {value} at {spoilt} is lost"


@by_case()
def test_inputs_off_any_alignment_give_the_same_bits(case: Mamba2Case, device: str) -> None:
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


# Those of the shown state are not among them: emulated copies come late, and hold both sides back.
BARRIERS = (
    "    ptx::barrier_wait(shared.is_free(place.stage()), place.parity() ^ 1);",
    "    ptx::barrier_wait(shared.is_full(place.stage()), place.parity());\n    fold_chunk",
    "    ptx::barrier_wait(shared.is_full(place.stage()), place.parity());\n    TileOutputs",
    "    ptx::barrier_arrive_after_copies(shared.is_full(place.stage()));",
    "    arrive_as_warp(shared.is_full(place.stage()));",
)


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize(("case", "device"), [pytest.param(CASES[0], "cpu", id="P16")])
def test_a_kernel_without_a_barrier_is_found_out(
    case: Mamba2Case, device: str, barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "kernels"
    shutil.copytree(SOURCE_DIR, altered)
    source = altered / "mamba2" / "chunked_prefill.cu"
    text = source.read_text()
    assert barrier in text
    source.write_text(text.replace(barrier, barrier.rpartition("\n")[2] if "\n" in barrier else ""))
    found = []
    for is_descending in (False, True):
        emulator = Emulator(prefill="chunked_prefill", source_dir=altered, is_descending=is_descending)
        monkeypatch.setattr(ops, "mamba2", emulator.mamba2)
        driver = Mamba2Driver(case, device, num_slots=1, seed=2)
        try:
            driver.run([Row(0, 6 * CHUNK, 6 * CHUNK)], 6 * CHUNK)
        except EmulationError:
            return
        found.append(driver.exceeds_bounds())
    assert any(found)
