"""Prompt-lookup drafts against a brute-force search, and their cost."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm import NGramDecodingConfig
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter, NGramIndex


def brute_force(tokens: list[int], max_size: int, limit: int) -> list[int]:
    """Search the latest earlier occurrence of the longest suffix, and copy on from it token by token."""
    for size in range(min(max_size, len(tokens)), 0, -1):
        suffix = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                copied = list(tokens)
                for i in range(limit):
                    copied.append(copied[start + size + i])
                return copied[len(tokens) :]
    return []


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(0, 6), st.integers(0, 40))
def test_drafts_equal_a_brute_force_search(tokens: list[int], max_size: int, limit: int, split: int) -> None:
    index = NGramIndex(max_size)
    index.extend(tokens[:split])
    index.extend(tokens[split:])
    assert index.continuation(limit) == brute_force(tokens, max_size, limit)


def test_a_loop_is_continued_beyond_what_was_seen() -> None:
    index = NGramIndex(3)
    index.extend([9, 1, 2, 1, 2])
    assert index.continuation(5) == [1, 2, 1, 2, 1]


def test_the_longest_and_then_the_latest_occurrence_wins() -> None:
    index = NGramIndex(2)
    index.extend([1, 2, 30, 5, 2, 40, 1, 2, 50, 7, 2, 60, 1, 2])
    assert index.continuation(1) == [50]


def test_sequences_do_not_mix_and_an_ended_one_is_forgotten() -> None:
    drafter = NGramDrafter(NGramDecodingConfig(max_draft_len=2, max_matching_ngram_size=2))
    drafter.begin(1, [4, 5, 4])
    drafter.begin(2, [4, 6, 4])
    drafter.observe(2, [8, 4])
    assert drafter.propose({1: 9, 2: 9}) == {1: [5, 4], 2: [8, 4]}
    assert drafter.propose({1: 0, 2: 1}) == {2: [8]}
    drafter.end(1)
    drafter.begin(1, [3])
    assert drafter.propose({1: 5}) == {}


def test_indexing_does_not_slow_down_with_length() -> None:
    index = NGramIndex(3)
    started = time.process_time()
    for i in range(50_000):
        index.extend([i % 1000])
        index.continuation(4)
    assert time.process_time() - started < 5.0, "a search over the sequence for every token would take minutes"
