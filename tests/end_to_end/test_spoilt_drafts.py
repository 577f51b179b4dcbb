"""A draft whose values are not finite is rejected like any other: it changes no token that is generated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm import LLM, ReplayConfig, SamplingParams
from trtllm_replayssm.errors import RequestError

SPOILT = 77
PROMPTS = [[17], [5, 9, 250], list(range(40, 60))]


class SpoiltDrafter:
    """Proposes a token that no plain decoding generates, alone, before and behind others."""

    max_draft_len = 3

    def __init__(self) -> None:
        self._step = 0

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None: ...
    def observe(self, request_id: int, token_ids: Sequence[int]) -> None: ...
    def end(self, request_id: int) -> None: ...
    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        self._step += 1
        drafts = ([SPOILT], [SPOILT, 9, 8], [9, SPOILT, SPOILT], [9, 8, SPOILT])[self._step % 4]
        return {request_id: drafts[:limit] for request_id, limit in limits.items()}


@pytest.fixture(scope="module", params=["MM", "M*M", "**-", "*M*", "GG", "*G*"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    make = make_qwen if "G" in request.param else make_nemotron_h
    return make(tmp_path_factory.mktemp("spoilt") / "hf", pattern=request.param)


def spoil(folder: Path, value: float) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    (embedding,) = (name for name in weights if name.endswith(("embeddings.weight", "embed_tokens.weight")))
    weights[embedding][SPOILT] = value
    weights["lm_head.weight"][SPOILT] = 0.0  # never among the likely ones
    save_file(weights, path, metadata={"format": "pt"})


def tokens_of(folder: Path, rules: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(folder, device="cpu", max_batch_size=2, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, rules)]


@pytest.mark.parametrize("enabled", [True, False], ids=["replay", "conventional"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e38], ids=str)
def test_a_rejected_draft_that_is_not_finite_changes_no_token(folder: Path, value: float, enabled: bool) -> None:
    spoil(folder, value)
    replay = ReplayConfig(history=5, enabled=enabled)
    for temperature in (0.0, 0.8):
        rules = SamplingParams(max_tokens=30, temperature=temperature, top_k=5, ignore_eos=True, seed=3)
        plain = tokens_of(folder, rules, replay=replay)
        assert not any(SPOILT in tokens for tokens in plain)
        assert tokens_of(folder, rules, replay=replay, drafter=SpoiltDrafter()) == plain


def test_a_prompt_that_is_not_finite_is_an_error_all_the_same(folder: Path) -> None:
    spoil(folder, torch.inf)
    with LLM(folder, device="cpu") as llm, pytest.raises(RequestError, match="logits that are not finite"):
        llm.generate([5, SPOILT, 6], SamplingParams(max_tokens=2, temperature=0.0))
