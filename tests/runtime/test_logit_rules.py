"""Bias, penalties and bans against a plain loop over tokens, and at every position of a window."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.helpers import decode_plan, decoding_request
from trtllm_replayssm import SamplingParams
from trtllm_replayssm.runtime.acceptance import judge
from trtllm_replayssm.runtime.logit_rules import Penalties, TokenMask, adjust_logits, allows
from trtllm_replayssm.runtime.logprobs import top_logprobs
from trtllm_replayssm.runtime.sampling import TokenRule, choose_tokens

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def penalties(
    tokens: Sequence[int], repetition: float, presence: float, frequency: float, num_ignored: int = 0
) -> Penalties:
    return Penalties(repetition, presence, frequency, np.array(tokens, dtype=np.int64), num_ignored)


def by_hand(
    logits: list[float], bias: Mapping[int, float], rule: Penalties | None, banned: frozenset[int]
) -> list[float]:
    adjusted = [logit + bias.get(token, 0.0) for token, logit in enumerate(logits)]
    if rule is not None:
        counted = Counter(rule.tokens.tolist()[rule.num_ignored :])
        for token in set(rule.tokens.tolist()):
            adjusted[token] *= 1 / rule.repetition if adjusted[token] > 0 else rule.repetition
        for token, count in counted.items():
            adjusted[token] -= rule.presence + rule.frequency * count
    return [-float("inf") if token in banned else logit for token, logit in enumerate(adjusted)]


ROW = st.tuples(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=3),
    st.none()
    | st.builds(
        penalties, TOKENS, st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2), num_ignored=st.integers(0, 12)
    ),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_each_row_is_adjusted_by_its_own_rules_alone(
    rows: list[tuple[list[float], dict[int, float], Penalties | None, frozenset[int]]],
) -> None:
    logits = torch.tensor([row[0] for row in rows])
    before = logits.clone()
    adjusted = adjust_logits(logits, *([row[i] for row in rows] for i in (1, 2, 3)))  # type: ignore[arg-type]
    torch.testing.assert_close(adjusted, torch.tensor([by_hand(*row) for row in rows]), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("huge", [1e38, 1e300, -1e300])
def test_no_bias_and_no_penalty_is_large_enough_for_a_nan(huge: float) -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0, 0.0]] * 3)
    hit = [penalties([2, 2], 1.0, huge, huge), penalties([1, 0], 1e-40, 0.0, 0.0), None]
    adjusted = adjust_logits(logits, [{}, {}, {0: huge, 1: huge}], hit, [frozenset()] * 3)
    assert adjusted.isfinite().all()
    rules = [TokenRule(1.0, 0, 1.0, 3, penalties=rule) for rule in hit[:2]]
    rules.append(TokenRule(1.0, 0, 1.0, 3, bias={3: huge}))
    tokens, _ = choose_tokens(logits, rules, [0, 0, 0])
    assert (tokens[0] == 2, tokens[2] == 3) == (huge < 0, huge > 0)


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 400).log()
    for min_p, kept in ((0.0, 4), (0.24, 4), (0.26, 3), (0.51, 2), (0.76, 1), (1.0, 1)):
        tokens, _ = choose_tokens(logits, [TokenRule(1.0, 0, 1.0, 5, min_p=min_p)] * 400, range(400))
        assert set(tokens) == set(range(kept)), f"min_p={min_p}"


def one_token(prompt: Sequence[int], generated: Sequence[int], params: SamplingParams, logits: torch.Tensor) -> int:
    request = decoding_request(0, 0, generated, prompt=prompt, params=params, seed=9)
    (verdict,) = judge(decode_plan([request]), logits[None, None])
    return verdict.new_token_ids[0]


RULES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4, "prompt_ignore_length": 2},
    {"frequency_penalty": 0.6, "prompt_ignore_length": 99},
    {"logit_bias": {2: 1.5, 3: -4}},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "min_tokens": 4},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_each_position_of_a_window_has_the_rules_of_the_tokens_before_it(
    rules: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, **rules)
    generator = torch.Generator().manual_seed(2)
    wins = 0
    for trial in range(40):
        logits = torch.randn(4, VOCAB, generator=generator)
        prompt, generated = [1, 2, trial % VOCAB], [3, trial % 5]
        plain: list[int] = []
        for j in range(4):
            plain.append(one_token(prompt, [*generated, *plain], params, logits[j]))
        request = decoding_request(0, 0, generated, prompt=prompt, params=params, seed=9)
        # The first two drafts are right, the third is not: what follows them is thrown away.
        drafts = (*plain[:2], (plain[2] + 1) % VOCAB)
        (verdict,) = judge(decode_plan([request], [drafts]), logits[None])
        assert list(verdict.new_token_ids) == plain[:3]
        wins += plain != [one_token(prompt, generated, params, row) for row in logits]
    assert "logit_bias" in rules or wins, "no draft changed what followed it: the test shows nothing"


def random_mask(seed: int, vocab_size: int) -> TokenMask:
    return np.random.default_rng(seed).integers(0, 2**32, size=-(-vocab_size // 32), dtype=np.uint32)


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 100])
def test_a_mask_takes_out_what_has_no_bit_and_nothing_from_other_rows(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    masks = [None, random_mask(1, vocab_size), None, random_mask(2, vocab_size)]
    found = adjust_logits(logits, [{}] * 4, [None] * 4, [frozenset()] * 4, masks)
    for row, mask in enumerate(masks):
        for token in range(vocab_size):
            is_allowed = mask is None or bool(int(mask[token // 32]) >> token % 32 & 1)
            assert is_allowed == (mask is None or allows(mask, token))
            assert found[row, token] == (logits[row, token] if is_allowed else float("-inf"))


@pytest.mark.gpu
def test_a_gpu_chooses_what_the_cpu_chooses() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = 4 * torch.randn(60, 1000, generator=generator)
    tokens = torch.randint(1000, (60, 300), generator=generator).numpy()
    kinds = [
        TokenRule(0.0, 0, 1.0, 1),
        TokenRule(0.0, 0, 1.0, 1, bias={3: 9.0, 4: -9.0}, penalties=penalties(tokens[0].tolist(), 1.2, 0.5, 0.1)),
        TokenRule(0.8, 50, 0.9, 1, min_p=0.01, banned=frozenset({1, 2}), sequence=3),
        TokenRule(1.0, 0, 1.0, 1, bias={3: 5.0}),
    ]
    rules = []
    for row in range(60):
        rule = kinds[row % 4]
        if row % 5 == 0:
            rule = replace(rule, mask=random_mask(row, 1000))
        if row % 3 == 0:
            rule = replace(rule, penalties=penalties(tokens[row].tolist(), 0.9, -0.5, 0.2, num_ignored=row))
        rules.append(rule)
    lists = [[getattr(rule, name) for rule in rules] for name in ("bias", "penalties", "banned", "mask")]
    adjusted = [adjust_logits(where, *lists).cpu() for where in (logits, logits.cuda())]
    torch.testing.assert_close(adjusted[0], adjusted[1], rtol=1e-6, atol=1e-5)
    (ours, ours_logprobs), (theirs, theirs_logprobs) = (
        choose_tokens(where, rules, range(60)) for where in (logits, logits.cuda())
    )
    assert ours == theirs
    assert ours_logprobs == pytest.approx(theirs_logprobs, abs=1e-5)
    wanted = [(None, 0, 2, 5)[row % 4] for row in range(60)]
    tops = [top_logprobs(where, ours, wanted) for where in (logits, logits.cuda())]
    for on_cpu, on_gpu in zip(*tops, strict=True):
        assert (on_cpu is None) == (on_gpu is None)
        for token, entry in (on_cpu or {}).items():
            assert on_gpu is not None and on_gpu[token].rank == entry.rank
            assert on_gpu[token].logprob == pytest.approx(entry.logprob, abs=1e-5)
