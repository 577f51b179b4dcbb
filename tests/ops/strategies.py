"""What hypothesis draws: shapes and types beyond those of real models."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.cases import DTYPES, GatedDeltaNetCase, Mamba2Case, ReplayCase

MIN_HEADS, MIN_OUTPUTS = 4, 16


def bounded(max_examples: int) -> settings:
    """The same examples on every machine, no time limit for one, nothing kept on disk."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@st.composite
def mamba2_cases(draw: st.DrawFn, types: tuple[str, ...] = ("float32",)) -> Mamba2Case:
    n_groups = draw(st.sampled_from((1, 2, 3, 8)))
    history = draw(st.sampled_from((1, 2, 8, 16, 32)))
    head_dim = draw(st.sampled_from((1, 3, 8, 64, 80)))
    # Errors are relative to the largest of H * P outputs. Of one head all cancel at once when dt (B . C) is near -D.
    fewest = -(-max(MIN_HEADS, MIN_OUTPUTS // head_dim) // n_groups)
    return Mamba2Case(
        name="random",
        n_heads=n_groups * draw(st.integers(fewest, fewest + 2)),
        head_dim=head_dim,
        d_state=draw(st.sampled_from((1, 2, 5, 16, 64))),
        n_groups=n_groups,
        history=history,
        max_draft_len=draw(st.integers(0, min(8, history) - 1)),
        activation=draw(st.sampled_from(types)),
        state=draw(st.sampled_from(types)),
        dt="float32" if draw(st.booleans()) else "",
        spare_ring_rows=draw(st.sampled_from((0, 0, 1, 7))),
    )


@st.composite
def gated_delta_net_cases(draw: st.DrawFn, types: tuple[str, ...] = ("float32",)) -> GatedDeltaNetCase:
    n_key_heads = draw(st.sampled_from((1, 2, 3)))
    history = draw(st.sampled_from((1, 2, 8, 16, 32)))
    value_dim = draw(st.sampled_from((1, 3, 8, 64)))
    # As above: of few outputs, all cancel at once now and then.
    fewest = -(-max(MIN_HEADS, MIN_OUTPUTS // value_dim) // n_key_heads)
    return GatedDeltaNetCase(
        name="random",
        n_key_heads=n_key_heads,
        n_value_heads=n_key_heads * draw(st.integers(fewest, fewest + 2)),
        key_dim=draw(st.sampled_from((2, 5, 16, 64))),
        value_dim=value_dim,
        history=history,
        max_draft_len=draw(st.integers(0, min(8, history) - 1)),
        activation=draw(st.sampled_from(types)),
        state=draw(st.sampled_from(types)),
        gate="float32" if draw(st.booleans()) else "",
        spare_ring_rows=draw(st.sampled_from((0, 0, 1, 7))),
    )


def cases(types: tuple[str, ...] = ("float32",)) -> st.SearchStrategy[ReplayCase]:
    """Any case of any recurrence."""
    return st.one_of(mamba2_cases(types), gated_delta_net_cases(types))


all_types = tuple(DTYPES)
seeds = st.integers(0, 2**20)
