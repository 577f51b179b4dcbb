"""Tiny checkpoints shared by the tests of this folder; a test that changes one copies it first."""

from pathlib import Path

import pytest

from tests.tiny_models import make_nemotron_h


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a fp32 Hugging Face folder with one weights file and a tokenizer."""
    return make_nemotron_h(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture(scope="session")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the same model in several shards."""
    return make_nemotron_h(tmp_path_factory.mktemp("models") / "sharded", tokenizer=True, max_shard_size="200KB")
