"""Tokens to text one at a time: whole characters, stop strings across token borders, cut before the stop."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from trtllm_replayssm.runtime.text_stream import TextStream


def byte_level_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_level_tokenizer()
# Two bytes of neighbouring characters in one token: borders of tokens and characters then do not meet.
MERGED = byte_level_tokenizer([("©", "Ã"), ("Ã", "©"), ("a", "b")])


def stream_of(tokenizer: FastTokenizer) -> TextStream:
    return TextStream(lambda ids: tokenizer.decode(list(ids)))


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@given(text=st.text(max_size=40))
def test_text_that_streams_equals_the_text_and_shows_no_broken_character(tokenizer: FastTokenizer, text: str) -> None:
    stream = stream_of(tokenizer)
    for token_id in tokenizer.encode(text).ids:
        stream.push(token_id)
        assert text.startswith(stream.text)
    stream.close()
    assert stream.text == text


@settings(max_examples=300)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_stream_as_the_tokenizer_decodes_them(token_ids: list[int]) -> None:
    stream = stream_of(BYTES)
    for token_id in token_ids:
        stream.push(token_id)
    stream.close()
    assert stream.text == BYTES.decode(token_ids)


def test_bytes_that_never_form_a_character_are_not_held_back_for_ever() -> None:
    stream = stream_of(BYTES)
    continuation = BYTES.encode("é").ids[1]
    for _ in range(100):
        stream.push(continuation)
    assert len(stream.text) > 90


def test_decoders_that_treat_the_first_token_specially_keep_the_spaces_between_words() -> None:
    words = ["▁the", "▁cat", "s", "▁sat"]
    tokenizer = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    stream = stream_of(tokenizer)
    pieces = []
    for token_id in (0, 1, 2, 3):
        before = stream.text
        stream.push(token_id)
        pieces.append(stream.text.removeprefix(before))
    assert pieces == ["the", " cat", "s", " sat"]


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string_to_be_completed(text: str, stop: list[str]) -> None:
    stream, stopped_by, read = stream_of(BYTES), None, 0
    for token_id in BYTES.encode(text).ids:
        stopped_by = stream.push(token_id, stop)
        read += 1
        if stopped_by:
            break
    ends = {text.find(string) + len(string) for string in stop if string in text}
    if not ends:
        assert stopped_by is None
        return
    seen = text[: min(ends)]
    assert read == len(seen.encode())
    assert stopped_by in stop and seen.endswith(stopped_by)
    assert stream.text == seen[: len(seen) - len(stopped_by)]


def test_a_stop_string_within_one_token_cuts_that_tokens_text() -> None:
    stream = TextStream(lambda ids: "".join(["one", " two. three", "!"][i] for i in ids))
    assert stream.push(0, [". "]) is None
    assert stream.push(1, [". "]) == ". "
    assert stream.text == "one two"


def test_of_two_stop_strings_in_one_token_the_earlier_wins_and_then_the_longer() -> None:
    for stop, expected in (([" b", "a"], "a"), (["a", "a b"], "a b")):
        stream = TextStream(lambda ids: "xa by" * len(ids))
        assert stream.push(0, stop) == expected
        assert stream.text == "x"


def test_a_stop_string_that_was_complete_before_it_counted_does_not_end_the_text() -> None:
    stream = stream_of(BYTES)
    ids = BYTES.encode("ab ab").ids
    assert [stream.push(token_id, ()) for token_id in ids[:2]] == [None, None]
    assert [stream.push(token_id, ["ab"]) for token_id in ids[2:]] == [None, None, "ab"]
    assert stream.text == "ab "


@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=24),
    st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_text_that_was_shown_stays_and_a_kept_stop_string_ends_it(text: str, stop: list[str], keeps_stop: bool) -> None:
    stream = TextStream(lambda ids: MERGED.decode(list(ids)), keeps_stop=keeps_stop)
    shown, stopped_by = [""], None
    for token_id in MERGED.encode(text).ids:
        stopped_by = stream.push(token_id, stop)
        if stopped_by:
            break
        shown.append(stream.settled(stop))
        # Held back is only what a stop string may begin with.
        held = stream.text.removeprefix(shown[-1])
        assert not held or any(string.startswith(held) and held != string for string in stop)
    if not stopped_by:
        stream.close()
        assert stream.text == text
    assert all(stream.text.startswith(earlier) for earlier in shown)
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    if stopped_by and keeps_stop:
        assert stream.text.endswith(stopped_by) and text.startswith(stream.text)


@settings(max_examples=300)
@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=12),
    st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_no_stop_string_is_overlooked_where_a_sequence_ends_within_a_character(
    text: str, stop: list[str], num_missing: int
) -> None:
    """What is held back for the rest of a character may hold a whole stop string."""
    ids = MERGED.encode(text).ids
    ids = ids[: len(ids) - num_missing]
    whole = MERGED.decode(ids)
    stream = stream_of(MERGED)
    stopped_by = next(filter(None, (stream.push(token_id, stop) for token_id in ids)), None) or stream.close(stop)
    ends = {whole.find(string) + len(string) for string in stop if string in whole}
    if not ends:
        assert (stopped_by, stream.text) == (None, whole)
        return
    assert stopped_by in stop and whole.startswith(stream.text + stopped_by)
    assert not any(string in stream.text for string in stop)


def test_a_kept_stop_string_is_cut_behind_and_not_the_token_that_completed_it() -> None:
    stream = TextStream(lambda ids: "".join(["one ", "two. ", "x. three"][i] for i in ids), keeps_stop=True)
    assert [stream.push(token_id, ["o. x.", ". x"]) for token_id in (0, 1)] == [None, None]
    assert stream.settled(["o. x.", ". x"]) == "one tw"
    assert stream.push(2, ["o. x.", ". x"]) == "o. x."
    assert stream.text == "one two. x."
