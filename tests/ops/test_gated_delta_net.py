"""``ops.gated_delta_net`` where it differs from the other recurrences: exactness over length, and hostile inputs."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.cases import GATED_DELTA_NET_FP32_CASES, GatedDeltaNetCase
from tests.ops.driver import Row, int32, relative_error
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver, Window
from tests.oracle.gated_delta_net import GatedDeltaNetSequence
from trtllm_replayssm import ops

T4 = GATED_DELTA_NET_FP32_CASES[1]


def sequential(driver: GatedDeltaNetDriver, precision: type[np.floating]) -> GatedDeltaNetSequence:
    """Return the plain recurrence of the driver's weights, token by token, in a precision."""
    A_log, dt_bias = (driver.weights[name].numpy().astype(precision) for name in ("A_log", "dt_bias"))
    case = driver.case
    state = np.zeros((case.n_value_heads, case.key_dim, case.value_dim), precision)
    return GatedDeltaNetSequence(A_log, dt_bias, case.key_dim, case.value_dim, state)


def tokens_of(window: Window, kept: int, precision: type[np.floating]) -> list[np.ndarray]:
    return [part[0, :kept].float().numpy().astype(precision) for part in window]


class LongLife(NamedTuple):
    """How far checkpoints were from the sequential recurrence, flush by flush: in fp32, and in fp64."""

    to_fp32: list[float]
    to_fp64: list[float]

    def quarters(self) -> list[float]:
        """Return the mean error to fp64 of each quarter of the life."""
        return [float(np.mean(part)) for part in np.array_split(self.to_fp64, 4)]


def long_life(driver: GatedDeltaNetDriver, num_tokens: int) -> LongLife:
    """Run full windows, any number of their tokens kept, until so many are committed, and hold every checkpoint.

    The first head forgets over tens of thousands of tokens, the second over a few.
    """
    driver.weights = {"A_log": torch.tensor([-4.0, 0.0]), "dt_bias": torch.tensor([-7.0, -1.0])}
    in_fp32, in_fp64 = sequential(driver, np.float32), sequential(driver, np.float64)
    life, T = LongLife([], []), driver.case.window
    while driver.past[0] < num_tokens:
        window, kept = driver.make_window([T], T), int(driver.rng.integers(0, T + 1))
        is_flush = driver.is_due(0)
        driver.call([Row(0, T, kept)], window)
        if is_flush:
            state = driver.pools["ssm_state"][0]
            life.to_fp32.append(relative_error(state, in_fp32.state))
            life.to_fp64.append(relative_error(state, in_fp64.state))
        in_fp32.run(*tokens_of(window, kept, np.float32))
        in_fp64.run(*tokens_of(window, kept, np.float64))
        driver.commit([Row(0, T, kept)], is_prefill=False)
    print(f"to fp32 {max(life.to_fp32):.1e}, to fp64 {max(life.to_fp64):.1e}, quarters {life.quarters()}")  # noqa: T201
    return life


def assert_exact_over_length(life: LongLife, case: GatedDeltaNetCase) -> None:
    """Within the bound of the state's type, which for fp32 is 1e-5, at every flush, and no worse at the end."""
    bound = case.bound("cpu").checkpoint
    assert bound == 1e-5 or case.state != "float32"
    assert max(life.to_fp32) <= bound and max(life.to_fp64) <= bound
    quarters = life.quarters()
    assert quarters[3] <= 1.5 * quarters[1], "the error grows with length"


@pytest.mark.parametrize(
    ("activation", "state"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_checkpoint_after_16k_tokens_is_that_of_the_sequential_recurrence(activation: str, state: str) -> None:
    """Windows of 8, thousands of flushes: the error neither exceeds its bound nor grows."""
    case = GatedDeltaNetCase("16k", 1, 2, 16, 16, 16, 7, activation, state)
    life = long_life(GatedDeltaNetDriver(case, num_slots=1, seed=16), 16_384)
    assert len(life.to_fp64) > 1000
    assert_exact_over_length(life, case)


Spoil = Callable[[Window, torch.Generator], Window]


def almost_all_of_v_is_kept(window: Window) -> Window:
    """Beta near 1 and g near 0: the state neither forgets nor averages."""
    return window._replace(a=window.a - 25.0, b=window.b + 10.0)


def scaled(part: torch.Tensor, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Multiply every vector by 10^-exponent .. 10^exponent."""
    exponents = exponent * (2 * torch.rand(part.shape[:-1], generator=generator) - 1)
    return part * 10 ** exponents[..., None]


def with_zeros(part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(part.shape[:-1], generator=generator)[..., None] < 0.3, 0.0, part)


def nearly_parallel_keys(window: Window, generator: torch.Generator) -> Window:
    return almost_all_of_v_is_kept(window)._replace(k=1 + 1e-3 * window.k, q=window.q.abs())


def one_key_for_all_tokens(window: Window, generator: torch.Generator) -> Window:
    return almost_all_of_v_is_kept(window)._replace(k=torch.ones_like(window.k), q=window.q.abs())


def overwriting_without_decay(window: Window, generator: torch.Generator) -> Window:
    return almost_all_of_v_is_kept(window)


def huge_and_tiny_keys_and_queries(window: Window, generator: torch.Generator) -> Window:
    return window._replace(k=scaled(window.k, 18, generator), q=scaled(window.q, 18, generator))


def huge_and_tiny_values(window: Window, generator: torch.Generator) -> Window:
    return window._replace(v=scaled(window.v, 4, generator))


def values_of_all_sizes_on_nearly_parallel_keys(window: Window, generator: torch.Generator) -> Window:
    return huge_and_tiny_values(nearly_parallel_keys(window, generator), generator)


def zero_vectors(window: Window, generator: torch.Generator) -> Window:
    q, k, v = (with_zeros(part, generator) for part in window[:3])
    return window._replace(q=q, k=k, v=v)


def all_or_nothing_decays(window: Window, generator: torch.Generator) -> Window:
    """A large exponent beside small ones, which a difference of prefix sums would lose."""
    a = torch.where(torch.rand(window.a.shape, generator=generator) < 0.2, 300.0, window.a)
    return window._replace(a=a, k=window.k.abs(), q=window.q.abs())


HOSTILE: tuple[Spoil, ...] = (
    nearly_parallel_keys,
    one_key_for_all_tokens,
    overwriting_without_decay,
    huge_and_tiny_keys_and_queries,
    huge_and_tiny_values,
    values_of_all_sizes_on_nearly_parallel_keys,
    zero_vectors,
    all_or_nothing_decays,
)


# Values that cancel stand side by side in the ring until they are folded, and every token sums over them again; the
# sequential recurrence rounds what is left of them once. Measured below 4.
ILL_CONDITIONED = 8.0


def rounded(window: Window, case: GatedDeltaNetCase) -> Window:
    """To the types that the op takes: hostile inputs are made in fp32 as well."""
    vectors = (part.to(case.activation_dtype) for part in window[:3])
    return Window(*vectors, *(part.to(case.gate_dtype) for part in window[3:]))


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_hostile_inputs_cost_no_more_than_fp32_costs_the_plain_recurrence(spoil: Spoil) -> None:
    """Within the bounds of all inputs; where those are ill-conditioned, near the sequential fp32 recurrence."""
    driver = GatedDeltaNetDriver(T4, num_slots=1, seed=3)
    in_fp32, in_fp64 = sequential(driver, np.float32), sequential(driver, np.float64)
    errors: dict[str, list[float]] = {"output": [], "checkpoint": []}
    bounds: dict[str, list[float]] = {"output": [T4.bound("cpu").output], "checkpoint": [T4.bound("cpu").checkpoint]}
    for step in range(160):
        seq_len = 150 if step % 40 == 20 else T4.window
        window = spoil(driver.make_window([seq_len], seq_len), driver.generator)
        kept = seq_len if seq_len > T4.window else step % 5
        o = driver.run([Row(0, seq_len, kept)], seq_len, window)
        rounded = torch.tensor(in_fp32.run(*tokens_of(window, kept, np.float32)))
        expected = in_fp64.run(*tokens_of(window, kept, np.float64))
        errors["output"].append(relative_error(o[0, :kept], expected))
        bounds["output"].append(ILL_CONDITIONED * relative_error(rounded, expected))
        bounds["checkpoint"].append(
            ILL_CONDITIONED * relative_error(torch.tensor(in_fp32.state)[None], in_fp64.state[None])
        )
    errors["checkpoint"] = [driver.checkpoint_error]
    for what, found in errors.items():
        print(f"{what}: {max(found):.1e}, bound {max(bounds[what]):.1e}")  # noqa: T201
        assert max(found) <= max(bounds[what]), f"{what}: {max(found):.1e}, bound {max(bounds[what]):.1e}"
    assert driver.flushes > 20


def test_a_forget_gate_without_bound_empties_the_state_and_a_closed_one_keeps_it() -> None:
    """exp(-inf) = 0 and sigmoid(-inf) = 0 are limits, not faults; nothing turns into NaN."""
    driver = GatedDeltaNetDriver(T4, num_slots=1, seed=5)
    drive_plainly(driver, 7)
    window = driver.make_window([4], 4)
    window.a[0, 1] = torch.inf
    window.b[0, 2:] = -torch.inf
    o = driver.run([Row(0, 4, 4)], 4, window)
    k, q = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (window.k[0, 1], window.q[0, 1]))
    fresh = (k * q).sum(-1).repeat_interleave(2)[:, None] * window.b[0, 1].sigmoid()[:, None] * window.v[0, 1]
    torch.testing.assert_close(o[0, 1], fresh * T4.key_dim**-0.5, rtol=1e-5, atol=1e-6)
    drive_plainly(driver, 12)
    driver.assert_within_bounds()


def drive_plainly(driver: GatedDeltaNetDriver, num_steps: int) -> None:
    for step in range(num_steps):
        driver.run([Row(0, 4, 1 + step % 4)], 4)


def test_beta_one_replaces_what_the_state_says_of_a_key() -> None:
    driver = GatedDeltaNetDriver(T4, num_slots=1, seed=5)
    drive_plainly(driver, 20)
    window = driver.make_window([1], 4)
    window = window._replace(b=torch.full_like(window.b, torch.inf), q=window.k)
    o = driver.run([Row(0, 1, 1)], 4, window)
    torch.testing.assert_close(o[0, 0] * T4.key_dim**0.5, window.v[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_gates_are_exact_from_one_end_to_the_other(sign: float) -> None:
    """Softplus on both sides of its guard at 20, and beta where 1 - beta is all that is left."""
    driver = GatedDeltaNetDriver(T4, num_slots=1, seed=7)
    driver.weights = {"A_log": torch.full((4,), -3.0), "dt_bias": torch.zeros(4)}
    driver.sequences[0] = driver.new_sequence()
    for step in range(40):
        window = driver.make_window([4], 4)
        window = window._replace(a=torch.full_like(window.a, sign * (step - 12.0)), b=window.b + sign * (step - 20.0))
        window = window._replace(q=window.q.abs(), k=window.k.abs())
        driver.run([Row(0, 4, 4)], 4, window)
    driver.assert_within_bounds()


def test_where_the_flushes_fall_does_not_matter() -> None:
    """The same tokens at five histories: one checkpoint, up to the rounding of differently ordered sums."""
    states = []
    for history in (1, 2, 7, 16, 32):
        driver = GatedDeltaNetDriver(GatedDeltaNetCase("histories", 2, 4, 16, 8, history, 0, "float32"), seed=2)
        for _ in range(80):
            driver.run([Row(0, 1, 1)], 1)
        driver.run([Row(0, 0, 0)], 2)
        states.append(driver.pools["ssm_state"][:1])
    for state in states[1:]:
        assert relative_error(state, states[0].double().numpy()) < 1e-6


def test_value_heads_that_share_a_key_do_not_mix() -> None:
    """Heads with the same key, value and gates have the same outputs; one of them changed, the others keep theirs."""
    case = GatedDeltaNetCase("shared", 1, 3, 16, 8, 16, 3, "float32")
    outputs = []
    for factor in (1.0, 2.0):
        driver = GatedDeltaNetDriver(case, num_slots=1, seed=2)
        driver.weights = {name: weight[:1].repeat(3) for name, weight in driver.weights.items()}
        driver.sequences[0] = driver.new_sequence()
        for _ in range(12):
            window = driver.make_window([4], 4)
            v, a, b = (part[:, :, :1].repeat_interleave(3, dim=2) for part in (window.v, window.a, window.b))
            v[:, :, 2] *= factor
            outputs.append(driver.run([Row(0, 4, 3)], 4, window._replace(v=v, a=a, b=b)))
    for plain, changed in zip(outputs[:12], outputs[12:], strict=True):
        torch.testing.assert_close(plain[:, :, 0], plain[:, :, 1], rtol=0, atol=0)
        torch.testing.assert_close(plain[:, :, :2], changed[:, :, :2], rtol=0, atol=0)
        torch.testing.assert_close(2 * plain[:, :, 2], changed[:, :, 2])


def test_the_models_own_code_computes_the_same() -> None:
    """A prompt by transformers' chunked prefill, then token by token: outputs and final state."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    driver = GatedDeltaNetDriver(GatedDeltaNetCase("model", 2, 4, 32, 16, 8, 0, "float32"), num_slots=1, seed=4)
    prompt, token = driver.make_window([100], 100), driver.make_window([1], 1)
    theirs = None
    for window, run in ((prompt, qwen.torch_chunk_gated_delta_rule), (token, qwen.torch_recurrent_gated_delta_rule)):
        n = window.q.shape[1]
        o = driver.run([Row(0, n, n)], n, window)
        g = -driver.weights["A_log"].exp() * torch.nn.functional.softplus(window.a + driver.weights["dt_bias"])
        expected, theirs = run(
            *window[:3],
            g=g,
            beta=window.b.sigmoid(),
            initial_state=theirs,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=2e-6)
    driver.run([Row(0, 0, 0)], 2)  # folds the last token
    torch.testing.assert_close(driver.pools["ssm_state"], theirs, rtol=1e-4, atol=2e-6)


def test_lengths_of_padding_rows_are_not_looked_at_and_those_of_others_are() -> None:
    driver = GatedDeltaNetDriver(T4, num_slots=2)
    tensors = driver.tensors([Row(-1, 4, 0), Row(1, 2, 2)], driver.make_window([0, 2], 4))
    o = ops.gated_delta_net(**tensors, history=8, max_draft_len=3)
    assert (o[0] == 0).all() and (o[1, 2:] == 0).all() and o[1, :2].abs().min() > 0
    with pytest.raises(ValueError, match=r"past_lengths\[1\]: found -1"):
        ops.gated_delta_net(**(tensors | {"past_lengths": int32([-7, -1])}), history=8, max_draft_len=3)
