"""Sampled with drafts of a model or of a head, texts are distributed as without: chi-square over independent samples.

Other seeds than those of plain decoding, so that nothing but the distribution is alike.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.mtp_models import make_with_mtp
from tests.runtime.test_sampling_options import two_samples
from trtllm_replayssm import LLM, DraftTargetDecodingConfig, MTPDecodingConfig, SamplingParams
from trtllm_replayssm.config import SpeculativeConfig

COUNT = 600
PROMPT = [5, 7, 40, 5, 5, 7, 7, 40]
Triples = Counter[tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    # A head and a draft model that are right about every other time.
    return make_with_mtp(tmp_path_factory.mktemp("chi") / "target", "nemotron_h", "copying", mixing=0.01, seed=3)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_mtp(tmp_path_factory.mktemp("chi") / "draft", "nemotron_h", "copying", mixing=0.02, seed=3)


def open_llm(folder: Path, speculative: SpeculativeConfig | None = None) -> LLM:
    return LLM(folder, device="cpu", max_batch_size=32, max_seq_len=32, speculative_config=speculative)


def draw(llm: LLM, first_seed: int, temperature: float = 3.0) -> Triples:
    """Sample texts of a few tokens among the three likeliest of each place; count their beginnings."""
    rules = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature, top_k=3)
    params = [rules.model_copy(update={"seed": first_seed + number}) for number in range(COUNT)]
    outputs = llm.generate([PROMPT] * COUNT, params)
    return Counter(tuple(output.outputs[0].token_ids[1:4]) for output in outputs)


def compare(first: Triples, second: Triples) -> tuple[float, float]:
    cells = sorted(first | second)

    def counts(of: Triples) -> Iterable[float]:
        return (float(of[cell]) for cell in cells)

    return two_samples(*(torch.tensor([*counts(of)], dtype=torch.float64) for of in (first, second)))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Triples:
    with open_llm(folder) as llm:
        return draw(llm, COUNT)


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("source", ["draft", "mtp"])
def test_texts_are_distributed_as_without_drafts(
    folder: Path, draft_model: Path, plain: Triples, source: str, is_adaptive: bool
) -> None:
    config: SpeculativeConfig = MTPDecodingConfig(max_draft_len=3, adaptive=is_adaptive)
    if source == "draft":
        config = DraftTargetDecodingConfig(speculative_model=draft_model, max_draft_len=3, adaptive=is_adaptive)
    with open_llm(folder, config) as llm:
        speculative, metrics = draw(llm, 0), llm.metrics()
    assert metrics["num_draft_tokens"] > COUNT // 8
    assert is_adaptive or 0.1 < metrics["acceptance_rate"] < 0.9
    statistic, bound = compare(speculative, plain)
    assert statistic < bound


def test_what_is_compared_would_show_another_temperature(folder: Path, plain: Triples) -> None:
    with open_llm(folder) as llm:
        statistic, bound = compare(draw(llm, 0, temperature=1.5), plain)
    assert statistic > bound
