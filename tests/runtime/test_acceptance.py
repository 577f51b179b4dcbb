"""The verdict on a window: greedy match, and rejection sampling that leaves the distribution as it is."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.helpers import decode_plan, decoding_request, make_request
from tests.runtime.test_sampling import chi_square
from trtllm_replayssm import SamplingParams
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.acceptance import count_accepted, judge
from trtllm_replayssm.runtime.step import RowPlan, StepPlan


def one_hot_logits(tokens: list[list[int]], vocab_size: int = 10) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float()


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_the_accepted_drafts_are_the_longest_matching_prefix(drafts: list[int], targets: list[int]) -> None:
    kept = count_accepted(drafts, targets[: len(drafts) + 1])
    assert 1 <= kept <= 1 + len(drafts)
    assert drafts[: kept - 1] == targets[: kept - 1]
    assert kept == 1 + len(drafts) or drafts[kept - 1] != targets[kept - 1]


def test_each_row_keeps_its_own_matching_drafts_and_one_token_more() -> None:
    requests = [decoding_request(i, slot) for i, slot in enumerate((0, 2, 3))]
    plan = decode_plan(requests, [(4, 5), (4, 9), ()])
    logits = one_hot_logits([[4, 5, 6], [0, 0, 0], [4, 5, 6], [8, 1, 1]])
    verdicts = judge(plan, logits)
    assert [v.new_token_ids for v in verdicts] == [(4, 5, 6), (4, 5), (8,)]
    assert [v.num_accepted_tokens for v in verdicts] == [3, 2, 1]
    assert all(len(v.logprobs) == len(v.new_token_ids) for v in verdicts)


def test_a_prompt_piece_stays_whole_and_only_the_last_brings_a_token() -> None:
    rows = [RowPlan(make_request(), 3, (1, 2, 3), 0, is_sampled) for is_sampled in (False, True)]
    first, last = (
        judge(StepPlan("prompt", (row,), first_slot=3, num_rows=1), one_hot_logits([[6]]))[0] for row in rows
    )
    assert (first.num_accepted_tokens, first.new_token_ids) == (3, ())
    assert (last.num_accepted_tokens, last.new_token_ids) == (3, (6,))


def test_min_tokens_bans_the_end_within_the_window_only_as_long_as_needed() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, temperature=0.0)
    request = decoding_request(0, 0, [7], params=params, end_ids=[2])
    # One token is there, so the window's first two may not end the request and its third may.
    logits = one_hot_logits([[2, 2, 2]]) + one_hot_logits([[4, 4, 4]]) * 0.5
    assert judge(decode_plan([request], [(4, 4)]), logits)[0].new_token_ids == (4, 4, 2)


def test_logits_that_are_not_finite_end_their_request_and_no_other() -> None:
    logits = one_hot_logits([[3, 4], [3, 4], [3, 4]])
    logits[1, 1] = float("nan")  # behind a draft that is rejected or not
    for draft, is_refused in ((3, True), (5, False)):
        requests = [decoding_request(4 + slot, slot) for slot in range(3)]
        verdicts = judge(decode_plan(requests, [(3,), (draft,), (9,)]), logits)
        assert [verdict.error is not None for verdict in verdicts] == [False, is_refused, False]
        assert [verdict.new_token_ids for verdict in verdicts] == [(3, 4), (3,), (3,)]
        assert [verdict.num_accepted_tokens for verdict in verdicts] == [2, 1, 1]
        if is_refused:
            assert isinstance(verdicts[1].error, RequestError)
            assert re.search(r"request 5: .*not finite at position 5", verdicts[1].error.message)


def test_without_a_first_token_nothing_of_a_window_stays() -> None:
    logits = one_hot_logits([[3, 4]])
    logits[0, 0] = float("nan")
    (verdict,) = judge(decode_plan([decoding_request(0, 0)], [(3,)]), logits)
    assert verdict.error is not None and (verdict.num_accepted_tokens, verdict.new_token_ids) == (0, ())


def test_a_rule_that_fails_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [decoding_request(i, i) for i in range(3)]

    def failing(drafts: object = ()) -> frozenset[int]:
        raise LookupError("no such grammar")

    monkeypatch.setattr(requests[1], "banned_after", failing)
    verdicts = judge(decode_plan(requests), one_hot_logits([[3], [4], [5]]))
    assert [verdict.new_token_ids for verdict in verdicts] == [(3,), (), (5,)]
    assert "request 1: its sampling rules failed: LookupError: no such grammar" in str(verdicts[1].error)


def test_rejection_sampling_leaves_the_distribution_unchanged() -> None:
    count, draft = 8000, 2
    first = torch.tensor([0.3, 0.05, 0.35, 0.2, 0.1])
    second = torch.tensor([0.1, 0.4, 0.1, 0.1, 0.3])
    params = SamplingParams(temperature=1.0, max_tokens=9)
    requests = [decoding_request(i, i, params=params, seed=1000 + i) for i in range(count)]
    logits = torch.stack([first, second]).log().expand(count, 2, 5)
    verdicts = judge(decode_plan(requests, [(draft,)] * count), logits)

    emitted = torch.tensor([v.new_token_ids[0] for v in verdicts])
    statistic, bound = chi_square(emitted.bincount(minlength=5), first)
    assert statistic < bound, "the first token does not follow the target"

    accepted = torch.tensor([v.num_accepted_tokens == 2 for v in verdicts])
    assert torch.equal(accepted, emitted == draft)
    rate = torch.stack([accepted.sum(), (~accepted).sum()])
    statistic, bound = chi_square(rate, torch.stack([first[draft], 1 - first[draft]]))
    assert statistic < bound, "drafts are not accepted with the target's probability"

    residual = first.clone()
    residual[draft] = 0.0
    statistic, bound = chi_square(emitted[~accepted].bincount(minlength=5), residual / residual.sum())
    assert statistic < bound, "after a rejection the token does not follow the residual"

    bonus = torch.tensor([v.new_token_ids[1] for v in verdicts if v.num_accepted_tokens == 2])
    statistic, bound = chi_square(bonus.bincount(minlength=5), second)
    assert statistic < bound, "the token after an accepted draft does not follow the target"


def test_the_chi_square_test_would_notice_a_draft_that_is_favoured() -> None:
    first = torch.tensor([0.3, 0.05, 0.35, 0.2, 0.1])
    biased = first * torch.tensor([1.0, 1.0, 1.15, 1.0, 1.0])
    statistic, bound = chi_square((biased / biased.sum() * 8000).round(), first)
    assert statistic > bound
