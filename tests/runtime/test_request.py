"""When a request ends, and what the user then sees."""

from collections.abc import Sequence

import pytest

from tests.runtime.helpers import decoding_request
from trtllm_replayssm import SamplingParams
from trtllm_replayssm.runtime.outputs import FinishReason
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.text_stream import TextStream

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def running(end_ids: tuple[int, ...] = (), **rules: object) -> Request:
    params = SamplingParams.model_validate({"max_tokens": 8, **rules})
    request = decoding_request(0, 0, [], params=params, end_ids=end_ids)
    request.text = TextStream(lambda ids: "".join(LETTERS[i] for i in ids))
    return request


def feed(request: Request, text: str) -> Request:
    for letter in text:
        if request.is_finished:
            break
        request.append(LETTERS.index(letter), -0.5)
    return request


@pytest.mark.parametrize(
    ("rules", "end_ids", "text", "tokens", "reason", "stopped_by"),
    [
        ({}, (), "abcdefgh", "abcdefgh", "length", None),
        ({}, (2,), "ab", "abc", "stop", None),
        ({"stop_token_ids": (1,)}, (), "a", "ab", "stop", 1),
        ({"stop": "cd"}, (), "ab", "abcd", "stop", "cd"),
        ({"stop": ("zz", "bc")}, (), "a", "abc", "stop", "bc"),
        ({"stop": "cd", "min_tokens": 6}, (), "abcdab", "abcdabcd", "stop", "cd"),
        ({"stop": "gh"}, (), "abcdef", "abcdefgh", "stop", "gh"),
    ],
)
def test_a_request_ends_as_its_rules_say(
    rules: dict[str, object], end_ids: tuple[int, ...], text: str, tokens: str, reason: str, stopped_by: object
) -> None:
    source = "abcdabcd" if "min_tokens" in rules else LETTERS
    completion = feed(running(end_ids, **rules), source).output().outputs[0]
    assert "".join(LETTERS[i] for i in completion.token_ids) == tokens
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stopped_by)
    assert completion.cumulative_logprob == -0.5 * len(tokens)


def test_an_unfinished_request_has_no_reason() -> None:
    output = feed(running(), "abc").output()
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (False, None, "abc")


def test_a_request_ends_even_where_the_rest_of_its_text_cannot_be_had() -> None:
    def decode(ids: Sequence[int]) -> str:
        if is_broken:
            raise UnicodeError("no such token")
        return "\N{REPLACEMENT CHARACTER}" * bool(ids)  # the start of a character, which is held back

    is_broken = False
    request = running()
    request.text = TextStream(decode)
    request.append(0, -0.5)
    is_broken = True
    request.end("cancelled")
    completion = request.output().outputs[0]
    assert request.is_finished and (completion.finish_reason, completion.token_ids) == ("error", [0])
    assert "request 0: its text failed: UnicodeError" in str(request.output().error)


@pytest.mark.parametrize(
    ("rules", "tokens", "text", "reason", "stopped_by"),
    [
        ({"max_tokens": 2}, "ab", "a", "stop", "b"),
        ({"max_tokens": 2, "include_stop_str_in_output": True}, "ab", "ab", "stop", "b"),
        ({"stop_token_ids": (25,)}, "abz", "a", "stop", "b"),
        ({"max_tokens": 3, "min_tokens": 3, "stop_token_ids": (25,)}, "abz", "a", "stop", "b"),
        ({"max_tokens": 2, "stop": "c"}, "ab", "ab\N{REPLACEMENT CHARACTER}", "length", None),
    ],
)
def test_a_stop_string_in_text_that_was_held_back_to_the_end_ends_the_request(
    rules: dict[str, object], tokens: str, text: str, reason: str, stopped_by: object
) -> None:
    request = running((), **{"stop": "b", **rules})
    # With the letter comes the start of a character, whose rest never does.
    request.text = TextStream(
        lambda ids: "".join(LETTERS[i] + "\N{REPLACEMENT CHARACTER}" * (i == 1) for i in ids if i < 25),
        keeps_stop=request.params.include_stop_str_in_output,
    )
    completion = feed(request, tokens).output().outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stopped_by)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_a_request_that_others_end_keeps_their_reason(reason: FinishReason) -> None:
    request = running(stop="b")
    request.text = TextStream(lambda ids: "ab\N{REPLACEMENT CHARACTER}" * bool(ids))
    feed(request, "b").end(reason)
    completion = request.output().outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (reason, None)


def test_end_and_stop_tokens_are_banned_before_min_tokens() -> None:
    request = running((2,), min_tokens=3, stop_token_ids=(5,))
    assert [request.banned_after(drafts) for drafts in ((), (1, 1), (1, 1, 1))] == [{2, 5}, {2, 5}, set()]
    request.token_ids.append(0)
    assert [request.banned_after(drafts) for drafts in ((), (1,), (1, 1))] == [{2, 5}, {2, 5}, set()]


@pytest.mark.parametrize(
    ("generated", "drafts", "banned"),
    [
        ((), (), {9}),  # the prompt ends with 2, 3
        ((4,), (), set()),
        ((), (2,), {3}),
        ((2,), (3,), {9}),
        ((1, 2, 3), (), {9}),
        ((3,), (3, 2), {3}),
        ((7,), (1, 2, 3, 7), set()),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_where_the_others_are_there(
    generated: tuple[int, ...], drafts: tuple[int, ...], banned: set[int]
) -> None:
    request = decoding_request(0, 0, generated, prompt=(1, 2, 3))
    request.bad_words = ((6,), (1, 2, 3, 9), (2, 3, 9), (2, 3), (9, 9, 9, 9, 9, 9, 9, 9, 9))
    assert request.banned_after(drafts) == banned | {6}


def test_the_sequence_has_the_prompt_the_generated_tokens_and_the_drafts() -> None:
    request = decoding_request(0, 0, (7, 8), prompt=(1, 2))
    assert request.sequence().tolist() == [1, 2, 7, 8]
    assert request.sequence((5,)).tolist() == [1, 2, 7, 8, 5]
