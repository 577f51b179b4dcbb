"""What pydantic finds, in our sentences."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from trtllm_replayssm import NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.contract.geometry import EngineLimits, Frozen
from trtllm_replayssm.errors import ConfigError, validation_text


class Outer(Frozen):
    limits: EngineLimits


LIMITS = {"max_batch_size": 1, "max_input_len": 8, "max_seq_len": 4, "max_num_tokens": 1}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "limits: found nothing; needed a value"),
        ({"limits": LIMITS}, "limits: max_input_len: found 8; needed at most max_seq_len (4)"),
        ({"limits": LIMITS | {"max_seq_len": "x"}}, "limits.max_seq_len: found 'x'; needed a valid integer.*"),
        ({"limits": LIMITS | {"max_seq_len": 9}, "limit": 1}, "limit: unknown key"),
    ],
    ids=["missing", "nested-rule", "nested-type", "unknown"],
)
def test_every_problem_names_its_field_what_was_found_and_what_is_needed(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(**values)
    pattern = text.replace("(", r"\(").replace(")", r"\)")
    assert re.fullmatch(pattern, validation_text(caught.value)), validation_text(caught.value)


@pytest.mark.parametrize(
    ("options", "values", "sentence"),
    [
        (SamplingParams, {"max_tokens": 0}, "max_tokens: found 0; needed greater than or equal to 1. [C001]"),
        (SamplingParams, {"max_tokens": "7"}, "max_tokens: found '7'; needed a valid integer. [C001]"),
        (
            SamplingParams,
            {"stop": ["a", ""]},
            "stop: found an empty string; it would end every request at once. [C001]",
        ),
        (SamplingParams, {"min_tokens": 9, "max_tokens": 3}, "min_tokens: found 9; needed at most max_tokens (3). ["),
        (SamplingParams, {"top_k": -1, "top_p": True}, "; top_p: found True; needed a valid number. [C001]"),
        (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty: found 0.0; needed greater than 0. [C001]"),
        (SamplingParams, {"presence_penalty": float("nan")}, "presence_penalty: found nan; needed a finite number"),
        (SamplingParams, {"min_p": 1.5}, "min_p: found 1.5; needed less than or equal to 1. [C001]"),
        (SamplingParams, {"logit_bias": {3: float("inf")}}, "logit_bias.3: found inf; needed a finite number. [C001]"),
        (SamplingParams, {"bad": ""}, "bad: found an empty string; needed text that is not to be generated. [C001]"),
        (SamplingParams, {"n": 2, "temperature": 0.0}, "n: found 2 with temperature 0; needed 1, for greedy sequences"),
        (SamplingParams, {"m": 2}, "m: unknown key. Known are max_tokens, min_tokens, temperature, "),
        (
            SamplingParams,
            {"max_new_tokens": 2, "min_new_tokens": 1, "m": 2},
            "unknown key. Did you mean max_tokens, min_tokens? Known are max_tokens, ",
        ),
        (ReplayConfig, {"enabled": "no"}, "enabled: found 'no'; needed a valid boolean. [C001]"),
        (
            NGramDecodingConfig,
            {"max_draft_len": 0},
            "max_draft_len: found 0; needed greater than or equal to 1. [C001]",
        ),
    ],
    ids=[
        *("bound", "type", "field-rule", "model-rule", "two", "repetition", "not-finite", "min-p", "bias", "bad", "n"),
        *("unknown", "unknown-near", "replay", "ngram"),
    ],
)
def test_a_users_options_are_refused_with_our_error(
    options: type[Frozen], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**values)
    assert sentence in str(caught.value)


def test_what_tensorrt_llm_leaves_open_is_the_default() -> None:
    always_given = {"max_tokens", "n", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"}
    always_given |= {"enable_block_reuse"}
    nothing: dict[str, Any] = dict.fromkeys(SamplingParams.model_fields.keys() - always_given)
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(bad="no", bad_token_ids=[3]) == SamplingParams(bad=("no",), bad_token_ids=(3,))  # type: ignore[arg-type]
    assert SamplingParams(stop="end", stop_token_ids=[3]) == SamplingParams(stop=("end",), stop_token_ids=(3,))  # type: ignore[arg-type]
