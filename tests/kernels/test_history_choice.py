"""``history="auto"``: which history costs least, and that it is one that has kernels."""

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders.tiny_geometry import tiny_geometry, tiny_qwen_geometry
from tests.ops.strategies import bounded
from trtllm_replayssm.bench.shapes import GATED_DELTA_NET, MAMBA2
from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    GatedDeltaNetGeometry,
    Mamba2Geometry,
    ModelGeometry,
    RecurrenceGeometry,
    ReplayGeometry,
    StateDtype,
)
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.plugins import build, history_choice
from trtllm_replayssm.plugins.history_choice import (
    CANDIDATES,
    TIME_OVER_LIMIT,
    bytes_per_step,
    longest_history,
    resolve_history,
    time_over_limit,
)
from trtllm_replayssm.plugins.specializations import Role, mamba2_pipeline

STEP_ROLES: tuple[Role, ...] = ("step", "pipelined_step")
HOPPER, AMPERE, ADA = 90, 80, 89
NANO_9B = tiny_geometry(dtype="bfloat16", mamba2=MAMBA2["nano9b"])


def auto(
    geometry: ModelGeometry = NANO_9B,
    *capabilities: int,
    max_draft_len: int = 0,
    state_dtype: StateDtype = "float32",
) -> int:
    return resolve_history(
        "auto",
        geometry,
        max_draft_len=max_draft_len,
        state_dtype=state_dtype,
        compute_capabilities=capabilities,
    )


def cheapest(
    m: RecurrenceGeometry, max_draft_len: int, state_dtype: StateDtype = "float32", dtype: str = "bfloat16"
) -> int:
    costs = {
        history: bytes_per_step(
            m, ReplayGeometry(history=history, max_draft_len=max_draft_len, state_dtype=state_dtype), dtype
        )
        for history in CANDIDATES
        if history > max_draft_len
    }
    return min(costs, key=lambda history: costs[history])


@st.composite
def layers(draw: st.DrawFn) -> Mamba2Geometry:
    n_groups = draw(st.sampled_from((1, 2, 4, 8)))
    return Mamba2Geometry(
        n_heads=n_groups * draw(st.integers(1, 32)),
        head_dim=draw(st.sampled_from((16, 64, 80, 128))),
        d_state=draw(st.sampled_from((32, 64, 128, 256))),
        n_groups=n_groups,
        d_conv=4,
    )


def test_the_bytes_of_plain_decoding_are_those_of_the_cycle_counted_by_hand() -> None:
    state, ring_row = 4 * 128 * 80 * 128, 2 * (128 * 80 + 8 * 128) + 4 * 128
    window = 2 * (128 * 80 + 2 * 8 * 128 + 128) + 2 * 128 * 80
    for history in CANDIDATES:
        expected = state * (1 + 1 / history) + ring_row * (1 + (history + 1) / 2) + window
        found = bytes_per_step(MAMBA2["nano9b"], ReplayGeometry(history=history), "bfloat16")
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("max_draft_len", range(8))
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MAMBA2)
def test_on_the_cpu_the_fewest_bytes_win(shape: str, state_dtype: StateDtype, max_draft_len: int) -> None:
    geometry = tiny_geometry(dtype="bfloat16", mamba2=MAMBA2[shape])
    found = auto(geometry, max_draft_len=max_draft_len, state_dtype=state_dtype)
    assert found == cheapest(MAMBA2[shape], max_draft_len, state_dtype)


def test_an_average_layer_of_the_models_takes_16_for_decoding_and_more_for_long_windows() -> None:
    assert [auto(max_draft_len=drafts) for drafts in (0, 3, 7)] == [16, 32, 32]
    assert [auto(max_draft_len=drafts, state_dtype="bfloat16") for drafts in (0, 1, 7)] == [16, 16, 32]


@bounded(60)
@given(m=layers(), max_draft_len=st.integers(0, 7))
def test_a_smaller_state_never_asks_for_a_longer_history(m: Mamba2Geometry, max_draft_len: int) -> None:
    assert cheapest(m, max_draft_len, "bfloat16") <= cheapest(m, max_draft_len, "float32")
    halved = m.model_copy(update={"d_state": m.d_state // 2})
    assert cheapest(halved, max_draft_len) <= cheapest(m, max_draft_len)


@bounded(60)
@given(m=layers(), state_dtype=st.sampled_from(("float32", "bfloat16")))
def test_a_longer_window_never_asks_for_a_shorter_history(m: Mamba2Geometry, state_dtype: StateDtype) -> None:
    found = [cheapest(m, max_draft_len, state_dtype) for max_draft_len in range(8)]
    assert found == sorted(found)


def test_a_large_state_beside_small_rings_takes_the_longest_history_and_a_small_one_the_shortest() -> None:
    few_rows = Mamba2Geometry(n_heads=64, head_dim=64, d_state=256, n_groups=1, d_conv=4)
    many_rows = Mamba2Geometry(n_heads=8, head_dim=16, d_state=32, n_groups=8, d_conv=4)
    assert (cheapest(few_rows, 0), cheapest(many_rows, 0, "bfloat16", "float32")) == (32, 8)


def test_a_long_history_is_for_windows_wherever_they_run() -> None:
    for capabilities in ((HOPPER,), (100,), (AMPERE,), (86, 120), ()):
        assert [auto(NANO_9B, *capabilities, max_draft_len=drafts) for drafts in (0, 3)] == [16, 32]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MAMBA2)
def test_plain_decoding_of_the_models_takes_16_where_8_was_measured_to_be_slower(
    shape: str, state_dtype: StateDtype
) -> None:
    geometry = tiny_geometry(dtype="bfloat16", mamba2=MAMBA2[shape])
    assert auto(geometry, HOPPER, state_dtype=state_dtype) == 16


def test_a_device_whose_fast_kernel_serves_short_histories_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2_pipeline, "_MAX_HISTORY", 16)
    assert [auto(NANO_9B, capability, max_draft_len=3) for capability in (HOPPER, 100)] == [16, 16]
    # Without a fast kernel for any history, and on the CPU, bytes decide.
    assert [auto(NANO_9B, *capabilities, max_draft_len=3) for capabilities in ((AMPERE,), (86, 120), ())] == [32] * 3


def test_the_measured_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TIME_OVER_LIMIT | {("step", 4, 4, 32): 1.0, ("step", 4, 4, 8): 9.0, ("pipelined_step", 4, 4, 32): 1.2}
    monkeypatch.setattr(history_choice, "TIME_OVER_LIMIT", table)
    assert auto(NANO_9B, HOPPER, max_draft_len=3) == 16
    assert auto(NANO_9B, AMPERE, max_draft_len=3) == 32
    monkeypatch.setattr(history_choice, "TIME_OVER_LIMIT", table | {("step", 4, 4, 32): 9.0, ("step", 4, 4, 8): 1.0})
    assert auto(NANO_9B, AMPERE, max_draft_len=3) == 8
    # A time at T = 4 says nothing of T = 1, which has its own.
    assert auto(NANO_9B, AMPERE) == 16


def test_the_times_of_several_devices_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[tuple[Role, int, int, int], float] = {
        ("step", 4, 4, 16): 1.0,
        ("step", 4, 4, 32): 1.0,
        ("pipelined_step", 4, 4, 16): 1.0,
    }
    for slow, expected in ((1.0, 32), (2.0, 16)):
        monkeypatch.setattr(history_choice, "TIME_OVER_LIMIT", table | {("step", 4, 4, 32): slow})
        assert auto(NANO_9B, HOPPER, AMPERE, max_draft_len=3) == expected


def test_what_was_not_measured_counts_as_its_nearest_neighbour() -> None:
    for window, measured in ((1, 1), (2, 1), (3, 4), (4, 4), (8, 4)):
        for history, state, role in itertools.product(CANDIDATES, get_args(StateDtype), STEP_ROLES):
            replay = ReplayGeometry(history=history, max_draft_len=window - 1, state_dtype=state)
            at = history if role == "pipelined_step" else 16
            assert time_over_limit(role, replay) == TIME_OVER_LIMIT[role, DTYPE_BYTES[state], measured, at]
    between = ReplayGeometry(history=11, max_draft_len=0, state_dtype="float32")
    assert time_over_limit("pipelined_step", between) == TIME_OVER_LIMIT["pipelined_step", 4, 1, 8]


def test_every_kernel_of_a_step_has_been_measured_and_none_beats_its_bytes_by_much() -> None:
    measured = {(role, size) for role, size, _, _ in TIME_OVER_LIMIT}
    assert measured == set(itertools.product(STEP_ROLES, (2, 4)))
    assert all(0.95 < ratio < 10 for ratio in TIME_OVER_LIMIT.values())


def test_a_candidate_without_kernels_for_every_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # With so little shared memory the rows of 32 tokens do not fit, those of 16 do.
    monkeypatch.setitem(build.MAX_SHARED_BYTES, "sm_89", 60 * 1024)
    wide = Mamba2Geometry(n_heads=8, head_dim=128, d_state=256, n_groups=2, d_conv=4)
    geometry = tiny_geometry(mamba2=wide)
    assert [auto(geometry, *targets, max_draft_len=7) for targets in ((HOPPER,), (ADA,), (HOPPER, ADA))] == [32, 16, 16]


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({"head_dim": 8}, HOPPER, "head_dim a multiple of 8 from 16 to 128"),
        ({}, 75, r"compute capability: found 7\.5"),
    ],
)
def test_a_model_without_any_kernel_is_refused_as_everywhere(
    changes: dict[str, int], capability: int, message: str
) -> None:
    geometry = tiny_geometry(mamba2=MAMBA2["nano9b"].model_copy(update=changes))
    with pytest.raises(UnsupportedError, match=message):
        auto(geometry, capability)
    assert auto(geometry) in CANDIDATES, "the CPU needs no kernel"


def test_the_history_holds_the_window() -> None:
    assert [auto(max_draft_len=drafts) for drafts in (15, 16, 31)] == [32, 32, 32]
    message = "'auto' with max_draft_len=32; needed max_draft_len at most 31.* 33 or"
    with pytest.raises(ConfigError, match=message):
        auto(max_draft_len=32)
    with pytest.raises(ConfigError, match=message):
        longest_history("auto", 32)


def test_a_number_is_itself_and_a_model_without_states_takes_the_shortest() -> None:
    options = {"max_draft_len": 0, "state_dtype": "float32", "compute_capabilities": (HOPPER,)}
    assert resolve_history(5, NANO_9B, **options) == longest_history(5, 0) == 5  # type: ignore[arg-type]
    assert auto(tiny_geometry("*-"), HOPPER) == min(CANDIDATES)
    assert longest_history("auto", 0) == max(CANDIDATES)


def test_of_a_gated_delta_net_bytes_alone_decide() -> None:
    """Worked by hand: with T = 1 a step writes 1 / W of a state and reads (W + 1) / 2 rows; at 16 the sum is least."""
    layer = GatedDeltaNetGeometry(n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, d_conv=4)
    geometry = tiny_qwen_geometry("G", dtype="bfloat16", gated_delta_net=layer)
    state, row = 4 * 32 * 128 * 128, 2 * 2048 + 4 * 4096 + 4 * 32
    costs = {history: state / history + (history + 1) / 2 * row for history in CANDIDATES}
    assert auto(geometry) == auto(geometry, HOPPER) == min(costs, key=lambda history: costs[history]) == 16


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_draft_len", range(8))
@pytest.mark.parametrize("shape", GATED_DELTA_NET)
def test_the_layers_of_qwen_take_the_fewest_bytes_of_what_their_kernel_serves(
    shape: str, max_draft_len: int, state_dtype: StateDtype
) -> None:
    layer = GATED_DELTA_NET[shape]
    geometry = tiny_qwen_geometry("G", dtype="bfloat16", gated_delta_net=layer)
    options = {"max_draft_len": max_draft_len, "state_dtype": state_dtype}
    found = [auto(geometry, *targets, **options) for targets in ((), (HOPPER,), (AMPERE, ADA))]  # type: ignore[arg-type]
    fewest = cheapest(layer, max_draft_len, state_dtype)
    # The fast kernel is for histories up to 16.
    assert found == [fewest, min(fewest, 16), fewest]


def test_a_gated_delta_net_without_kernels_is_refused_on_a_device_alone() -> None:
    layer = GATED_DELTA_NET["qwen9b"].model_copy(update={"key_dim": 24})
    geometry = tiny_qwen_geometry("G", gated_delta_net=layer)
    with pytest.raises(UnsupportedError, match="key_dim a multiple of 16 from 16 to 128"):
        auto(geometry, HOPPER)
    with pytest.raises(UnsupportedError, match=r"compute capability: found 7\.5"):
        auto(tiny_qwen_geometry("G", gated_delta_net=GATED_DELTA_NET["qwen9b"]), 75)
    assert auto(geometry) in CANDIDATES, "the CPU needs no kernel"
