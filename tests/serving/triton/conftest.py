"""Model repositories with the shipped model, and real servers for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.repository import ROOT
from tests.serving.triton import server as triton
from trtllm_replayssm import LLM
from trtllm_replayssm.cli.main import main

MODEL = ROOT / "examples" / "tiny_hybrid" / "model"
BATCH_SIZE = 8
DTYPE = ("--dtype", "float32")  # in which tokens are the same in any batch, with and without drafts


def write(repository: Path, name: str, *options: str) -> None:
    """Write a model with the command."""
    arguments = ["--engine_dir", str(MODEL), "--repository", str(repository), "--name", name]
    assert main(["triton", *arguments, "--kind", "cpu", "--max_batch_size", str(BATCH_SIZE), *DTYPE, *options]) == 0


@pytest.fixture(scope="session")
def has_server() -> None:
    reason = triton.obstacle()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def server(has_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.Server]:
    """A server of a model that streams, with drafts and a prefix cache, and of one that answers once, two instances."""
    repository = tmp_path_factory.mktemp("repository")
    often = ("--metrics_period_ms", "100")
    cache = ("--enable_block_reuse", "--tokens_per_block", "16", "--device_cache_size", str(2**24))
    write(repository, "stream", "--speculative", "ngram", "--cancellation_check_period_ms", "20", *cache, *often)
    write(repository, "whole", "--no_decoupled", "--instances", "2", *often)
    with triton.running(repository, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(MODEL, device="cpu", dtype="float32", max_batch_size=BATCH_SIZE) as llm:
        yield llm
