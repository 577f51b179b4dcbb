"""Guided decoding: masks are those of the language, drafts are followed and taken back, texts are what was asked."""

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from tests.tiny_models import FIRST_BYTE_TOKEN, make_nemotron_h, make_qwen
from trtllm_replayssm import LLM, GuidedDecodingParams, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime import guided
from trtllm_replayssm.runtime.guided import Grammars
from trtllm_replayssm.runtime.logit_rules import allows

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RULES: dict[str, Any] = {"max_tokens": 230}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    is_right: bool
    number: Literal[1, 22]


class Unwritable(BaseModel):
    of_code: Callable[[], int]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    to = tmp_path_factory.mktemp("guided") / "hf"
    if request.param == "qwen3_5":
        return make_qwen(to, pattern="G*", tokenizer=True)
    return make_nemotron_h(to, pattern="M*-M", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_batch_size=3, max_seq_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[LLM]:
    with LLM(
        folder,
        device="cpu",
        max_batch_size=3,
        max_seq_len=256,
        speculative_config=NGramDecodingConfig(max_draft_len=3, adaptive=False),
    ) as opened:
        yield opened


def grammars_of(llm: LLM) -> Grammars:
    assert llm.tokenizer is not None
    return Grammars(llm.tokenizer, llm.geometry)


def allowed(mask: Any, vocab_size: int) -> set[int]:
    return {token_id for token_id in range(vocab_size) if allows(mask, token_id)}


def test_masks_are_those_of_the_language_and_drafts_leave_no_trace(llm: LLM) -> None:
    assert llm.tokenizer is not None
    vocab_size = llm.geometry.vocab_size
    texts = {a + b for a, b in product(("ab", "ac"), ("d", "dd"))} | {"x"}
    state = grammars_of(llm).start(GuidedDecodingParams(regex="(ab|ac)d{1,2}|x"), frozenset({END}))
    token_of = {letter: llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdx"}

    def expected(prefix: str) -> set[int]:
        following = {text[len(prefix)] for text in texts if text.startswith(prefix) and text != prefix}
        return {token_of[letter] for letter in following} | ({END} if prefix in texts else set())

    prefix = ""
    for letter in "acd":
        for drafts in ("", "a", "ab", "abd", "x", "dd", "cdd", "bd", "zz"[:0]):
            tokens = [token_of[draft] for draft in drafts]
            masks = state.masks(tokens)
            assert len(masks) == 1 + len(drafts)
            for length, mask in enumerate(masks):
                known = prefix + drafts[:length]
                # Nothing is of use behind what is not allowed, or where no text can follow.
                is_dead = not any(text.startswith(known) for text in texts)
                is_done = length > 0 and expected(known) == {END}
                if mask is None:
                    assert (
                        is_dead
                        or is_done
                        or any(expected(prefix + drafts[:before]) == {END} for before in range(1, length))
                    )
                else:
                    assert allowed(mask, vocab_size) == expected(known)
        state.advance(token_of[letter])
        prefix += letter
    assert not state.is_complete
    state.advance(token_of["d"])
    assert state.is_complete
    with pytest.raises(RequestError, match="guided_decoding: found"):
        state.advance(token_of["a"])


def test_other_end_tokens_stand_in_for_the_models(llm: LLM) -> None:
    vocab_size, a = llm.geometry.vocab_size, FIRST_BYTE_TOKEN + 10
    state = grammars_of(llm).start(GuidedDecodingParams(regex="(?s:.*)"), frozenset({a, 300}))
    found = allowed(state.masks([])[0], vocab_size)
    assert {a, 300} <= found and END not in found
    none = grammars_of(llm).start(GuidedDecodingParams(regex="(?s:.*)"), frozenset())
    assert END not in allowed(none.masks([])[0], vocab_size)


def test_threads_that_bring_more_grammars_than_are_kept_do_not_take_one_anothers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread finds its grammar kept; before it notes the use, another's has pushed it out."""
    monkeypatch.setattr(guided, "_MAX_COMPILED", 1)
    grammars = grammars_of(llm)
    ours, theirs = GuidedDecodingParams(regex="a"), GuidedDecodingParams(regex="b")
    grammars.start(ours, frozenset())

    class Interrupted(OrderedDict[Any, Any]):
        def get(self, *key: Any) -> Any:
            found = super().get(*key)
            if key == (ours.source(),):
                thread = threading.Thread(target=grammars.start, args=(theirs, frozenset()))
                thread.start()
                thread.join()
            return found

    grammars._compiled = Interrupted(grammars._compiled)
    assert not grammars.start(ours, frozenset()).is_complete


def check(guide: GuidedDecodingParams, text: str) -> None:
    if guide.regex is not None:
        assert re.fullmatch(guide.regex, text)
    elif guide.grammar is not None:
        assert re.fullmatch("(no){0,4}yes", text)
    elif guide.json_object:
        assert isinstance(json.loads(text), dict)
    elif "is_right" in text:
        Answer.model_validate_json(text)
    else:
        value = json.loads(text)
        assert set(value) == {"name", "age", "tags"} and len(value["name"]) <= 5
        assert type(value["age"]) is int and 0 <= value["age"] <= 99
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bb"}


GUIDES = {
    "schema": GuidedDecodingParams(json=SCHEMA),
    "schema text": GuidedDecodingParams(json=json.dumps(SCHEMA)),
    "pydantic": GuidedDecodingParams(json=Answer),
    "regex": GuidedDecodingParams(regex="[a-c]{3,9}-[0-9]{1,6}x?"),
    "gbnf": GuidedDecodingParams(grammar='root ::= "yes" | "no" ("yes" | "no" ("yes" | "nonoyes"))'),
    "lark": GuidedDecodingParams(grammar='start: ("no" | "nono")? "yes"'),
    "object": GuidedDecodingParams(json_object=True),
}


@pytest.mark.parametrize("name", GUIDES)
def test_texts_are_what_was_asked_for_with_and_without_drafts(llm: LLM, drafting: LLM, name: str) -> None:
    guide = GUIDES[name]
    assert llm.tokenizer is not None
    blanks = llm.tokenizer.encode(" \t\r\n", add_special_tokens=False)
    # A random model likes blanks as much as anything; few make the texts end within max_tokens.
    options: dict[str, Any] = RULES | {"guided_decoding": guide, "logit_bias": dict.fromkeys(blanks, -60.0)}
    rules = [
        SamplingParams(**options, temperature=0.0),
        SamplingParams(**options, seed=4, top_k=50),
        SamplingParams(**options, seed=5, n=2),
        SamplingParams(max_tokens=20, seed=6),
    ]
    drafting.reset_metrics()
    outputs = llm.generate(["hello"] * 4, rules)
    for ours, theirs in zip(outputs, drafting.generate(["hello"] * 4, rules), strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    finished = [c for output in outputs[:3] for c in output.outputs if c.finish_reason == "stop"]
    # An object of any keys may be longer than there is room for.
    assert len(finished) == 4 or name == "object"
    for completion in finished:
        check(guide, completion.text)
    if name.startswith("schema"):
        assert drafting.metrics()["num_accepted_drafts"] > 0


def test_a_guided_greedy_token_is_the_likeliest_allowed_one_and_logprobs_stay_the_models(llm: LLM) -> None:
    rules = SamplingParams(
        max_tokens=3, temperature=0.0, logprobs=320, guided_decoding=GuidedDecodingParams(regex="[p-z]{3}")
    )
    guided = llm.generate("hello", rules).outputs[0]
    plain = llm.generate("hello", SamplingParams(max_tokens=1, temperature=0.0, logprobs=320)).outputs[0]
    assert llm.tokenizer is not None and guided.logprobs is not None and plain.logprobs is not None
    letters = {llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "pqrstuvwxyz"}
    assert guided.logprobs[0] == plain.logprobs[0]
    for token_id, entries in zip(guided.token_ids, guided.logprobs, strict=True):
        assert token_id == max(letters, key=lambda letter: entries[letter].logprob)


def test_other_rules_choose_among_what_is_allowed(llm: LLM) -> None:
    bias = {FIRST_BYTE_TOKEN + 1: 90.0, 300: 99.0}
    for options in ({"logit_bias": bias}, {"repetition_penalty": 3.0}, {"bad": ("b",)}, {"stop": ("c",)}):
        rules = SamplingParams(max_tokens=9, seed=1, guided_decoding=GuidedDecodingParams(regex="[a-c]{9}"), **options)
        completion = llm.generate("hello", rules).outputs[0]
        assert re.fullmatch("[abc]*", completion.text)
        if "bad" in options:
            assert re.fullmatch("[ac]{9}", completion.text)
        if "stop" in options:
            assert completion.stop_reason in (None, "c") and "c" not in completion.text


def test_a_text_that_may_end_or_go_on_ends_with_the_end_token_alone(llm: LLM) -> None:
    likely = {END: 200.0}
    guide = GuidedDecodingParams(regex="ab*")
    rules = SamplingParams(max_tokens=9, temperature=0.0, guided_decoding=guide, logit_bias=likely)
    completion = llm.generate("hello", rules).outputs[0]
    assert (completion.text, completion.token_ids[-1], completion.finish_reason) == ("a", END, "stop")
    longer = rules.model_copy(update={"min_tokens": 4})
    assert llm.generate("hello", longer).outputs[0].text == "abbb"
    endless = rules.model_copy(update={"ignore_eos": True})
    completion = llm.generate("hello", endless).outputs[0]
    assert (completion.text, completion.finish_reason) == ("a" + 8 * "b", "length")


def test_a_text_that_nothing_can_follow_ends_the_request_whatever_its_end_tokens_are(llm: LLM) -> None:
    rules = SamplingParams(max_tokens=9, guided_decoding=GuidedDecodingParams(regex="ab"), ignore_eos=True)
    completion = llm.generate("hello", rules).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", None)
    assert len(completion.token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "found nothing; needed one of"),
        ({"regex": "a", "json_object": True}, "found regex and json_object; needed one of"),
        ({"json": 3}, "found int; needed a JSON schema"),
        ({"json": {"enum": {1, 2}}}, "found a dict that is no JSON: .*set"),
        ({"json": {"const": float("nan")}}, "found a dict that is no JSON: .*range float"),
        ({"json": {"enum": ENDLESS}}, "found a dict that is no JSON: .*ircular"),
        ({"json": Unwritable}, "found a model that has no JSON schema: "),
        ({"jsn": "{}"}, "Known are json, regex, grammar, json_object"),
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuidedDecodingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(a"}, r"prompt 1: guided_decoding.regex: "),
        ({"json": "{"}, r"prompt 1: guided_decoding.json: "),
        ({"json": {"type": "strange"}}, r"prompt 1: guided_decoding.json: "),
        ({"grammar": "root ::= other"}, r"prompt 1: guided_decoding.grammar: "),
        ({"regex": r"[^\s\S]"}, r"guided_decoding.regex: found \w+; needed what some text can match. \[R001\]$"),
        ({"json": {"$ref": "#"}}, r"guided_decoding.json: found \w+; needed what some text can match. \[R001\]$"),
    ],
)
def test_a_grammar_with_an_error_is_refused_before_anything_runs(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    llm.reset_metrics()
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(guided_decoding=GuidedDecodingParams(**options))])
    assert "\n" not in str(caught.value)
    assert llm.metrics()["num_prompt_steps"] == 0


def test_without_the_library_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(folder, device="cpu", max_seq_len=64) as llm:
        with pytest.raises(ConfigError, match=re.escape(f"the extra guided, or: {guided.INSTALL}")):
            llm.generate("a", SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")))
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True)).finished


def test_without_a_tokenizer_there_is_no_text_to_guide(tmp_path: Path) -> None:
    with LLM(make_nemotron_h(tmp_path / "hf", pattern="M"), device="cpu", max_seq_len=64) as llm:
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            llm.generate([5], SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")))
