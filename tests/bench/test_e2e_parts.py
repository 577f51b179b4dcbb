"""The parts of a measurement of whole models: shapes, weights, requests, lengths, clocks, and where time goes."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.meta.repository import ROOT
from trtllm_replayssm.bench.e2e import breakdown, models, stepping
from trtllm_replayssm.bench.e2e.latency import Percentiles, Stopwatch, first_token_times, inter_token_times
from trtllm_replayssm.bench.e2e.requests import Lengths, Mix, draw_requests, parse_lengths
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config
from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, LayerType, ReplayGeometry
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.tensors import state_specs, weight_specs
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.speculative.base import NoDrafter

CPU = torch.device("cpu")
TINY = str(ROOT / "examples" / "tiny_hybrid" / "model")


@pytest.mark.parametrize(
    ("name", "file"), [("nemotron-nano-9b-v2", "nemotron_nano_9b_v2"), ("qwen3.5-9b", "qwen3_5_9b")]
)
def test_presets_are_the_published_configurations(name: str, file: str) -> None:
    config = json.loads((ROOT / "tests" / "data" / f"{file}_config.json").read_text())
    assert models.model_named(name) == parse_hf_config(config, {}).geometry


@pytest.mark.parametrize(("name", "billions"), [("nemotron-nano-9b-v2", 8.9), ("qwen3.5-4b", 4.2), ("qwen3.5-9b", 9.0)])
def test_presets_have_the_parameters_of_their_names(name: str, billions: float) -> None:
    parameters = sum(tensor_bytes(spec) / 2 for spec in weight_specs(models.model_named(name)))
    assert parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_layers_are_cut_from_the_end() -> None:
    whole = models.model_named("nemotron-nano-9b-v2")
    assert models.model_named("Nemotron-Nano-9B-v2", 15).layer_types == whole.layer_types[:15]
    for wrong in (0, 57):
        with pytest.raises(ConfigError, match="num_layers: found .*; needed 1 to 56"):
            models.model_named("nemotron-nano-9b-v2", wrong)
    with pytest.raises(ConfigError, match="model: found 'a-model'; needed nemotron-nano-9b-v2"):
        models.model_named("a-model")


@pytest.mark.parametrize("name", [TINY, "qwen3.5-4b"], ids=["mamba2", "gated_delta_net"])
def test_random_weights_fit_the_modules_and_repeat(name: str) -> None:
    geometry = models.model_named(name, 8).model_copy(update={"vocab_size": 320, "d_model": 64})
    if geometry.mlp is not None:
        geometry = geometry.model_copy(update={"mlp": geometry.mlp.model_copy(update={"d_ff": 96})})
    weights, again = (models.random_weights(geometry, CPU, seed=3) for _ in range(2))
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    module = create_model(geometry, ReplayGeometry())
    module.load_state_dict(weights, strict=True)
    assert all(weight.isfinite().all() for weight in weights.values())
    decays = [weight for key, weight in weights.items() if key.endswith(".A")]
    assert all((decay < 0).all() for decay in decays) and len(decays) == len(geometry.layers_of(LayerType.MAMBA2))


def test_lengths_of_requests() -> None:
    assert parse_lengths("prompt_len", "12") == Lengths(low=12, high=12)
    assert str(parse_lengths("prompt_len", "12-40")) == "12-40"
    for wrong in ("0", "40-12", "x", "-3", "1-2-3", ""):
        with pytest.raises(ConfigError, match="prompt_len: found "):
            parse_lengths("prompt_len", wrong)
    mix = Mix(
        prompt_len=Lengths(low=5, high=9), output_len=Lengths(low=2, high=4), num_requests=4000, arrival_rate=50.0
    )
    drawn = draw_requests(mix, 100, seed=1)
    assert {len(request.prompt_token_ids) for request in drawn} == set(range(5, 10))
    assert {request.output_len for request in drawn} == {2, 3, 4}
    arrivals = np.array([request.arrival for request in drawn])
    gaps = np.diff(arrivals)
    # A Poisson process: gaps are exponential, so mean and deviation are equal; 4000 of them know both to a few percent.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.08) and gaps.std() == pytest.approx(1 / 50, rel=0.08)
    at_once = draw_requests(mix.model_copy(update={"arrival_rate": None}), 100)
    assert all(request.arrival == 0.0 for request in at_once)
    assert draw_requests(mix, 100, seed=1) == drawn and mix.max_seq_len == 13


@given(
    max_draft_len=st.integers(0, 5),
    spare=st.integers(0, 12),
    context=st.integers(1, 500),
    acceptance=st.floats(0.0, 1.0),
    seed=st.integers(0, 5),
)
def test_steady_lengths_begin_at_the_context_and_advance_as_the_protocol_has_it(
    max_draft_len: int, spare: int, context: int, acceptance: float, seed: int
) -> None:
    replay = ReplayGeometry(history=1 + max_draft_len + spare, max_draft_len=max_draft_len)
    drawn = stepping.draw_trajectory(replay, 7, 20, context=context, acceptance=acceptance, seed=seed)
    past, checkpoint = drawn.cursors
    assert (past[0] == context).all() and past.dtype == checkpoint.dtype == np.int32
    assert (checkpoint >= 1).all() and (past - checkpoint >= 0).all() and (past - checkpoint <= replay.history).all()
    assert ((drawn.accepted >= 1) & (drawn.accepted <= replay.window)).all()
    for before, after in pairwise(range(20)):
        expected = protocol.advance(
            past[before],
            checkpoint[before],
            drawn.accepted[before],
            history=replay.history,
            max_draft_len=max_draft_len,
        )
        assert (past[after] == expected[0]).all() and (checkpoint[after] == expected[1]).all()


def test_rows_without_drafts_flush_in_equal_shares() -> None:
    replay = ReplayGeometry(history=16)
    past, checkpoint = stepping.draw_trajectory(replay, 64, 32, context=500, acceptance=0.7).cursors
    flushes = protocol.needs_flush(past, checkpoint, history=16, max_draft_len=0)
    assert (flushes[1:].sum(axis=1) == 4).all()  # 64 rows, each once in 16 steps


def test_acceptance_has_its_mean() -> None:
    kept = stepping.draw_accepted(np.random.default_rng(0), 3, 0.7, 40_000)
    # Bounded by T, so the standard error of 40,000 windows is below 0.007.
    assert kept.mean() == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3, abs=0.03)
    assert (stepping.draw_accepted(np.random.default_rng(0), 3, 1.0, 5) == 4).all()
    assert (stepping.draw_accepted(np.random.default_rng(0), 3, 0.0, 5) == 1).all()


def test_filled_states_hold_numbers_of_a_live_model() -> None:
    geometry, replay = models.model_named(TINY), ReplayGeometry(max_draft_len=1)
    limits = EngineLimits(max_batch_size=2, max_input_len=8, max_seq_len=8, max_num_tokens=8)
    states = [
        State(spec, torch.full([2 if isinstance(d, str) else d for d in spec.shape], torch.nan))
        for spec in state_specs(geometry, replay, limits)
    ]
    stepping.fill_states(states)
    for spec, pool in states:
        assert pool.isfinite().all(), spec.name
        if spec.name.startswith("dt_ring"):
            assert (pool > 0).all()


def test_percentiles_are_numpys() -> None:
    times = np.random.default_rng(0).exponential(0.01, 1001)
    found = Percentiles.of(times)
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(found, name) == pytest.approx(1e3 * np.percentile(times, q))
    assert Percentiles.of([]) == Percentiles(p50=0.0, p90=0.0, p99=0.0)


def test_the_stopwatch_reads_every_step_of_every_request() -> None:
    now = iter([1.0, 1.5, 2.5, 3.0, 7.0])
    watch = Stopwatch(NoDrafter(), clock=lambda: next(now))
    for request_id in (4, 9):
        watch.begin(request_id, [1, 2])
    watch.observe(4, [5])
    watch.observe(9, [5])
    watch.observe(9, [])  # a piece of a prompt: no token, no reading
    watch.observe(4, [6, 7])
    watch.begin(4, [1, 2, 5, 6, 7])  # it lost its slot and begins again
    watch.observe(9, [8])
    watch.observe(4, [8])
    for request_id in (4, 9):
        watch.end(request_id)
    assert watch.readings == {4: [(1.0, 1), (2.5, 2), (7.0, 1)], 9: [(1.5, 1), (3.0, 1)]}
    readings = [watch.readings[4], watch.readings[9]]
    assert first_token_times(readings, [0.25, 1.0]) == [0.75, 0.5]
    # Two tokens of one step share the time since the one before.
    assert inter_token_times(readings).tolist() == [0.75, 0.75, 4.5, 1.5]
    assert watch.propose({4: 3}) == {} and watch.max_draft_len == 0


@given(st.lists(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 4)), max_size=6), max_size=4))
def test_times_between_tokens_sum_to_the_span_of_each_request(steps: list[list[tuple[float, int]]]) -> None:
    readings = [
        [
            (float(moment), n)
            for moment, (_, n) in zip(np.cumsum([gap for gap, _ in of_request]), of_request, strict=True)
        ]
        for of_request in steps
    ]
    times = inter_token_times(readings)
    assert len(times) == sum(n for of_request in readings for _, n in of_request[1:])
    assert times.sum() == pytest.approx(sum(r[-1][0] - r[0][0] for r in readings if r))


KERNELS = {
    "replay_mamba2_pipelined_step_h128": "state",
    "replay_gated_delta_net_step": "state",
    "_selective_scan_update_kernel": "state",
    "fused_recurrent_gated_delta_rule_packed_decode_kernel": "state",
    "replay_causal_conv1d_one_token_step": "conv",
    "nvjet_tst_128x64_64x6_2x1_v_bz_TNT": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "GEMM",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)": "attention",
    "void pytorch_flash::flash_fwd_splitkv_kernel<...>": "attention",
    "void at::native::vectorized_elementwise_kernel<4, mul>": breakdown.OTHER,
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_told_apart_by_their_names(name: str) -> None:
    assert breakdown.category_of(name) == KERNELS[name]


def test_a_trace_is_summed_by_what_its_kernels_do() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    trace = [
        event("cpu_op", "aten::linear", 0.0, 500.0),
        event("kernel", "nvjet_gemm", 100.0, 40.0),
        event("kernel", "replay_mamba2_step", 150.0, 30.0),
        event("kernel", "replay_mamba2_step", 170.0, 30.0),  # begins while the one before runs
        event("gpu_memcpy", "Memcpy HtoD", 210.0, 5.0),
        event("gpu_user_annotation", stepping.CHOICE, 220.0, 20.0),
        event("kernel", "reduce_kernel", 222.0, 10.0),
        event("kernel", "reduce_kernel", 250.0, 10.0),
        {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 0.0},
    ]
    found = breakdown.of_trace(trace, num_steps=2)
    assert found.us == {
        **dict.fromkeys(breakdown.CATEGORIES, 0.0),
        "GEMM": 20.0,
        "state": 25.0,
        "copies": 2.5,
        breakdown.SAMPLING: 5.0,
        breakdown.OTHER: 5.0,
        "gaps": (10.0 + 10.0 + 7.0 + 18.0) / 2,
    }
    assert found.step_us == pytest.approx((260.0 - 100.0) / 2) and found.launches == 3.0
    assert [kernel.name for kernel in found.kernels][:2] == ["replay_mamba2_step", "nvjet_gemm"]
    assert found.kernels[0].launches == 1.0
    assert breakdown.of_trace([], 1).step_us == 0.0
