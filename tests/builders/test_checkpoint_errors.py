"""Folders that cannot be converted: one clear error, and nothing is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import edit_config
from trtllm_replayssm.builders.checkpoint.convert import convert
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.checkpoint.rank_checkpoint import load_weights, read_config
from trtllm_replayssm.builders.checkpoint.source import stream_weights
from trtllm_replayssm.builders.checkpoint.staging import staged_folder
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import CapacityError, CheckpointError, ConfigError, ReplaySSMError, UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickle_instead(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def unlist_a_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["backbone.norm_f.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def point_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


NORM = "backbone.norm_f.weight"

BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), "found no config.json in it; needed a Hugging Face folder"),
    "no-weights": (lambda f: (f / SINGLE).unlink(), "found no weights; needed model.safetensors"),
    "pickle-only": (pickle_instead, "Convert to safetensors"),
    "other-name": (lambda f: (f / SINGLE).rename(f / "weights.safetensors"), "found weights.safetensors; needed"),
    "truncated": (lambda f: truncate(f / SINGLE), "truncated or damaged"),
    "not-safetensors": (lambda f: (f / SINGLE).write_bytes(b"{}"), "truncated or damaged"),
    "empty-weights": (lambda f: (f / SINGLE).write_bytes(b""), "truncated or damaged"),
    "wrong-architecture": (lambda f: edit_config(f, model_type="llama"), "found model_type 'llama'"),
    "unknown-key": (lambda f: edit_config(f, wobble=1), "unknown keys wobble"),
    "missing-tensor": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), "norm_f.weight: missing; needed [64]"),
    "extra-tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"backbone.extra.weight": torch.ones(2)})),
        "backbone.extra.weight: unexpected [2]",
    ),
    "wrong-shape": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(63)})),
        "backbone.norm_f.weight: found [63]; needed [64]",
    ),
    "wrong-type": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        "backbone.norm_f.weight: found type I8; needed one of F32, F16, BF16",
    ),
    "stored-twice": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm_f.weight": torch.ones(64)})),
        "stored twice",
    ),
    "bias-against-config": (lambda f: edit_config(f, use_conv_bias=False), "conv1d.bias: unexpected [288]"),
}

BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing-shard": (lambda f: first_shard(f).unlink(), "shards; needed model-00001-of-"),
    "truncated-shard": (lambda f: truncate(first_shard(f)), "truncated or damaged"),
    "broken-index": (lambda f: truncate(f / INDEX), "found no readable weight_map"),
    "empty-index": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "empty weight_map"),
    "unlisted-tensor": (unlist_a_tensor, "found other tensors than model.safetensors.index.json lists for it"),
    "nested-index": (lambda f: (f / INDEX).write_text("[" * 200_000), "found no readable weight_map"),
    "list-for-a-shard": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": ["b"]}}'), "found shard ['b']; needed"),
    "shard-elsewhere": (point_outside, "needed the name of a file in the same folder"),
}


def assert_refused(folder: Path, sentence: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = workspace / "new" / "checkpoint"
    before = sorted(workspace.iterdir())
    assert main(["convert", "--model_dir", str(folder), "--output_dir", str(output)]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0].startswith("error: ")
    assert sentence in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(workspace.iterdir()) == before, "nothing is left behind"


@pytest.mark.parametrize(("damage", "sentence"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_a_bad_folder_is_one_error_and_exit_code_2(
    tmp_path: Path,
    tiny_folder: Path,
    damage: Callable[[Path], object],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "hf")
    damage(folder)
    assert_refused(folder, sentence, tmp_path, capsys)
    with pytest.raises(ReplaySSMError):
        convert(folder, tmp_path / "checkpoint")


@pytest.mark.parametrize(("damage", "sentence"), BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_bad_shards_are_one_error_and_exit_code_2(
    tmp_path: Path,
    sharded_folder: Path,
    damage: Callable[[Path], object],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(sharded_folder, tmp_path / "hf")
    damage(folder)
    assert_refused(folder, sentence, tmp_path, capsys)


def test_no_folder_and_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(tmp_path / "absent", "found nothing there", tmp_path, capsys)
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path / "file", "found a file", tmp_path, capsys)


def test_all_tensors_that_do_not_fit_are_listed_at_once(tmp_path: Path, tiny_folder: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "hf")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.layers.0.mixer.Q"] = tensors.pop("backbone.layers.0.mixer.D")
        tensors["lm_head.weight"] = torch.ones(2, 2)

    edit_tensors(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "checkpoint")
    for part in ("3 tensors", "layers.0.mixer.D: missing", "mixer.Q: unexpected", "lm_head.weight: found [2, 2]"):
        assert part in str(caught.value)


def test_an_output_that_is_taken_is_not_touched(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    for output, sentence in (("taken", "a folder that is not empty"), ("taken/mine.txt", "found a file")):
        assert main(["convert", "--model_dir", str(tiny_folder), "--output_dir", str(tmp_path / output)]) == 2
        assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine.txt"]


def test_an_output_that_cannot_be_written_is_exit_code_2(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    output = tmp_path / "file" / "sub" / "checkpoint"
    assert main(["convert", "--model_dir", str(tiny_folder), "--output_dir", str(output)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_more_than_one_rank_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="tp_size: found 2; needed 1"):
        convert(tiny_folder, tmp_path / "checkpoint", tp_size=2)


def test_an_unknown_dtype_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: found 'int4'"):
        convert(tiny_folder, tmp_path / "checkpoint", dtype="int4")


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "hf")
    edit_tensors(folder, lambda t: t[NORM].__setitem__(7, -70000.0))
    with pytest.raises(
        CheckpointError, match="final_norm.weight: found a value of magnitude 70000; needed at most 65504"
    ):
        convert(folder, tmp_path / "checkpoint", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    convert(folder, tmp_path / "checkpoint", dtype="bfloat16")


def test_a_checkpoint_is_not_converted_twice(tmp_path: Path, tiny_folder: Path) -> None:
    checkpoint = convert(tiny_folder, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="converted already"):
        convert(checkpoint, tmp_path / "again")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match="found 1,000 bytes free"):
        convert(tiny_folder, tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["sigint", "sigterm"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, tiny_folder: Path, number: int, code: int) -> None:
    # The real command in a process of its own; the read of its third tensor blocks until the signal arrives.
    script = """
import sys, time
from pathlib import Path
from trtllm_replayssm.builders.checkpoint.index import SourceTensor
from trtllm_replayssm.cli.main import main
read, count = SourceTensor.read, 0
def slow(self):
    global count
    count += 1
    if count == 3:
        Path(sys.argv[3]).touch()
        time.sleep(60)
    return read(self)
SourceTensor.read = slow
sys.exit(main(["convert", "--model_dir", sys.argv[1], "--output_dir", sys.argv[2]]))
"""
    output, started = tmp_path / "new" / "checkpoint", tmp_path / "started"
    arguments = [sys.executable, "-c", script, str(tiny_folder), str(output), str(started)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not started.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list((tmp_path / "new").glob(".checkpoint.partial-*")), "the conversion is under way"
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    started.unlink()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(
    tiny_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "checkpoint"
    left, other = tmp_path / f".checkpoint.partial-{os.getpid()}", tmp_path / ".checkpoint2.partial-1"
    for folder in (left, other):
        folder.mkdir()
        (folder / "weights").write_text("half")
    script = """
import sys, time
from pathlib import Path
from trtllm_replayssm.builders.checkpoint.staging import staged_folder
with staged_folder(Path(sys.argv[1])):
    print("writing", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script, str(output)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        written = tmp_path / f".checkpoint.partial-{process.pid}"
        assert {path.name for path in tmp_path.iterdir()} == {written.name, other.name}
        with pytest.raises(ZeroDivisionError), staged_folder(output):
            assert written.exists()
            raise ZeroDivisionError
        process.kill()
    assert written.exists()
    convert(tiny_folder, output)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", other.name}


def test_a_rank_checkpoint_that_was_tampered_with_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = convert(tiny_folder, tmp_path / "checkpoint")
    geometry = read_config(folder)
    original = (folder / "config.json").read_text()

    def refused(sentence: str, **changes: object) -> None:
        edit_config(folder, **changes)
        with pytest.raises(ReplaySSMError, match=sentence):
            read_config(folder)
        (folder / "config.json").write_text(original)

    own = json.loads(original)["trtllm_replayssm"]
    refused(r"hidden_size=65, not 64", hidden_size=65)
    refused(r"unknown key wobble", wobble=1)
    refused(r"found schema 2; needed 1", trtllm_replayssm=own | {"schema": 2})
    refused(r"d_model", trtllm_replayssm=own | {"geometry": own["geometry"] | {"d_model": "wide"}})
    refused(r"runs one rank", mapping={"world_size": 2, "tp_size": 2, "pp_size": 1})
    refused(r"needed a rank checkpoint", trtllm_replayssm=...)

    weights = load_file(folder / "rank0.safetensors")
    weights["extra"] = weights.pop("final_norm.weight")
    save_file(weights, folder / "rank0.safetensors")
    with pytest.raises(CheckpointError, match=r"final_norm.weight is missing, extra is unexpected"):
        load_weights(folder, geometry)
    truncate(folder / "rank0.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_weights(folder, geometry)
    (folder / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="needed the weights"):
        load_weights(folder, geometry)
    assert not open_model_folder(folder).has_weights


def test_weights_of_another_geometry_are_not_streamed(tiny_folder: Path) -> None:
    geometry = open_model_folder(tiny_folder).geometry
    with pytest.raises(CheckpointError, match="found tensors of another geometry"):
        stream_weights(tiny_folder, geometry.model_copy(update={"d_model": 128}))
