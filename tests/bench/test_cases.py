"""Shapes, cases, and cursors that the protocol can have."""

from pathlib import Path

import numpy as np
import pytest

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import BYTES_BETWEEN_USES, draw_cursors, make_cases, make_prefill_cases
from trtllm_replayssm.bench.shapes import GATED_DELTA_NET, Family, parse_shape
from trtllm_replayssm.builders.checkpoint.hf_config import parse_hf_config, read_json
from trtllm_replayssm.contract import flush_cycle, protocol
from trtllm_replayssm.contract.geometry import GatedDeltaNetGeometry, Mamba2Geometry, ReplayGeometry
from trtllm_replayssm.errors import ConfigError, ReplaySSMError


@pytest.mark.parametrize("history", [1, 8, 16, 32])
def test_a_decode_meets_every_cursor_position_equally_often(history: int) -> None:
    replay = ReplayGeometry(history=history)
    cursors = draw_cursors(replay, 37, cases.num_steps(replay), seed=1)
    pending = cursors.past_lengths - cursors.checkpoint_lengths
    assert (np.sort(pending, axis=0).T == np.arange(1, history + 1)).all()
    assert pending[0].tolist() == [1 + row % history for row in range(37)]
    assert cursors.flushes(replay).mean() == 1 / history
    assert cursors.mean_pending() == (1 + history) / 2


@pytest.mark.parametrize(("history", "max_draft_len"), [(16, 0), (16, 3), (8, 7), (4, 3), (32, 1)])
def test_cursors_are_steps_of_the_protocol(history: int, max_draft_len: int) -> None:
    replay = ReplayGeometry(history=history, max_draft_len=max_draft_len)
    c, f = draw_cursors(replay, 500, 24, seed=0)
    assert c.dtype == f.dtype == np.int32 and c.shape == f.shape == (24, 500)
    assert (f >= 1).all() and (f <= c).all() and (c - f <= history).all()
    accepted = c[1:] - c[:-1]
    assert accepted.min() == 1 and accepted.max() == replay.window
    _, expected = protocol.advance(c[:-1], f[:-1], accepted, history=history, max_draft_len=max_draft_len)
    assert (f[1:] == expected).all()
    assert len(set((c[0] % replay.ring_rows).tolist())) == replay.ring_rows, "every ring position occurs"


def test_cursors_of_longer_windows_are_stationary() -> None:
    replay = ReplayGeometry(history=16, max_draft_len=3)
    cursors = draw_cursors(replay, 4000, 64, seed=3)
    flushes, pending = cursors.flushes(replay), cursors.past_lengths - cursors.checkpoint_lengths
    # The mean of 1 + a leading run of at most three successes of 0.7.
    committed = (cursors.past_lengths[-1] - cursors.past_lengths[0]).mean() / 63
    assert committed == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3, rel=0.01)
    # A flush folds all pending tokens, so that in the long run as many are folded as committed.
    assert (flushes * pending).mean() == pytest.approx(committed, rel=0.01)
    for early, late in ((flushes[:16], flushes[-16:]), (pending[:16], pending[-16:])):
        assert early.mean() == pytest.approx(late.mean(), rel=0.02)


@pytest.mark.parametrize(("history", "max_draft_len"), [(8, 0), (16, 3), (32, 7), (4, 3)])
def test_drawn_cursors_flush_as_often_as_the_protocol_does_in_the_long_run(history: int, max_draft_len: int) -> None:
    replay = ReplayGeometry(history=history, max_draft_len=max_draft_len)
    cursors = draw_cursors(replay, 4000, 64, seed=3)
    expected = flush_cycle.flush_cycle(history, max_draft_len)
    assert cursors.flushes(replay).mean() == pytest.approx(expected.flush_fraction, rel=0.01)
    assert cursors.mean_pending() == pytest.approx(expected.mean_pending, rel=0.01)


def test_the_same_seed_draws_the_same_cursors() -> None:
    replay = ReplayGeometry(max_draft_len=3)
    one, same, other = (draw_cursors(replay, 9, 4, seed=seed).past_lengths for seed in (5, 5, 6))
    assert (one == same).all() and (one != other).any()


def test_between_two_uses_of_a_state_the_others_fill_the_cache() -> None:
    for num_bytes in (1, 2**20, 2**28 - 1, 2**28, 2**32):
        assert (cases.num_sets(num_bytes) - 1) * num_bytes >= BYTES_BETWEEN_USES


def test_cases_are_every_combination_once() -> None:
    made = make_cases(["nano9b", "64x64x128x8", "nano9b"], [8, 1], ["float32"], [0, 3], history=16)
    assert len(made) == 2 * 2 * 2
    assert str(made[0]) == "nano9b, float32 state, T = 1, batch 8"
    assert parse_shape("128x80x128x8") == parse_shape("nano9b")


def test_cases_of_the_other_family_have_its_shapes() -> None:
    made = make_cases(["qwen122b", "16x48x128x128", "32x32x64x64"], [1], ["bfloat16"], [3], history=16, family="gdn")
    assert [str(case) for case in made][0] == "qwen122b, bfloat16 state, T = 4, batch 1"
    assert made[1].geometry == parse_shape("qwen27b", "gdn")
    heads = [
        (m.n_key_heads, m.n_value_heads, m.key_dim, m.value_dim)
        for m in (case.geometry for case in made)
        if isinstance(m, GatedDeltaNetGeometry)
    ]
    assert heads == [(16, 64, 128, 128), (16, 48, 128, 128), (32, 32, 64, 64)]
    # Four numbers are a shape of either family.
    assert isinstance(parse_shape("16x32x128x128"), Mamba2Geometry)
    assert {case.shape for case in make_cases(batch_sizes=[1], history=16, family="gdn")} == set(GATED_DELTA_NET)


def test_the_shape_of_a_model_is_that_of_its_configuration() -> None:
    """The published config.json of Qwen3.5-9B and of Nemotron-Nano-9B-v2, as the builders read them."""
    data = Path(__file__).parents[1] / "data"
    qwen, nano = (
        parse_hf_config(read_json(data / name), {}).geometry.recurrence
        for name in ("qwen3_5_9b_config.json", "nemotron_nano_9b_v2_config.json")
    )
    assert (qwen, nano) == (parse_shape("qwen9b", "gdn"), parse_shape("nano9b"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shapes": ["nano"]}, "shape: found 'nano'; needed nano9b, nano30b, super120b or HEADSxHEAD_DIM"),
        ({"shapes": ["64x64x128"]}, "shape: found '64x64x128'"),
        ({"shapes": ["64x64x0x8"]}, "shape: found '64x64x0x8'"),
        ({"shapes": ["64x60x128x8"]}, "head_dim=60"),
        ({"shapes": ["64x64x128x7"]}, "n_groups=7"),
        (
            {"shapes": ["nano9b"], "family": "gdn"},
            "shape: found 'nano9b'; needed qwen9b, qwen27b, qwen122b or",
        ),
        ({"shapes": ["16x40x128x128"], "family": "gdn"}, "n_value_heads=40"),
        ({"shapes": ["16x32x24x128"], "family": "gdn"}, "key_dim=24"),
        ({"max_draft_lens": [8], "history": 32, "family": "gdn"}, "max_draft_len=8"),
        ({"batch_sizes": [0]}, "batch_sizes: found 0; needed 1 to 65535"),
        ({"state_dtypes": ["int8"]}, "state_dtype: found 'int8'; needed one of float32, float16, bfloat16"),
        ({"max_draft_lens": [8], "history": 32}, "max_draft_len=8"),
        ({"max_draft_lens": [-1]}, "max_draft_len: found -1"),
        ({"history": 3}, "history: found 3 with max_draft_len=3; needed at least 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ReplaySSMError) as caught:
        make_cases(**{"history": 16, **options})  # type: ignore[arg-type]
    assert sentence in str(caught.value)


def test_prefills_are_cases_with_prompts() -> None:
    made = make_prefill_cases(["nano9b"], [1, 8], ["float32"], 4096, history=16)
    assert [str(case) for case in made] == [
        f"nano9b, float32 state, prefill of 4096, batch {batch}" for batch in (1, 8)
    ]
    assert {case.tokens for case in made} == {4096}
    assert make_prefill_cases(["nano9b"], [1], ["float32"], 0, history=16) == ()
    with pytest.raises(ConfigError, match="prefill_tokens: found 8; needed 16 or more, or 0"):
        make_prefill_cases(["nano9b"], [1], ["float32"], 8, history=16)


def test_states_so_small_that_launches_get_too_many_are_refused() -> None:
    """Before anything is measured, though the cases before would take minutes."""
    with pytest.raises(ConfigError, match=r"1x16x32x1, bfloat16 state.*Raise batch_sizes"):
        make_cases(["super120b", "1x16x32x1"], [1], ["bfloat16"], [0], history=16)


def test_convolutions_of_too_few_channels_are_refused_with_their_steps() -> None:
    """They come after all steps: the refusal would cost what these took."""
    with pytest.raises(ConfigError, match=r"1x48x32x1.*Raise batch_sizes"):
        make_cases(["1x48x32x1"], [1], ["float32"], [0], history=1)


@pytest.mark.parametrize(("shape", "family"), [("1x16x32x1", "mamba2"), ("1x1x32x32", "gdn")])
def test_prefills_are_not_refused_for_what_steps_of_so_few_rows_would_take(shape: str, family: Family) -> None:
    """They need a launch for each set, not one for each step of a flush cycle; their batches are others, too."""
    make_cases([shape], [512], ["float32"], [0], history=16, family=family)
    with pytest.raises(ConfigError, match="launches"):
        make_cases([shape], [1], ["float32"], [0], history=16, family=family)
    assert len(make_prefill_cases([shape], [1, 8], ["float32"], history=16, family=family)) == 2


def test_states_of_every_width_that_there_are_kernels_for_are_measured() -> None:
    assert make_cases(["16x32x64x64"], [1], ["bfloat16"], [0], history=16, family="gdn")
