"""Tokens from logits: greedy, temperature, top-k, top-p, and reproducible random numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.runtime import sampling
from trtllm_replayssm.runtime.sampling import TokenRule, choose_tokens, uniform

GREEDY = TokenRule(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def sampled(logits: list[float], count: int, **rule: float) -> torch.Tensor:
    """Draw at positions 0..count-1 and return how often each token came."""
    drawn = TokenRule(rule.get("temperature", 1.0), int(rule.get("top_k", 0)), rule.get("top_p", 1.0), 11)
    tokens, _ = choose_tokens(torch.tensor([logits]).expand(count, -1), [drawn] * count, range(count))
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Return the statistic and the bound that it exceeds once in ten thousand (Wilson and Hilferty 1931)."""
    live = probabilities > 0
    assert not counts[~live].any(), "a token of probability 0 was drawn"
    expected = probabilities[live] * counts.sum()
    statistic = ((counts[live] - expected) ** 2 / expected).sum().item()
    freedom = int(live.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic, bound


def test_greedy_takes_the_maximum_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -1.5, -0.5]])
    assert choose_tokens(logits, [GREEDY] * 3, [0] * 3)[0] == [1, 0, 3]


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0], [0.5, 2.0, -1.0]])
    cold = TokenRule(0.2, 1, 0.5, 0)
    _, logprobs = choose_tokens(logits, [GREEDY, cold], [0, 0])
    assert logprobs == pytest.approx([logits[0].log_softmax(-1)[1].item()] * 2, abs=1e-6)


def test_banned_tokens_are_never_chosen_and_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0]] * 40)
    before = logits.clone()
    rules = [TokenRule(0.0, 0, 1.0, 0, frozenset({0}))] + [TokenRule(1.0, 0, 1.0, 3, frozenset({0, 1}))] * 39
    tokens, _ = choose_tokens(logits, rules, [0, *range(39)])
    assert tokens == [1] + [2] * 39
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0]
    counts = sampled(logits, 6000, temperature=temperature)
    statistic, bound = chi_square(counts, (torch.tensor(logits) / temperature).softmax(-1))
    assert statistic < bound


def test_a_wrong_temperature_would_be_noticed() -> None:
    logits = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0]
    statistic, bound = chi_square(sampled(logits, 6000, temperature=1.0), (torch.tensor(logits) / 1.2).softmax(-1))
    assert statistic > bound


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    kept = torch.full((5,), float("-inf")).index_copy(0, torch.tensor([0, 3]), logits[[0, 3]])
    statistic, bound = chi_square(sampled(logits.tolist(), 4000, top_k=2), kept.softmax(-1))
    assert statistic < bound


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    assert sampled([0.1, 0.2, 0.15], 50, top_k=1, temperature=5.0).tolist() == [0, 50, 0]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.96, 4)):
        expected = torch.where(torch.arange(4) < kept, probabilities, 0.0)
        # The borders of the table lie on sums of fp32 probabilities: shift them clear of rounding.
        counts = sampled(probabilities.log().tolist(), 3000, top_p=top_p - 1e-4)
        statistic, bound = chi_square(counts, expected / expected.sum()) if kept > 1 else (0.0, 1.0)
        assert statistic < bound, f"top_p={top_p}"
        assert counts[kept:].sum() == 0 and counts[:kept].min() > 0


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert (sampled(logits, 500, top_k=2, top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (sampled(logits, 500, top_k=2, top_p=0.57) > 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-8])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    assert sampled([1e4, 2e4, -3e38, 1.5e4], 20, temperature=temperature).tolist() == [0, 20, 0, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True))
def test_a_token_does_not_depend_on_the_rows_beside_it(seed: int, rows: list[int]) -> None:
    logits = torch.randn(7, 33, generator=torch.Generator().manual_seed(5))
    rule = TokenRule(0.8, 10, 0.9, seed)
    together, _ = choose_tokens(logits, [rule] * 7, range(7))
    some, _ = choose_tokens(logits[rows], [rule] * len(rows), rows)
    assert some == [together[row] for row in rows]


@pytest.mark.parametrize("most", [1, 50, 101])
def test_rows_are_sampled_in_parts_as_all_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(3))
    rules = [TokenRule(0.9 * (row % 3 > 0), 0, 1.0, 5) for row in range(9)]
    together = choose_tokens(logits, rules, range(9))
    monkeypatch.setattr(sampling, "SAMPLED_LOGITS", most)
    assert choose_tokens(logits, rules, range(9)) == together


def test_random_numbers_differ_by_seed_sequence_and_position_and_repeat() -> None:
    numbers = {uniform(s, at, i) for s in (0, 1, -1, 2**63) for i in (0, 1, 5) for at in range(100)}
    assert len(numbers) == 1200 and all(0.0 <= number < 1.0 for number in numbers)
    assert uniform(3, 4, 5) == uniform(3, 4, 5)
    assert uniform(3, 4) == uniform(3, 4, 0)


def test_neighbouring_positions_are_uncorrelated() -> None:
    numbers = torch.tensor([uniform(9, position) for position in range(4000)])
    centred = numbers - 0.5
    correlation = (centred[:-1] * centred[1:]).mean() * 12
    assert abs(correlation) < 4 / math.sqrt(4000)
