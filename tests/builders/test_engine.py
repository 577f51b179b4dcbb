"""Real engines, built on any machine: what is in the folder, and what is refused."""

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

from tests.builders.tiny_geometry import tiny_geometry
from trtllm_replayssm import backend
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import write_config
from trtllm_replayssm.builders.engine import build
from trtllm_replayssm.builders.export import export, set_kernels
from trtllm_replayssm.builders.kernels import fewest_architectures, kernel_images
from trtllm_replayssm.builders.plan import build_plan
from trtllm_replayssm.builders.profiles import bindings, profiles
from trtllm_replayssm.builders.progress import BuildProgress
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.manifest import BackendName, read_manifest, read_report
from trtllm_replayssm.contract.tensors import state_specs, weight_specs
from trtllm_replayssm.errors import (
    BackendError,
    BuildError,
    CheckpointError,
    ConfigError,
    ManifestError,
    ReplaySSMError,
    UnsupportedError,
)

SMALL: dict[str, Any] = {"backend": "tensorrt_rtx", "max_batch_size": 2, "max_input_len": 16, "max_seq_len": 32}


def test_an_engine_folder_is_complete(engine_folder: Path, rank_checkpoint: Path) -> None:
    assert {path.name for path in engine_folder.iterdir()} == {
        "config.json",
        "rank0.engine",
        "rank0.safetensors",
        "tokenizer_config.json",
        "manifest.json",
        "build_report.json",
    }
    assert (engine_folder / "config.json").read_bytes() == (rank_checkpoint / "config.json").read_bytes()
    assert (engine_folder / "rank0.safetensors").read_bytes() == (rank_checkpoint / "rank0.safetensors").read_bytes()


def test_the_manifest_says_what_was_built(engine_folder: Path, rank_checkpoint: Path) -> None:
    manifest = read_manifest(engine_folder)
    plan = (engine_folder / "rank0.engine").read_bytes()
    geometry = tiny_geometry()
    assert manifest.geometry == geometry
    assert manifest.replay == ReplayGeometry(history=8, max_draft_len=3)
    assert (manifest.engine_sha256, manifest.engine_bytes) == (hashlib.sha256(plan).hexdigest(), len(plan))
    assert manifest.compute_capabilities == (80, 89, 120)
    assert manifest.checkpoint.weights_bytes == (rank_checkpoint / "rank0.safetensors").stat().st_size
    states = state_specs(geometry, manifest.replay, manifest.limits)
    aliases = {t.name: t.shares_address_with for t in manifest.tensors if t.shares_address_with is not None}
    assert aliases == {spec.present_name: spec.past_name for spec in states}
    weights = [tensor.name for tensor in manifest.tensors if tensor.role == "weight"]
    assert weights == [spec.name for spec in weight_specs(geometry)]
    decode, prefill = manifest.profiles
    assert (decode.batch, decode.window, decode.logits) == ((1, 4, 4), (1, 4, 4), (1, 4, 4))
    assert (prefill.batch, prefill.window, prefill.logits) == ((1, 1, 1), (1, 16, 16), (1, 1, 1))
    assert {plugin.op_type: plugin.nodes for plugin in manifest.plugins} == {"ReplayMamba2WithConv": 2}


def test_the_builder_reports_the_plugin_layers_in_both_profiles(engine_folder: Path) -> None:
    report = read_report(engine_folder)
    assert report is not None
    names = [f"layers.{layer}.mixer.ReplayMamba2WithConv" for layer in (0, 3)]
    assert [layer.name for layer in report.network_layers if layer.kind == "PLUGIN_V3"] == names
    assert sum(layer.kind == "KV_CACHE_UPDATE" for layer in report.network_layers) == 2
    built = [layer.name for layer in report.engine_layers if layer.kind == "PluginV3"]
    assert built == names + [f"{name} [profile 1]" for name in names]


def test_the_times_of_a_build_are_of_steps_that_do_not_contain_each_other(engine_folder: Path) -> None:
    report = read_report(engine_folder)
    assert report is not None
    steps = ["load plugins", "compile kernels", "start process", "export", "parse", "build engine"]
    assert list(report.seconds) == steps
    assert all(seconds >= 0 for seconds in report.seconds.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"history": 3, "max_draft_len": 3}, ConfigError, "history: found 3 with max_draft_len=3; needed at least 4"),
        ({"history": "most"}, ConfigError, "history: found 'most'; needed a valid integer"),
        ({"history": "auto", "max_draft_len": 40}, ConfigError, "history: found 'auto' with max_draft_len=40"),
        ({"history": "auto", "max_draft_len": 8}, UnsupportedError, "max_draft_len at most 7"),
        ({"max_input_len": 64, "max_seq_len": 32}, ConfigError, "max_input_len: found 64; needed at most max_seq_len"),
        ({"max_num_tokens": 20}, ConfigError, "max_num_tokens: found 20; needed at most max_input_len"),
        ({"max_batch_size": 65536}, ConfigError, "max_batch_size: found 65536; needed at most 65535"),
        ({"max_seq_len": 2**31 - 1, "max_draft_len": 1}, ConfigError, "max_seq_len: found .* at most 2147483646"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size: found 0; needed 1 or more"),
        (
            {"compute_capabilities": [90]},
            ConfigError,
            r"compute_capability: found 9\.0; needed .* builds for: 7\.5, 8\.0",
        ),
        ({"backend": "onnx"}, BackendError, "backend: found 'onnx'"),
        ({"max_draft_len": 8}, UnsupportedError, "max_draft_len at most 7"),
    ],
)
def test_contradictory_options_are_refused_before_any_work(
    rank_checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type[ReplaySSMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(rank_checkpoint, tmp_path / "engine", **(SMALL | options))
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_taken_is_refused_and_left_alone(rank_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ConfigError, match="needed a new or empty folder"):
        build(rank_checkpoint, tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_what_is_no_rank_checkpoint_is_refused(engine_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config_only").mkdir()
    write_config(tmp_path / "config_only", tiny_geometry())
    for folder, options, message in (
        (tmp_path / "absent", {}, "found nothing there"),
        (engine_folder, {}, "found an engine folder"),
        (tmp_path / "config_only", {"weights": "embedded"}, "found no rank0.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=message):
            build(folder, tmp_path / "engine", **(SMALL | options))
    assert not (tmp_path / "engine").exists()


def test_damaged_weights_are_refused_before_any_work(rank_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_bytes((rank_checkpoint / "config.json").read_bytes())
    data = (rank_checkpoint / "rank0.safetensors").read_bytes()
    (checkpoint / "rank0.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors"):
        build(checkpoint, tmp_path / "engine", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def plan_of(model: onnx.ModelProto, folder: Path) -> None:
    """Parse and build a graph of the tiny geometry, with this process's TensorRT-RTX."""
    replay, limits = (
        ReplayGeometry(history=8, max_draft_len=3),
        EngineLimits(max_batch_size=2, max_input_len=16, max_seq_len=32, max_num_tokens=16),
    )
    chosen = backend.load("tensorrt_rtx")
    chosen.load_plugins()
    onnx.save(model, folder / "model.onnx")
    tensors = bindings(tiny_geometry("M"), replay, limits, "external")
    files = folder / "model.onnx", folder / "rank0.engine"
    build_plan(chosen, *files, tensors, profiles(replay, limits), [80], BuildProgress())


@pytest.fixture(scope="module")
def small_graph() -> onnx.ModelProto:
    replay = ReplayGeometry(history=8, max_draft_len=3)
    limits = EngineLimits(max_batch_size=2, max_input_len=16, max_seq_len=32, max_num_tokens=16)
    model = export(tiny_geometry("M"), replay, limits)
    set_kernels(model, kernel_images(tiny_geometry("M"), replay, [80]))
    return model


def changed(model: onnx.ModelProto, op_type: str, **attributes: int) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    (node,) = [node for node in copy.graph.node if node.op_type == op_type]
    for attribute in node.attribute:
        attribute.i = attributes.get(attribute.name, attribute.i)
    return copy


def test_a_graph_that_the_parser_refuses_is_told_in_its_own_words(small_graph: onnx.ModelProto, tmp_path: Path) -> None:
    copy = changed(small_graph, "ReplayMamba2WithConv")
    next(node for node in copy.graph.node if node.op_type == "ReplayMamba2WithConv").op_type = "ReplayMamba9"
    with pytest.raises(
        BuildError, match=r"(?s)ONNX parser: refused.*ReplayMamba9 layers\.0\.mixer.*[Pp]lugin not found"
    ):
        plan_of(copy, tmp_path)


def test_a_ring_that_is_too_short_is_refused_by_the_plugin_with_the_reason(
    small_graph: onnx.ModelProto, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=r"(?s)x_ring.*12.*history"):
        plan_of(changed(small_graph, "ReplayMamba2WithConv", history=30), tmp_path)


class InterruptedProgress(BuildProgress):
    """Interrupts the build once TensorRT is about to begin."""

    def monitor(self, trt: ModuleType, cancelled: threading.Event) -> Any:
        signal.raise_signal(signal.SIGINT)
        assert cancelled.is_set()
        return super().monitor(trt, cancelled)


def test_an_interrupted_engine_build_leaves_nothing(rank_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(rank_checkpoint, tmp_path / "engine", progress=InterruptedProgress(), **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_terminated_command_leaves_nothing(rank_checkpoint: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    options = ["--checkpoint_dir", str(rank_checkpoint), "--output_dir", str(tmp_path / "engine")]
    command = "from trtllm_replayssm.cli.main import main; raise SystemExit(main())"
    process = subprocess.Popen([sys.executable, "-c", command, "build", *options], env=environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()), "the build never began"
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_the_command_turns_a_mistake_into_one_line_and_exit_code_2(
    rank_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["build", "--checkpoint_dir", str(rank_checkpoint), "--output_dir", str(tmp_path / "engine")]
    for options, message in (
        (["--history", "2", "--max_draft_len", "4"], "history: found 2 with max_draft_len=4"),
        (["--compute_capability", "8.\u00b2"], "compute_capability: found '8.\u00b2'; needed MAJOR.MINOR"),
        (["--compute_capability", "eight"], "compute_capability: found 'eight'; needed MAJOR.MINOR"),
        (["--backend", "tensorrt_rtx", "--compute_capability", "8.0 9.0"], "found 9.0"),
        (["--backend", "tensorrt_rtx", "--compute_capability", "8.0", "9.0"], "found 9.0"),
    ):
        assert main([*paths, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and "Traceback" not in error
        assert error.count("[C001]") <= 1
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_found_before_the_long_steps(
    rank_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.load("tensorrt_rtx")
    # The compiler is part of the cached library's key: one that another compiler made is not taken.
    monkeypatch.setenv("CXX", "no-such-compiler")
    progress = BuildProgress()
    with pytest.raises(BackendError, match="found no compiler 'no-such-compiler'"):
        build(rank_checkpoint, tmp_path / "engine", progress=progress, **SMALL)
    assert not progress.seconds
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_an_absent_backend_is_told_with_what_was_tried_and_how_to_mend_it() -> None:
    with pytest.raises(BackendError, match=r"(?s)import tensorrt: .*pip install 'tensorrt-cu13>=10\.14,<12'"):
        backend.load("tensorrt")


@pytest.mark.parametrize(
    ("name", "version", "needed"),
    [
        ("tensorrt_rtx", "1.6.0.5", r"1\.7 or newer, below 2\."),
        ("tensorrt_rtx", "2.0.0.1", r"1\.7 or newer, below 2\."),
        ("tensorrt", "10.13.3.9", r"10\.14 or newer, below 12\."),
        ("tensorrt", "12.0.1", r"10\.14 or newer, below 12\."),
    ],
)
def test_a_backend_that_is_too_old_or_too_new_is_refused(name: BackendName, version: str, needed: str) -> None:
    other = ModuleType(name)
    other.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=rf"found version {version}; needed {needed}"):
        backend._prepare(name, other)


def test_what_tensorrt_said_is_its_first_errors_or_else_its_warnings() -> None:
    lines = [f"line {number}" for number in range(24)]
    for log in (backend.LogLines(lines), backend.LogLines(["a warning", *lines], failures=lines)):
        assert log.errors().splitlines() == ["  line 0", "  line 1", "  line 2", "  line 3", "  and 20 more"]


def test_kernels_are_compiled_for_the_fewest_architectures() -> None:
    assert fewest_architectures([89, 80, 86]) == ["sm_80"]
    assert fewest_architectures([86, 89]) == ["sm_86"]
    assert fewest_architectures([89]) == ["sm_89"]
    assert fewest_architectures([80, 90, 120]) == ["sm_80", "sm_90a", "sm_120"]


def test_a_manifest_of_another_schema_or_none_is_refused(engine_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="found no readable manifest"):
        read_manifest(tmp_path)
    content = json.loads((engine_folder / "manifest.json").read_text())
    for change, message in (
        ({"schema_version": 99}, "found schema_version 99; needed 1"),
        ({"replay": {"history": 2, "max_draft_len": 5, "state_dtype": "float32"}}, "replay"),
        ({"unknown": 1}, "unknown"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(content | change))
        with pytest.raises((ManifestError, ConfigError), match=message):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="not JSON"):
        read_manifest(tmp_path)


def test_the_process_that_builds_leaves_torch_and_onnx_to_its_child() -> None:
    # With CUDA's libraries torch takes half a gigabyte, which a true-size build does not have to spare.
    script = "import sys; import trtllm_replayssm.builders.engine; print({'torch', 'onnx'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == "set()"
