"""Tokens and logits against ``transformers``, for every way of decoding that we have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import CONFIGS, DEFAULTS, Checkpoint, Checkpoints
from tests.end_to_end.reference import FlushCounter, LogitRecorder, Reference
from tests.runtime.helpers import ScriptedDrafter
from tests.tolerances import LOGITS_FP32
from trtllm_replayssm import LLM, NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.builders.checkpoint.convert import convert

LONG = 208
SHORT = 40
# One token, less than a window, more than one piece, a repetition that prompt-lookup finds.
PROMPTS = [[17], [5, 9, 250], list(range(40, 90)), [31, 32, 33, 34] * 5]
# Pieces of 13 tokens, so that prompts run in several, the last of them no longer than a window.
PIECE = 13


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_llm(folder: Path, **options: Any) -> LLM:
    llm = LLM(folder, device="cpu", max_num_tokens=PIECE, **options)
    for state in llm._executor._states:  # type: ignore[attr-defined]
        state.fill_(float("nan"))  # whatever memory held before: nothing of it may be read
    return llm


def tokens_of(llm: LLM, prompts: list[list[int]], max_tokens: int, **rules: Any) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **rules})
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module", params=DEFAULTS)
def checkpoint(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> Checkpoint:
    """Give one model of each family."""
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> dict[tuple[int, ...], list[int]]:
    """Give what plain decoding appends to each prompt, checked against transformers."""
    generated = tokens_of(make_llm(checkpoint.folder), PROMPTS, LONG)
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        checkpoint.reference.assert_greedy(prompt, tokens)
        assert len(set(tokens)) > 20, "a constant text would prove little"
    return {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, generated, strict=True)}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "speculative", [None, NGramDecodingConfig(max_draft_len=3, adaptive=False)], ids=["plain", "ngram"]
)
def test_greedy_tokens_equal_transformers(
    checkpoints: Checkpoints, name: str, speculative: NGramDecodingConfig | None
) -> None:
    checkpoint = checkpoints[name]
    llm = make_llm(checkpoint.folder, speculative_config=speculative, max_batch_size=3)
    for prompt, tokens in zip(PROMPTS, tokens_of(llm, PROMPTS, LONG), strict=True):
        assert len(tokens) == LONG
        checkpoint.reference.assert_greedy(prompt, tokens)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_logits_equal_transformers_at_every_position(checkpoints: Checkpoints, name: str, max_draft_len: int) -> None:
    checkpoint, prompt = checkpoints[name], PROMPTS[2]
    speculative = NGramDecodingConfig(max_draft_len=max_draft_len, adaptive=False) if max_draft_len else None
    llm = make_llm(checkpoint.folder, speculative_config=speculative, replay=ReplayConfig(history=8))
    recorder = LogitRecorder(llm._executor)
    sequence = prompt + tokens_of(llm, [prompt], 60)[0]
    expected = checkpoint.reference.logits(sequence)
    decoded = range(len(prompt) - 1, len(sequence) - 1)
    assert set(decoded) <= recorder.by_position.keys()
    worst = max((recorder.by_position[at] - expected[at]).abs().max().item() for at in decoded)
    assert worst < LOGITS_FP32


@pytest.mark.parametrize(
    ("history", "max_draft_len"),
    [(history, drafts) for history in (1, 2, 8, 16, 32) for drafts in (0, 1, 4) if history >= 1 + drafts],
)
def test_any_history_gives_the_same_tokens(
    checkpoint: Checkpoint, plain: dict[tuple[int, ...], list[int]], history: int, max_draft_len: int
) -> None:
    speculative = NGramDecodingConfig(max_draft_len=max_draft_len, adaptive=False) if max_draft_len else None
    llm = make_llm(checkpoint.folder, replay=ReplayConfig(history=history), speculative_config=speculative)
    counter = FlushCounter(llm._executor)
    assert tokens_of(llm, PROMPTS, 70) == [plain[tuple(prompt)][:70] for prompt in PROMPTS]
    assert llm.metrics()["num_flushes"] == counter.num_flushes > 0


@pytest.mark.parametrize("enabled", [True, False], ids=["replay", "conventional"])
@pytest.mark.parametrize("wrong_from", [0, 2, None], ids=["all_rejected", "two_accepted", "all_accepted"])
def test_drafts_change_the_steps_and_never_the_tokens(
    checkpoint: Checkpoint, plain: dict[tuple[int, ...], list[int]], wrong_from: int | None, enabled: bool
) -> None:
    drafter = ScriptedDrafter(plain, 4, wrong_from=wrong_from)
    llm = make_llm(checkpoint.folder, drafter=drafter, replay=ReplayConfig(history=9, enabled=enabled))
    assert tokens_of(llm, PROMPTS, LONG) == list(plain.values())
    metrics = llm.metrics()
    accepted_a_step = {0: 0, 2: 2, None: 4}[wrong_from]
    # The first token of a sequence comes from its prompt, each window brings the accepted drafts and one token more.
    assert metrics["num_decode_rows"] == len(PROMPTS) * -(-(LONG - 1) // (1 + accepted_a_step))
    if wrong_from == 0:
        assert metrics["num_accepted_drafts"] == 0
    if wrong_from is None:
        assert metrics["num_accepted_drafts"] == metrics["num_draft_tokens"]


def test_the_conventional_mode_gives_the_same_tokens_and_moves_more_state(
    checkpoint: Checkpoint, plain: dict[tuple[int, ...], list[int]]
) -> None:
    counted = {}
    for enabled in (True, False):
        llm = make_llm(checkpoint.folder, replay=ReplayConfig(enabled=enabled))
        assert tokens_of(llm, PROMPTS, LONG) == list(plain.values())
        counted[enabled] = llm.metrics()
    both = ("conventional_state_bytes_read", "conventional_state_bytes_written")
    assert [counted[True][key] for key in both] == [counted[False][key] for key in both]
    assert [counted[False][key] for key in both] == [
        counted[False][key] for key in ("state_bytes_read", "state_bytes_written")
    ]
    assert counted[True]["state_bytes_written"] < counted[True]["conventional_state_bytes_written"] / 4


def test_a_result_does_not_depend_on_the_batch_or_on_what_a_slot_held_before(
    checkpoint: Checkpoint, plain: dict[tuple[int, ...], list[int]]
) -> None:
    llm = make_llm(checkpoint.folder, max_batch_size=2, speculative_config=NGramDecodingConfig(adaptive=False))
    # 30 requests over two slots: each slot is used again many times, after sequences of other lengths.
    order = [PROMPTS[i % 4] for i in range(30)]
    lengths = [1 + (7 * i) % SHORT for i in range(30)]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    for prompt, length, output in zip(order, lengths, llm.generate(order, params), strict=True):
        assert output.outputs[0].token_ids == plain[tuple(prompt)][:length]


@pytest.mark.parametrize("name", ["qwen3_5_multimodal", "qwen3_next_tied"])
def test_a_converted_folder_generates_what_its_source_does(checkpoints: Checkpoints, name: str, tmp_path: Path) -> None:
    source = checkpoints[name].folder
    converted = convert(source, tmp_path / "checkpoint")
    assert tokens_of(make_llm(converted), PROMPTS, SHORT) == tokens_of(make_llm(source), PROMPTS, SHORT)


@pytest.mark.parametrize(
    "speculative", [None, NGramDecodingConfig(max_draft_len=3, adaptive=False)], ids=["plain", "ngram"]
)
def test_sampled_tokens_depend_on_seed_and_prompt_alone(
    checkpoint: Checkpoint, speculative: NGramDecodingConfig | None
) -> None:
    folder = checkpoint.folder
    rules = [SamplingParams(max_tokens=SHORT, temperature=0.7, top_k=20, top_p=0.95, seed=s) for s in (1, 2, 3, 1)]
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[1], PROMPTS[1]]
    alone = make_llm(folder, max_batch_size=1)
    expected = [alone.generate(p, r).outputs[0].token_ids for p, r in zip(prompts, rules, strict=True)]
    together = make_llm(folder, speculative_config=speculative).generate(prompts, rules)
    assert [output.outputs[0].token_ids for output in together] == expected
    assert expected[0] == expected[3] != expected[2]


def test_the_same_request_without_a_seed_differs_from_call_to_call(checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint.folder)
    assert len({tuple(tokens) for tokens in tokens_of(llm, [PROMPTS[0]] * 4, 12, temperature=1.0)}) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_activations_are_as_near_the_fp32_model_as_those_of_transformers(
    checkpoint: Checkpoint, dtype: str
) -> None:
    prompt = PROMPTS[2]
    llm = make_llm(checkpoint.folder, dtype=dtype, replay=ReplayConfig(history=4))
    recorder = LogitRecorder(llm._executor)
    sequence = prompt + tokens_of(llm, [prompt], 30)[0]
    positions = range(len(prompt) - 1, len(sequence) - 1)
    expected, theirs = (
        reference.logits(sequence)[positions[0] : positions[-1] + 1]
        for reference in (checkpoint.reference, Reference(checkpoint.folder, getattr(torch, dtype)))
    )
    ours = torch.stack([recorder.by_position[at] for at in positions])
    assert (ours - expected).norm() < 1.5 * (theirs - expected).norm()
