"""Engines of multi-token prediction heads: built for real, and run by the real executors on stand-ins of TensorRT's
objects, which run the modules on the memory that is bound."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.end_to_end.test_mtp import Recorder
from tests.end_to_end.test_parity import PIECE, PROMPTS, tokens_of
from tests.mtp_models import make_with_mtp
from tests.runtime.engine_stand_in import BackendStandIn, HeadContext, stand_in_for_tensorrt
from trtllm_replayssm import LLM, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.builders.checkpoint.convert import convert
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import read_config, write_config
from trtllm_replayssm.builders.engine import build
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.manifest import ENGINE_FILE, MTP_ENGINE_FILE, WEIGHTS_FILE, read_manifest, read_report
from trtllm_replayssm.contract.memory_plan import Execution, mtp_head_bytes, plan_memory
from trtllm_replayssm.contract.tensors import mtp_state_specs, mtp_weight_specs
from trtllm_replayssm.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ManifestError,
    ReplaySSMError,
    UnsupportedError,
)
from trtllm_replayssm.runtime.executors import mtp_executor
from trtllm_replayssm.runtime.executors.tensorrt_executor import TensorRTExecutor
from trtllm_replayssm.runtime.executors.tensorrt_mtp_executor import TensorRTMtpExecutor
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.serving.triton.repository import Instances, write_model
from trtllm_replayssm.serving.triton.settings import ModelSettings

SHAPES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"n_groups": 2, "d_state": 64},
    "qwen3_5": {"value_dim": 32, "tied": True},
}
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 128, "max_num_tokens": PIECE}
LENGTH = 40
MTP = MTPDecodingConfig(max_draft_len=3, adaptive=False)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def engine_of(checkpoint: Path, **options: Any) -> Path:
    wishes: dict[str, Any] = {
        "speculative_decoding_mode": "mtp",
        "max_draft_len": 3,
        "max_input_len": 127,
        **SIZES,
        **options,
    }
    target: dict[str, Any] = {"backend": "tensorrt_rtx", "compute_capabilities": (120,)}
    return build(checkpoint, checkpoint.parent / "-".join(["engine", *map(str, options.values())]), **target, **wishes)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give a rank checkpoint of each family, its engine with a head beside it."""
    found = {}
    for family, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp(family)
        make_with_mtp(folder / "hf", family, "random", seed=3, **shape)
        found[family] = convert(folder / "hf", folder / "checkpoint")
        engine_of(found[family])
    return found


@pytest.fixture(params=SHAPES)
def engine(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return checkpoints[request.param].parent / "engine"


@pytest.fixture
def qwen_checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3_5"]


@pytest.fixture
def backend(engine: Path, monkeypatch: pytest.MonkeyPatch) -> BackendStandIn:
    return stand_in_for_tensorrt(engine, monkeypatch)


def on_engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, executor="tensorrt", device="cpu", **({"speculative_config": MTP} | options))


def on_modules(folder: Path, **options: Any) -> LLM:
    return LLM(folder, executor="torch", device="cpu", **({"speculative_config": MTP} | SIZES | options))


def executors_of(llm: LLM) -> tuple[TensorRTExecutor, TensorRTMtpExecutor]:
    assert isinstance(llm._drafter, MtpDrafter)
    model, head = llm._executor, llm._drafter._executor
    assert isinstance(model, TensorRTExecutor) and isinstance(head, TensorRTMtpExecutor)
    return model, head


def test_an_engine_of_the_head_is_built_beside_the_models(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, report = read_manifest(engine), read_report(engine)
    assert manifest.mtp is not None and report is not None and not report.warnings
    assert manifest.mtp.engine_bytes == (engine / MTP_ENGINE_FILE).stat().st_size
    tensors = {record.name: record for record in manifest.tensors}
    width = manifest.geometry.d_model
    assert tensors["hidden_states"].shape == ("B", "S", width) and not tensors["hidden_states"].is_input
    of_head = {record.name: record for record in manifest.mtp.tensors}
    inputs = {name for name, record in of_head.items() if record.is_input and record.role == "step"}
    assert inputs == {"inputs_embeds", "hidden_states", "past_lengths"}
    states = mtp_state_specs(manifest.geometry, manifest.replay, manifest.limits)
    aliases = {name: record.shares_address_with for name, record in of_head.items() if record.shares_address_with}
    assert aliases == {spec.present_name: spec.past_name for spec in states} and len(aliases) == 2
    weights = [record.name for record in manifest.mtp.tensors if record.role == "weight"]
    assert weights == [spec.name for spec in mtp_weight_specs(manifest.geometry)]
    assert sum(layer.kind == "KV_CACHE_UPDATE" for layer in report.mtp_network_layers) == 2
    assert report.mtp_engine_layers and {"export mtp", "parse mtp", "build engine mtp"} <= report.seconds.keys()
    assert not list(engine.glob("*.onnx"))
    assert main(["inspect", str(engine)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(words in shown for words in ("mtp engine", "mtp network layers", "drafter"))
    assert main(["inspect", str(engine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["drafter"] == mtp_head_bytes(manifest.geometry, manifest.replay, manifest.limits) > 0
    assert found["engine"]["mtp_network_layers"]["KV_CACHE_UPDATE"] == 2
    assert found["engine"]["manifest"]["mtp"]["engine_sha256"] == manifest.mtp.engine_sha256


def test_both_executors_draft_the_same(engine: Path, backend: BackendStandIn) -> None:
    """In batches with idle slots and prompts in pieces, whose caches the engine's writes for padding must not touch."""
    found = []
    for llm in (on_engine(engine), on_modules(engine)):
        with llm:
            recorder = Recorder(llm, None)
            tokens = tokens_of(llm, PROMPTS, LENGTH)
            found.append((tokens, recorder.proposals, llm.metrics()["num_accepted_drafts"]))
    assert found[0] == found[1]
    assert len(found[0][1]) > 80
    assert all(context.runs for contexts in backend.contexts.values() for context in contexts)
    with on_modules(engine, speculative_config=None) as plain:
        assert tokens_of(plain, PROMPTS, LENGTH) == found[0][0]


def test_accepted_drafts_leave_true_rows_in_the_caches(engine: Path, backend: BackendStandIn) -> None:
    found = []
    with on_modules(engine, speculative_config=None) as plain:
        script = dict(zip(map(tuple, PROMPTS), tokens_of(plain, PROMPTS, LENGTH), strict=True))
    for llm in (on_engine(engine), on_modules(engine)):
        with llm:
            recorder = Recorder(llm, script)
            assert tokens_of(llm, PROMPTS, LENGTH) == list(script.values())
            assert 0.6 < llm.metrics()["acceptance_rate"] < 0.75
            found.append(recorder.proposals)
    assert found[0] == found[1]
    assert backend.contexts[MTP_ENGINE_FILE][0].runs


def test_prefixes_and_sequences_of_one_prompt_are_shared(engine: Path, backend: BackendStandIn) -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8, device_cache_size=2**22)
    rules = SamplingParams(max_tokens=20, seed=4, n=2, ignore_eos=True, top_k=2)
    prompt = [3 + i * i % 50 for i in range(30)]
    found = []
    for llm in (on_engine(engine, kv_cache_config=cache), on_modules(engine, kv_cache_config=cache)):
        with llm:
            recorder = Recorder(llm, None)
            for prompts in ([prompt], [prompt[:20], [*prompt, 7], [9, 8, 7]]):
                outputs = llm.generate(prompts, rules)
                found.append([completion.token_ids for output in outputs for completion in output.outputs])
            assert llm.metrics()["num_reused_tokens"] > 16
            found.append(sorted(recorder.proposals))  # type: ignore[arg-type]
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert backend.contexts[ENGINE_FILE][1].runs


def test_the_plan_of_an_engine_counts_its_head(engine: Path, backend: BackendStandIn) -> None:
    del backend
    manifest = read_manifest(engine)
    with on_engine(engine) as llm:
        model, head = executors_of(llm)
        shapes = (manifest.geometry, manifest.replay, manifest.limits)
        without = plan_memory(*shapes, Execution.of_engine(has_weights=True, returns_hidden_states=False))
        plan = llm.memory_plan
        assert plan.activations == model._buffers["hidden_states"].nbytes and without.activations == 0
        caches = sum(pool.nbytes for _, pool in head.states)
        weights = sum(weight.nbytes for weight in head._engine._bindings._weights.values())
        kept = llm._drafter._last_hidden.nbytes  # type: ignore[attr-defined]
        assert plan.drafter == caches + weights + kept
    assert not head.states and not model.states and not model.weights


@pytest.mark.parametrize("executor", ["tensorrt", "torch"])
def test_a_closed_llm_that_somebody_still_holds_has_let_go_of_all_states(
    engine: Path, backend: BackendStandIn, executor: str
) -> None:
    del backend
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8, device_cache_size=2**20)
    llm = (on_engine if executor == "tensorrt" else on_modules)(engine, kv_cache_config=cache)
    tokens_of(llm, PROMPTS, 4)
    states = (*llm._executor.states, *llm._drafter.states)  # type: ignore[attr-defined]
    pools = {state.spec.name: weakref.ref(state.pool) for state in states}
    del states
    assert {"key_cache_0", "last_hidden_0"} < pools.keys()
    llm.close()
    gc.collect()
    assert not [name for name, pool in pools.items() if pool() is not None]
    assert llm.metrics()["prefix_device_bytes"] == 0


def test_other_drafts_run_on_an_engine_with_a_head(engine: Path, backend: BackendStandIn) -> None:
    config = NGramDecodingConfig(max_draft_len=3, adaptive=False)
    with on_engine(engine, speculative_config=config) as llm, on_modules(engine, speculative_config=config) as other:
        assert tokens_of(llm, PROMPTS, LENGTH) == tokens_of(other, PROMPTS, LENGTH)
    assert not backend.contexts[MTP_ENGINE_FILE]


def test_embedded_weights(qwen_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both plans have theirs inside, and the matrices that the head shares are read from the folder's file."""
    engine = engine_of(qwen_checkpoint, weights="embedded")
    manifest = read_manifest(engine)
    assert manifest.mtp is not None
    assert not [record for record in (*manifest.tensors, *manifest.mtp.tensors) if record.role == "weight"]
    stand_in_for_tensorrt(engine, monkeypatch)
    with on_engine(engine) as llm, on_modules(engine) as other:
        recorders = [Recorder(llm, None), Recorder(other, None)]
        assert tokens_of(llm, PROMPTS, LENGTH) == tokens_of(other, PROMPTS, LENGTH)
        assert recorders[0].proposals == recorders[1].proposals
        _, head = executors_of(llm)
        assert head._matrices is not None
        caches = sum(pool.nbytes for _, pool in head.states)
        matrices = {matrix.data_ptr(): matrix.nbytes for matrix in head._matrices}  # one, where the model has one
        assert head.device_bytes == caches + sum(matrices.values())
    (engine / WEIGHTS_FILE).unlink()
    options: dict[str, Any] = {"engine_dir": str(engine), "executor": "tensorrt"}
    write_model(tmp_path, "a", ModelSettings(**options), instances=Instances("gpu"))
    with pytest.raises(CheckpointError, match="found no weights in it"):
        write_model(tmp_path, "b", ModelSettings(speculative="mtp", **options), instances=Instances("gpu"))
    with pytest.raises(ManifestError, match=r"rank0\.safetensors: found No such file"):
        on_engine(engine)


def test_a_damaged_head_is_told_from_a_damaged_model(
    qwen_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = qwen_checkpoint.parent / "engine"
    stand_in_for_tensorrt(engine, monkeypatch)
    copy = tmp_path / "copy"
    shutil.copytree(engine, copy)
    plan = bytearray((engine / MTP_ENGINE_FILE).read_bytes())
    plan[100] ^= 1
    (copy / MTP_ENGINE_FILE).write_bytes(plan)
    with pytest.raises(ManifestError, match=r"rank0_mtp\.engine: engine_sha256: found"):
        on_engine(copy)
    (copy / MTP_ENGINE_FILE).write_bytes(plan[:50])
    with pytest.raises(ManifestError, match=r"rank0_mtp\.engine: engine_bytes: found 50"):
        on_engine(copy)
    assert main(["inspect", str(copy)]) == 2
    assert "rank0_mtp.engine: found 50 bytes; needed" in capsys.readouterr().err
    monkeypatch.setattr(mtp_executor, "available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="for the multi-token prediction head and its caches"):
        on_engine(engine)


def test_a_step_of_the_head_that_fails_is_told_as_its_own(
    engine: Path, backend: BackendStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    del backend
    monkeypatch.setattr(HeadContext, "execute_async_v3", lambda self, stream: False)
    needed = "multi-token prediction head: engine: a decode step failed"
    with on_engine(engine) as llm, pytest.raises(ReplaySSMError, match=needed):
        tokens_of(llm, [[5, 6]], 4)


def test_an_engine_without_a_head_says_how_to_build_one(
    qwen_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(qwen_checkpoint, speculative_decoding_mode=None)
    manifest = read_manifest(engine)
    assert manifest.mtp is None and not any(record.name == "hidden_states" for record in manifest.tensors)
    assert not (engine / MTP_ENGINE_FILE).exists()
    needed = "found an engine that returns no hidden states.*needed one of `trtllm-replayssm build --spec"
    with pytest.raises(UnsupportedError, match=needed):
        on_engine(engine)
    options: dict[str, Any] = {"engine_dir": str(engine), "speculative": "mtp"}
    with pytest.raises(UnsupportedError, match=needed):
        write_model(tmp_path, "a", ModelSettings(executor="tensorrt", **options), instances=Instances("gpu"))
    write_model(tmp_path, "a", ModelSettings(executor="torch", **options), instances=Instances("cpu"))
    if not torch.cuda.is_available():
        with LLM(engine, speculative_config=MTP) as llm:
            assert llm.executor == "torch"
        assert "engine not run" in caplog.text and "--speculative_decoding_mode mtp" in caplog.text


@pytest.mark.parametrize("executor", ["auto", "tensorrt", "torch"])
def test_an_engine_without_the_weights_that_it_needs_is_not_written_for_triton(
    qwen_checkpoint: Path, tmp_path: Path, executor: Literal["auto", "tensorrt", "torch"]
) -> None:
    copy = shutil.copytree(qwen_checkpoint.parent / "engine", tmp_path / "copy")
    (copy / WEIGHTS_FILE).unlink()
    options: dict[str, Any] = {"engine_dir": str(copy), "executor": executor, "speculative": "mtp"}
    with pytest.raises(CheckpointError, match="found no weights in it.*option checkpoint_dir"):
        write_model(tmp_path / "models", "a", ModelSettings(**options), instances=Instances("gpu"))
    options["checkpoint_dir"] = str(qwen_checkpoint)
    write_model(tmp_path / "models", "a", ModelSettings(**options), instances=Instances("gpu"))


def test_a_build_that_cannot_have_a_head_is_refused_before_any_work(
    qwen_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = tmp_path / "headless"
    headless.mkdir()
    write_config(headless, read_config(qwen_checkpoint).model_copy(update={"mtp": None}))
    options: dict[str, Any] = {"backend": "tensorrt_rtx", "speculative_decoding_mode": "mtp", "max_draft_len": 1}
    for changes, error, message in (
        ({}, CheckpointError, "headless: found no multi-token prediction head; speculative_decoding_mode 'mtp' needed"),
        ({"max_draft_len": 0}, ConfigError, "found 'mtp' with max_draft_len=0; needed max_draft_len of 1 or more"),
        ({"speculative_decoding_mode": "medusa"}, ConfigError, "found 'medusa'; needed 'mtp' or nothing"),
    ):
        with pytest.raises(error, match=message):
            build(headless, tmp_path / "engine", **(options | changes))
    assert [path.name for path in tmp_path.iterdir()] == ["headless"]
    paths = ["build", "--checkpoint_dir", str(headless), "--output_dir", str(tmp_path / "engine")]
    assert main([*paths, "--speculative_decoding_mode", "mtp"]) == 2
    assert "max_draft_len=0" in capsys.readouterr().err
