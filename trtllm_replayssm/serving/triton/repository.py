"""A Triton model repository with a model on the Python backend, from any folder that ``LLM`` opens."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder
from trtllm_replayssm.builders.inspection import inspect_folder
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.opening import check_options
from trtllm_replayssm.runtime.settings import Options
from trtllm_replayssm.runtime.speculative import factory
from trtllm_replayssm.serving.triton.fields import BATCH_SIZE, INPUTS, OUTPUTS, Field
from trtllm_replayssm.serving.triton.pbtxt import Comment, Name, Value, render
from trtllm_replayssm.serving.triton.settings import ModelSettings

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = "model.py"
VERSION = "1"
# Triton 2.51 ends a path at its first space, and then waits for ever for a process that could not begin; its Python
# opens no path beyond ASCII.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_INSTANCES = 2**31 - 1
ENGINE_FOLDER, CHECKPOINT_FOLDER, DRAFT_FOLDER = "engine", "checkpoint", "draft_model"

# What a model folder may consist of; weights to be unpickled are never read, so they stay behind.
_SUFFIXES = {".json", ".safetensors", ".engine", ".jinja", ".txt", ".model"}

_MODEL = '''"""The entry of Triton's Python backend; what it does is in trtllm_replayssm.serving.triton.model."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance: Triton calls these three functions, and newer versions the fourth."""

    def initialize(self, args):
        # Not above: Triton also imports this file in a process that only reads the configuration.
        from trtllm_replayssm.serving.triton.model import ReplayModel

        self._model = ReplayModel(pb_utils, args)

    def execute(self, requests):
        self._model.execute(requests)

    def finalize(self):
        self._model.finalize()

    def is_ready(self):
        return self._model.is_ready()
'''


@dataclass(frozen=True)
class Instances:
    """Where a model runs, and how often.

    Attributes:
        kind: "cpu" runs the torch executor; "gpu" an engine, or the torch executor on CUDA; with "auto" Triton decides,
            by whether there is a GPU.
        count: instances, on each GPU or on the CPU; each is a process with weights and states of its own.
        gpus: device numbers; empty for all that Triton sees.
    """

    kind: Literal["auto", "cpu", "gpu"]
    count: int = 1
    gpus: tuple[int, ...] = ()

    def message(self) -> dict[str, Value]:
        """Return the instance group.

        Raises:
            ConfigError: GPUs for a model on the CPU or ones that cannot be, or no number of instances.
        """
        if not 1 <= self.count <= _MAX_INSTANCES:
            raise ConfigError(f"instances: found {self.count}; needed at least 1, and no more than Triton can count.")
        if min(self.gpus, default=0) < 0 or len(set(self.gpus)) < len(self.gpus):
            raise ConfigError(f"gpus: found {list(self.gpus)}; needed numbers of devices, each once.")
        if self.kind == "cpu" and self.gpus:
            raise ConfigError(f"gpus: found {list(self.gpus)} for a model on the CPU; needed none. Use kind 'gpu'.")
        group: dict[str, Value] = {"kind": Name(f"KIND_{self.kind.upper()}"), "count": self.count}
        return group | ({"gpus": list(self.gpus)} if self.gpus else {})


def write_model(
    repository: Path,
    name: str,
    settings: ModelSettings,
    *,
    instances: Instances,
    is_decoupled: bool = True,
    by_reference: bool = False,
) -> Path:
    """Write a model into a repository, which may have others; it appears whole or not at all.

    Args:
        repository: the repository; made where there is none.
        name: of the model, new in the repository.
        settings: with the paths of the folders as they are now.
        instances: where it runs.
        is_decoupled: whether it may stream. Triton offers ``infer`` of models that may not, alone.
        by_reference: name the folders where they are, instead of bringing them into the repository.

    Returns:
        The model's folder.

    Raises:
        ReplaySSMError: no model folder, options that do not go together, or a model of that name.
    """
    check_name(name)
    check_output(repository / name)
    folders = _folders(settings)
    for path in folders.values():
        inspect_folder(path)  # refuses what is no model, before anything is written
    group = instances.message()
    _check_options(settings)
    with staged_folder(repository / name) as staging:
        version = staging / VERSION
        version.mkdir()
        placed = {
            option: _place(path, version / _TARGETS[option], by_reference=by_reference)
            for option, path in folders.items()
        }
        settings = settings.model_copy(update=placed)
        (version / MODEL_FILE).write_text(_MODEL, encoding="utf-8")
        config = render(model_config(name, settings, group, is_decoupled=is_decoupled))
        (staging / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
    return repository / name


def model_config(
    name: str, settings: ModelSettings, group: Mapping[str, Value], *, is_decoupled: bool
) -> dict[str, Value]:
    """Return the model configuration as a message."""
    kind = "many responses: text streams" if is_decoupled else "one response"
    parameters: list[Value] = [
        {"key": key, "value": {"string_value": value}} for key, value in settings.parameters().items()
    ]
    return {
        Comment("Written by trtllm-replayssm triton. The names are those of TensorRT-LLM's Triton models."): "",
        "name": name,
        "backend": "python",
        Comment("A request is one prompt; requests are batched by the scheduler of the model, step by step."): "",
        "max_batch_size": BATCH_SIZE,
        Comment(f"A request has {kind}."): "",
        "model_transaction_policy": {"decoupled": is_decoupled},
        "input": [_tensor(field, is_input=True) for field in INPUTS],
        "output": [_tensor(field, is_input=False) for field in OUTPUTS],
        Comment("Each instance is a process with weights, states and a queue of its own."): "",
        "instance_group": [group],
        Comment("How the model is opened; a relative folder begins at the version's."): "",
        "parameters": parameters,
    }


def is_openable(path: Path) -> bool:
    """Return whether Triton's Python backend opens a model in this place."""
    text = str(path.resolve())
    return text.isascii() and text.isprintable() and " " not in text


def check_name(name: str) -> None:
    """Refuse a model name that is no folder name of its own, or none that Triton opens.

    Raises:
        ConfigError: it is empty, hidden, or of other characters.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name: found {name!r}; needed a folder's name of letters, digits, '_', '-' and '.', the last two not in "
            f"front."
        )


def _tensor(field: Field, *, is_input: bool) -> dict[str, Value]:
    message: dict[str, Value] = {
        Comment(field.meaning): "",
        "name": field.name,
        "data_type": Name(field.data_type),
        "dims": list(field.dims),
    }
    return message | ({"optional": True} if is_input else {})


_TARGETS = {
    "engine_dir": ENGINE_FOLDER,
    "checkpoint_dir": CHECKPOINT_FOLDER,
    "speculative_model": DRAFT_FOLDER,
}


def _folders(settings: ModelSettings) -> dict[str, Path]:
    """Return the folders that the settings name, by the option that names each."""
    named = {option: getattr(settings, option) for option in _TARGETS}
    return {option: Path(path) for option, path in named.items() if path is not None}


def _check_options(settings: ModelSettings) -> None:
    """Refuse what the model could not be opened with on any machine; Triton would say so at its start alone."""
    wishes = settings.llm_options(Path(), "cpu")
    drafts = wishes.get("speculative_config")
    options = Options(
        dtype=settings.dtype,
        max_batch_size=settings.max_batch_size,
        max_seq_len=settings.max_seq_len,
        max_num_tokens=settings.max_num_tokens,
        replay=wishes["replay"],
        kv_cache_config=wishes["kv_cache_config"],
        max_draft_len=factory.max_draft_len(drafts, None),
        returns_hidden_states=factory.reads_hidden_states(drafts, None),
    )
    check_options(wishes["model"], settings.executor, options, wishes["checkpoint_dir"])


def _place(source: Path, target: Path, *, by_reference: bool) -> str:
    """Bring a folder to a place in the version's folder, and return what names it there."""
    if by_reference:
        return str(source.resolve())
    target.mkdir()
    link_files([path for path in sorted(source.iterdir()) if path.suffix in _SUFFIXES and path.is_file()], target)
    return target.name


def link_files(files: Sequence[Path], target: Path) -> None:
    """Bring files into a folder: as hard links where the file system allows it, else as copies."""
    for file in files:
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)
