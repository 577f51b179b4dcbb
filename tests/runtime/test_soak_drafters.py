"""Soak of the drafters that have states of their own: they follow requests through preemption and every other end."""

from pathlib import Path

import pytest
import torch

from tests.mtp_models import make_with_mtp
from tests.runtime import soak
from tests.runtime.test_soak import CROWDED, LIMITS
from trtllm_replayssm import LLM, DraftTargetDecodingConfig, MTPDecodingConfig
from trtllm_replayssm.runtime.speculative.adaptive import AdaptiveDrafter
from trtllm_replayssm.runtime.speculative.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter

TEXTS = ("e", "in", "a", "x=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A head and a draft model that are right about every other time.
    return make_with_mtp(tmp_path_factory.mktemp("soak") / "model", "qwen3_5", "copying", mixing=0.01, seed=3)


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("source", ["draft", "mtp"])
def test_every_output_is_that_of_its_solo_run(
    folder: Path, source: str, is_adaptive: bool, pytestconfig: pytest.Config
) -> None:
    torch.set_num_threads(1)
    count = max(pytestconfig.getoption("soak_requests") // 10, 1)
    draft = make_with_mtp(folder.parent / f"{source}-{is_adaptive}", "qwen3_5", "copying", mixing=0.02, seed=3)
    config = (
        DraftTargetDecodingConfig(speculative_model=draft, max_draft_len=3, adaptive=is_adaptive)
        if source == "draft"
        else MTPDecodingConfig(max_draft_len=3, adaptive=is_adaptive)
    )
    with LLM(folder, device="cpu", max_batch_size=1, **LIMITS) as alone:
        jobs = soak.draw_jobs(alone, 30, 5, TEXTS)
    with LLM(folder, device="cpu", speculative_config=config, **CROWDED) as llm:
        tally = soak.soak(llm, jobs, count, 6)
        drafter = llm._drafter.drafter if isinstance(llm._drafter, AdaptiveDrafter) else llm._drafter
        if isinstance(drafter, DraftModelDrafter):
            assert (len(drafter._sequences), drafter._slots.num_free) == (0, 6)
        else:
            assert isinstance(drafter, MtpDrafter)
            assert not drafter._places
    assert tally.metrics["num_preemptions"] >= count // 20, tally
    assert 0 < tally.metrics["num_accepted_drafts"] < tally.metrics["num_draft_tokens"]
    if not is_adaptive:
        assert tally.metrics["acceptance_rate"] > 0.3, tally
