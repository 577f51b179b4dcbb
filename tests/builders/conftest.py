"""Tiny checkpoints and one engine, shared by the tests of this folder; a test that changes one copies it first."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.builders.tiny_geometry import random_weights, tiny_geometry
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import write_config
from trtllm_replayssm.builders.engine import build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an fp32 Hugging Face folder with one weights file and a tokenizer."""
    return make_nemotron_h(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture(scope="session")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the same model in several shards."""
    return make_nemotron_h(tmp_path_factory.mktemp("models") / "sharded", tokenizer=True, max_shard_size="200KB")


@pytest.fixture(scope="session")
def rank_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a rank checkpoint of ``tiny_geometry`` with random weights."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    folder.mkdir()
    geometry = tiny_geometry()
    write_config(folder, geometry)
    (folder / "tokenizer_config.json").write_text("{}")
    save_file(random_weights(geometry), folder / "rank0.safetensors")
    return folder


@pytest.fixture(scope="session")
def engine_folder(rank_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an engine of ``rank_checkpoint``, its weights outside."""
    output = tmp_path_factory.mktemp("engines") / "external"
    return build(
        rank_checkpoint,
        output,
        backend="tensorrt_rtx",
        max_batch_size=4,
        max_input_len=32,
        max_seq_len=64,
        max_num_tokens=16,
        max_draft_len=3,
        history=8,
        compute_capabilities=[80, 89, 120],
    )
