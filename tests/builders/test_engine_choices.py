"""An engine as the command line makes it with choices other than the defaults: weights inside, history "auto"."""

import json
from pathlib import Path

import pytest

from tests.builders.tiny_geometry import tiny_geometry
from trtllm_replayssm import LLM, ReplayConfig, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.manifest import read_manifest


@pytest.fixture(scope="module")
def embedded_engine(rank_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an engine of the command line, its weights inside, its history chosen by the builder."""
    engine = tmp_path_factory.mktemp("engines") / "embedded"
    folders = ["--checkpoint_dir", str(rank_checkpoint), "--output_dir", str(engine)]
    options = ["--backend", "tensorrt_rtx", "--max_input_len", "16", "--max_seq_len", "64", "--weights", "embedded"]
    assert main(["build", *folders, *options, "--compute_capability", "8.6", "--history", "auto"]) == 0
    return engine


def test_embedded_weights_are_no_bindings(embedded_engine: Path, rank_checkpoint: Path) -> None:
    folder, manifest = embedded_engine, read_manifest(embedded_engine)
    assert manifest.weights == "embedded"
    assert not [tensor.name for tensor in manifest.tensors if tensor.role == "weight"]
    embedding = tiny_geometry().vocab_size * tiny_geometry().d_model * 4
    weights = (rank_checkpoint / "rank0.safetensors").read_bytes()
    at = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])["embedding.weight"]["data_offsets"][0]
    start = 8 + int.from_bytes(weights[:8], "little") + at
    assert weights[start : start + embedding] in (folder / "rank0.engine").read_bytes(), "the plan has no embedding"


def test_a_history_of_auto_is_a_number_in_the_engine(
    embedded_engine: Path, rank_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = embedded_engine
    # A tiny layer's ring rows, in fp32, are large beside its state.
    assert read_manifest(engine).replay == ReplayGeometry(history=8)
    ring = {tensor.name: tensor.shape for tensor in read_manifest(engine).tensors}["past_x_ring_0"]
    assert ring[1] == ReplayGeometry(history=8).ring_rows
    assert main(["inspect", str(engine)]) == 0
    assert "history 8, max_draft_len 0" in " ".join(capsys.readouterr().out.split())
    with LLM(engine, executor="torch", device="cpu", replay=ReplayConfig(history="auto")) as llm:
        assert llm.replay.history == 8
        greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        found = llm.generate([5, 7, 11], greedy).outputs[0].token_ids
    with LLM(rank_checkpoint, device="cpu", max_seq_len=64) as llm:
        assert llm.replay.history == 16
        assert llm.generate([5, 7, 11], greedy).outputs[0].token_ids == found
