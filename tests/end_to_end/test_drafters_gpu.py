"""Drafters with states of their own on CUDA, with and without CUDA graphs: the tokens and the drafts are the CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.test_parity import PROMPTS, tokens_of
from tests.end_to_end.test_parity_gpu import make_llm
from tests.mtp_models import make_with_mtp
from trtllm_replayssm import CudaGraphConfig, DraftTargetDecodingConfig, MTPDecodingConfig

pytestmark = pytest.mark.gpu

LENGTH = 80
# State sizes that the kernels support.
SHAPES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"n_groups": 2, "head_dim": 64, "d_state": 64},
    "qwen3_5": {"value_dim": 32},
}


@pytest.fixture(scope="module", autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module", params=SHAPES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    family = request.param
    path = tmp_path_factory.mktemp("gpu") / family
    # A head that is right about every other time.
    return make_with_mtp(path, family, "copying", mixing=0.01, seed=3, **SHAPES[family])


def config_of(source: str, folder: Path) -> DraftTargetDecodingConfig | MTPDecodingConfig:
    if source == "mtp":
        return MTPDecodingConfig(max_draft_len=3, adaptive=False)
    return DraftTargetDecodingConfig(speculative_model=folder, max_draft_len=3, adaptive=False)


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()], ids=["eager", "graphs"])
@pytest.mark.parametrize("source", ["mtp", "draft"])
def test_tokens_and_drafts_are_the_cpus(folder: Path, source: str, graphs: CudaGraphConfig | None) -> None:
    tokens, metrics = [], []
    for device in ("cpu", "cuda"):
        llm = make_llm(
            folder,
            device,
            speculative_config=config_of(source, folder),
            max_batch_size=3,
            max_seq_len=256,
            cuda_graph_config=graphs,
        )
        tokens.append(tokens_of(llm, PROMPTS, LENGTH))
        metrics.append(llm.metrics())
    assert tokens[0] == tokens[1] == tokens_of(make_llm(folder, "cpu"), PROMPTS, LENGTH)
    if source == "draft":
        assert metrics[1]["acceptance_rate"] == 1.0
    else:  # a near-tie among drafts may fall the other way
        assert abs(metrics[0]["acceptance_rate"] - metrics[1]["acceptance_rate"]) < 0.05
        assert metrics[1]["acceptance_rate"] > 0.2


@pytest.mark.parametrize("source", ["mtp", "draft"])
def test_16_bit_drafters_run(folder: Path, source: str) -> None:
    config = config_of(source, folder)
    llm = make_llm(folder, "cuda", dtype="bfloat16", speculative_config=config, max_batch_size=3, max_seq_len=256)
    assert all(len(tokens) == LENGTH for tokens in tokens_of(llm, PROMPTS, LENGTH))
    assert llm.metrics()["acceptance_rate"] > 0.2
