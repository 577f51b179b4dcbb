"""What ``generate`` takes as prompts and rules, and what it refuses; no model runs here."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_replayssm import SamplingParams
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.prompts import as_list, params_for, schedule


@pytest.mark.parametrize(
    ("inputs", "prompts", "is_single"),
    [
        ("text", ["text"], True),
        ([1, 2], [(1, 2)], True),
        ({"prompt": "text"}, ["text"], True),
        ({"prompt_token_ids": [1, 2]}, [(1, 2)], True),
        (np.array([1, 2]), [(1, 2)], True),
        (torch.tensor([1, 2]), [(1, 2)], True),
        ([[1, 2]], [(1, 2)], False),
        (["a", [1], {"prompt": "b"}, {"prompt_token_ids": (2,)}, range(3)], ["a", (1,), "b", (2,), (0, 1, 2)], False),
        (np.array([[1, 2], [3, 4]]), [(1, 2), (3, 4)], False),
        (torch.tensor([[1, 2], [3, 4]]), [(1, 2), (3, 4)], False),
        (torch.tensor([[1], [2]]), [(1,), (2,)], False),
        ([torch.tensor([5]), torch.tensor([6])], [(5,), (6,)], False),
        ([torch.tensor([5, 6])], [(5, 6)], False),
        ([torch.tensor(5), np.int64(6)], [(5, 6)], True),
        ({"prompt_token_ids": torch.tensor([5, 6])}, [(5, 6)], True),
    ],
    ids=repr,
)
def test_each_form_of_a_prompt_is_read(inputs: Any, prompts: list[Any], is_single: bool) -> None:
    assert as_list(inputs) == (prompts, is_single)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (7, "inputs: found int; needed text, token ids,"),
        (None, "inputs: found NoneType; needed"),
        (b"abc", "inputs: found bytes; needed"),
        (bytearray(b"abc"), "inputs: found bytearray; needed"),
        ({1, 2}, "inputs: found set; needed"),
        pytest.param(iter([1, 2]), "inputs: found list_iterator; needed", id="iterator"),
        (np.array(5), "inputs: found ndarray; needed"),
        (torch.tensor(5), "inputs: found Tensor; needed"),
        ([], "inputs: found an empty list"),
        ([b"abc"], "prompt 0: found bytes; needed"),
        (["a", None], "prompt 1: found NoneType; needed"),
        ([2.5], "prompt 0: found float; needed"),
        ([5, 2.5], "prompt 0: found 2.5 among its token ids"),
        ([5, "text"], "prompt 0: found 'text' among its token ids"),
        ([[5], [True]], "prompt 1: found True among its token ids"),
        ([[[5]]], "prompt 0: found [5] among its token ids"),
        (torch.tensor([2.5]), "prompt 0: found Tensor; needed"),
        ({}, "prompt 0: found a mapping with the keys []; needed"),
        ({"text": "a"}, "prompt 0: found a mapping with the keys ['text']; needed"),
        ([{"prompt": "a", "multi_modal_data": {}}], "the keys ['prompt', 'multi_modal_data']; needed"),
        ({"prompt": [1]}, "prompt 0: found list under 'prompt'; needed"),
        ({"prompt_token_ids": "a"}, "prompt 0: found str under 'prompt_token_ids'; needed"),
        ({"prompt_token_ids": b"a"}, "prompt 0: found bytes; needed"),
        ({"prompt_token_ids": None}, "prompt 0: found NoneType; needed"),
    ],
    ids=lambda value: repr(value) if not isinstance(value, str) else "",
)
def test_anything_else_is_refused_in_one_sentence(inputs: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        as_list(inputs)


@pytest.mark.parametrize(
    ("params", "found"),
    [({"max_tokens": 3}, "dict"), ("x", "str"), (7, "int"), ([3, 4], "int"), ([None] * 2, "NoneType")],
)
def test_rules_of_another_type_are_refused(params: Any, found: str) -> None:
    with pytest.raises(RequestError, match=f"sampling_params: found {found}; needed SamplingParams"):
        params_for(2, params)


def test_rules_are_one_for_all_or_one_per_prompt() -> None:
    rules = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert list(params_for(2, rules)) == rules
    assert list(params_for(2, rules[0])) == [rules[0]] * 2
    assert list(params_for(2, None)) == [SamplingParams()] * 2
    with pytest.raises(RequestError, match="sampling_params: found 2 for 3 prompts"):
        params_for(3, rules)


class OnlyAnIndex:
    """A whole number without an order, as far as Python knows."""

    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("priority", "found"),
    [
        (np.uint8(1), 1),
        (np.int8(-128), -128),
        (np.array(3), 3),
        (torch.tensor(-2), -2),
        (OnlyAnIndex(), 3),
        (9**99, 9**99),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_priority_becomes_a_number_that_keeps_its_order_when_negated(priority: Any, found: int) -> None:
    whole, _ = schedule(priority, None)
    assert (type(whole), whole) == (int, found)


@pytest.mark.parametrize("seconds", [2, 2.0, np.float32(2), np.float64(2), np.int64(2)], ids=repr)
def test_a_time_becomes_seconds_whatever_number_it_is(seconds: Any) -> None:
    _, found = schedule(0, seconds)
    assert (type(found), found) == (float, 2.0)
    assert schedule(0, 9**999) == (0, None)  # more than a float holds
    wrongs: tuple[Any, ...] = (0, -seconds, float("nan"), True, "2", [2], 2j)
    for wrong in wrongs:
        with pytest.raises(RequestError, match="timeout_s: found .*; needed seconds, more than 0"):
            schedule(0, wrong)
