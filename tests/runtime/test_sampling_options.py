"""What the options of ``SamplingParams`` do to a generation, alone, in a batch and under speculation."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, RequestOutput, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import RequestError

GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.0, "seed": 3}
PROMPTS = [[5, 6, 7] * 4, [9], [40, 41] * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("options") / "hf", pattern="M*-M", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_batch_size=4, max_seq_len=64)


def tokens_of(llm: LLM, prompt: Any, rules: dict[str, Any]) -> list[int]:
    output: RequestOutput = llm.generate(prompt, SamplingParams(**rules))
    return output.outputs[0].token_ids


def test_penalties_keep_a_greedy_text_from_repeating_itself(llm: LLM) -> None:
    plain = tokens_of(llm, PROMPTS[0], GREEDY)
    for strong in ({"presence_penalty": 1e4}, {"frequency_penalty": 1e4}, {"repetition_penalty": 1e9}):
        tokens = tokens_of(llm, PROMPTS[0], GREEDY | strong)
        assert len(set(tokens)) == len(tokens) and tokens != plain
        if "repetition_penalty" not in strong:  # a logit of 0 stays where it is, whatever divides it
            assert not set(tokens) & set(PROMPTS[0])
    assert set(tokens_of(llm, PROMPTS[0], GREEDY | {"presence_penalty": -1e4})) <= set(PROMPTS[0])
    generated_alone = tokens_of(llm, PROMPTS[0], GREEDY | {"presence_penalty": -1e4, "prompt_ignore_length": 99})
    assert set(generated_alone) == {plain[0]}


@pytest.mark.parametrize(
    "rules", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=lambda rules: next(iter(rules))
)
def test_each_rule_alone_can_leave_the_likeliest_token_only(llm: LLM, rules: dict[str, Any]) -> None:
    prompts = [[5, 7, 40], [9]]
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    greedy = llm.generate(prompts, SamplingParams(**common, temperature=0.0))
    found = llm.generate(prompts, SamplingParams(**common, **rules, seed=3))
    free = llm.generate(prompts, SamplingParams(**common, seed=3))
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (greedy, found, free)]
    assert tokens[1] == tokens[0] != tokens[2]


def test_a_bias_brings_a_token_or_keeps_it_away(llm: LLM) -> None:
    plain = tokens_of(llm, [9], GREEDY)
    assert tokens_of(llm, [9], GREEDY | {"logit_bias": {77: 1e4}}) == [77] * 24
    assert plain[0] not in tokens_of(llm, [9], GREEDY | {"logit_bias": {plain[0]: -1e4}})


def test_bad_tokens_and_bad_strings_are_not_generated(llm: LLM) -> None:
    plain = tokens_of(llm, "say", GREEDY)
    assert plain[0] not in tokens_of(llm, "say", GREEDY | {"bad_token_ids": [plain[0]]})
    # A string of several tokens: its parts may come, one behind the other they may not.
    assert llm.tokenizer is not None
    a, x = llm.tokenizer.encode("ax", add_special_tokens=False)
    wanted = GREEDY | {"logit_bias": {a: 2e4, x: 1e4}}
    assert tokens_of(llm, "say", wanted) == [a] * 24
    assert tokens_of(llm, "say", wanted | {"bad": "aa"}) == [a, x] * 12
    assert tokens_of(llm, "say", wanted | {"bad": ["aa", "xa"]}) == [a] + [x] * 23
    assert tokens_of(llm, "a", wanted | {"bad": "aa"}) == [x, a] * 12  # the prompt's last token counts


EVERYTHING: dict[str, Any] = {
    **{"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4, "prompt_ignore_length": 3},
    **{"min_p": 0.02, "top_k": 40, "top_p": 0.95, "logit_bias": {5: 2.0, 7: -1.0}, "bad_token_ids": [6], "bad": "ab"},
}


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_depend_neither_on_the_batch_nor_on_drafts(folder: Path, llm: LLM, rules: dict[str, Any]) -> None:
    # Few tokens, about equally likely or one of them ahead: prompt lookup finds drafts, good ones and bad ones.
    few = {"frequency_penalty": 0.1, "logit_bias": {5: 50.0, 7: 50.0, 40: 50.0}}
    repeating = few | {"frequency_penalty": -3.0}
    kinds = [rules, rules | EVERYTHING, rules | repeating, rules | few]
    cases = [(prompt, SamplingParams(**kind)) for kind in kinds for prompt in PROMPTS]
    alone = [llm.generate(prompt, params).outputs for prompt, params in cases]
    with LLM(
        folder,
        device="cpu",
        max_batch_size=5,
        max_seq_len=64,
        speculative_config=NGramDecodingConfig(max_draft_len=3, adaptive=False),
    ) as other:
        outputs = other.generate([prompt for prompt, _ in cases], [params for _, params in cases])
        metrics = other.metrics()
    assert [o.outputs[0].token_ids for o in outputs] == [completions[0].token_ids for completions in alone]
    assert 0 < metrics["num_accepted_drafts"] < metrics["num_draft_tokens"]
    assert alone[0][0].token_ids != alone[3][0].token_ids != alone[6][0].token_ids


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"bad_token_ids": [320]}, "prompt 0: found bad token id 320; needed 0 <= id < 320"),
        ({"logit_bias": {-1: 1.0}}, "prompt 0: found logit_bias token id -1; needed"),
        ({"bad_token_ids": list(range(320))}, "prompt 0: found all 320 tokens of the vocabulary among bad_token_ids"),
        (
            {"bad_token_ids": list(range(319)), "stop_token_ids": [319], "min_tokens": 1},
            "prompt 0: found min_tokens=1 with all 320 tokens .* and bad ones; needed one",
        ),
        ({"bad": "half \ud800 a pair"}, "bad: found no valid Unicode at character 5"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(llm: LLM, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([5], SamplingParams(**rules))


def test_bad_strings_need_a_tokenizer(tmp_path: Path) -> None:
    bare = LLM(make_nemotron_h(tmp_path / "bare", pattern="M"), device="cpu", max_seq_len=32)
    with pytest.raises(RequestError, match=r"found bad strings \('x',\), .* no tokenizer\.json; .* Use bad_token_ids"):
        bare.generate([5], SamplingParams(bad=("x",)))


def test_the_command_line_has_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    generate = LLM.generate

    def recorded(self: LLM, prompts: Any, params: SamplingParams) -> Any:
        seen.append(params)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", recorded)
    numbers = {"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    arguments = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    arguments += ["--bad", "one", "--bad", "two"]
    assert (
        main(["run", "--model", str(folder), "--device", "cpu", "--prompt", "a", "--max_tokens", "2", *arguments]) == 0
    )
    assert seen == [SamplingParams(max_tokens=2, temperature=0.0, bad=("one", "two"), **numbers)]  # type: ignore[arg-type]


def joint_counts(outputs: list[RequestOutput], letters: list[int]) -> torch.Tensor:
    """Return how often each triple of the three letters begins a generation."""
    numbers = [[letters.index(token) for token in output.outputs[0].token_ids[:3]] for output in outputs]
    return torch.tensor([9 * a + 3 * b + c for a, b, c in numbers]).bincount(minlength=27).double()


def two_samples(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Return the chi-square statistic of two equally large samples, and a bound (Wilson and Hilferty 1931)."""
    both = first + second
    order = both.argsort()
    rare = int((both[order].cumsum(0) < 40).sum()) + 1  # the rarest cells together are one
    first, second = (torch.cat([x[order[:rare]].sum()[None], x[order[rare:]]]) for x in (first, second))
    freedom = len(first) - 1
    assert freedom > 8
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return ((first - second) ** 2 / (first + second)).sum().item(), bound


def test_speculation_samples_the_same_distribution_as_plain_decoding(folder: Path, llm: LLM) -> None:
    letters, count = [5, 7, 40], 500
    rules: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "logit_bias": dict.fromkeys(letters, 50.0)}
    rules |= {"frequency_penalty": 0.2, "repetition_penalty": 1.01, "min_p": 0.01}
    prompt = [5, 7, 40, 5, 5, 7, 7, 40, 40, 5, 40, 7, 5]

    def draw(model: LLM, first_seed: int, **changed: float) -> torch.Tensor:
        params = [SamplingParams(**rules, seed=first_seed + i, **changed) for i in range(count)]  # type: ignore[arg-type]
        return joint_counts(model.generate([prompt] * count, params), letters)

    with LLM(
        folder,
        device="cpu",
        max_batch_size=32,
        max_seq_len=64,
        speculative_config=NGramDecodingConfig(max_draft_len=3, adaptive=False),
    ) as other:
        speculative = draw(other, 0)
        metrics = other.metrics()
    assert 0.1 < metrics["acceptance_rate"] < 0.9 and metrics["num_draft_tokens"] > count
    statistic, bound = two_samples(speculative, draw(llm, count))  # other seeds: the samples are independent
    assert statistic < bound
    statistic, bound = two_samples(speculative, draw(llm, count, temperature=2.5))
    assert statistic > bound, "a wrong temperature would not be noticed"
