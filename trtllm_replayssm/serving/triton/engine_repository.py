"""A Triton model for its own TensorRT backend: the plan, implicit states, the plugin library.

The client drives the engine: it sends ``input_ids``, the lengths and ``slot_ids`` of each step, commits by
``ops.advance`` and samples from ``logits``. Triton keeps the states of a sequence between the requests of it. So an
engine has one slot, the sequence's, and a request is one step of one sequence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder
from trtllm_replayssm.contract.manifest import (
    ENGINE_FILE,
    Manifest,
    TensorRecord,
    check_engine_size,
    read_manifest,
)
from trtllm_replayssm.contract.tensors import TensorSpec, hidden_states_spec, logits_spec, state_specs, step_specs
from trtllm_replayssm.errors import ConfigError, ManifestError
from trtllm_replayssm.plugins.library import plugin_library
from trtllm_replayssm.serving.triton.pbtxt import Comment, Name, Value, render
from trtllm_replayssm.serving.triton.repository import CONFIG_FILE, VERSION, Instances, check_name, link_files

PLAN_FILE = "model.plan"
DATA_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "int32": "TYPE_INT32"}
MAX_SEQUENCES = 64
"""Sequences between whose steps an instance changes; each has states on the GPU."""
IDLE_MICROSECONDS = 60_000_000

_CACHE_NOTE = (
    "the engine has key/value caches, which TensorRT updates in place: it needs past and present at one address. "
    "Triton's TensorRT backend gives every binding a buffer of its own (its sources of July 2026), so that it is not "
    "expected to run this engine. Use the python backend."
)
_COPY_NOTE = (
    "Triton's TensorRT backend gives past and present states buffers of their own: each step copies all of them, which "
    "the python backend does not."
)


@dataclass(frozen=True)
class WrittenModel:
    """What was written.

    Attributes:
        folder: of the model.
        plugin_library: for ``--backend-config=tensorrt,plugins=...``.
        notes: what to know of this engine in this place.
    """

    folder: Path
    plugin_library: Path
    notes: tuple[str, ...]


def write_model(repository: Path, name: str, engine_dir: Path, *, instances: Instances) -> WrittenModel:
    """Write an engine into a repository; it appears whole or not at all.

    Args:
        repository: the repository; made where there is none.
        name: of the model, new in the repository.
        engine_dir: an engine folder of the backend "tensorrt" with embedded weights and one slot.
        instances: where it runs.

    Raises:
        ReplaySSMError: another engine, or a model of that name.
    """
    check_name(name)
    check_output(repository / name)
    manifest = read_manifest(engine_dir)
    check_engine_size(engine_dir, manifest)
    check_servable(manifest)
    message = model_config(name, manifest, instances)
    check_config(message, manifest)
    library = plugin_library()
    with staged_folder(repository / name) as staging:
        (staging / VERSION).mkdir()
        link_files([engine_dir / ENGINE_FILE], staging / VERSION)
        (staging / VERSION / ENGINE_FILE).rename(staging / VERSION / PLAN_FILE)
        link_files([library], staging)
        (staging / CONFIG_FILE).write_text(render(message) + "\n", encoding="utf-8")
    folder = repository / name
    has_caches = any(spec.is_cache for spec in state_specs(manifest.geometry, manifest.replay, manifest.limits))
    notes = (_CACHE_NOTE, _COPY_NOTE) if has_caches else (_COPY_NOTE,)
    return WrittenModel(folder, (folder / library.name).resolve(), notes)


def check_servable(manifest: Manifest) -> None:
    """Refuse an engine that Triton's TensorRT backend cannot open or keep the states of.

    Raises:
        ManifestError: naming all that is in the way.
    """
    problems = []
    if manifest.backend != "tensorrt":
        problems.append(f"backend {manifest.backend!r}, needed 'tensorrt'")
    if manifest.weights != "embedded":
        problems.append(f"{manifest.weights} weights, needed embedded ones: Triton binds none")
    if manifest.limits.max_batch_size != 1:
        problems.append(f"max_batch_size {manifest.limits.max_batch_size}, needed 1: a state belongs to one sequence")
    if problems:
        raise ManifestError(
            f"engine: found {'; '.join(problems)}. Build it with --backend tensorrt --weights embedded "
            f"--max_batch_size 1, or use the python backend, which serves any engine."
        )


def model_config(name: str, manifest: Manifest, instances: Instances) -> dict[str, Value]:
    """Return the model configuration as a message, from the engine's own list of tensors."""
    if instances.kind == "cpu":
        raise ConfigError("kind: found 'cpu' for the TensorRT backend; needed 'gpu'.")
    step = [record for record in manifest.tensors if record.role == "step"]
    results = [record for record in manifest.tensors if record.role == "result"]
    pasts = {record.name: record for record in manifest.tensors if record.role == "state" and record.is_input}
    presents = [record for record in manifest.tensors if record.role == "state" and not record.is_input]
    group = {
        **instances.message(),
        Comment("The optimization profiles: decode and prefill, whichever a request's shapes fit."): "",
        "profile": [str(index) for index in range(len(manifest.profiles))],
    }
    return {
        Comment("Written by trtllm-replayssm triton --backend tensorrt."): "",
        "name": name,
        "platform": "tensorrt_plan",
        "default_model_filename": PLAN_FILE,
        Comment("The engine's own batch dimension is written out: it is 1, the sequence's slot."): "",
        "max_batch_size": 0,
        "input": [_tensor(record) for record in step],
        "output": [_tensor(record) for record in results],
        Comment("Requests of one correlation id are steps of one sequence; its states stay with Triton."): "",
        "sequence_batching": {
            "max_sequence_idle_microseconds": IDLE_MICROSECONDS,
            "oldest": {"max_candidate_sequences": MAX_SEQUENCES},
            "state": [_state(pasts, record) for record in presents],
        },
        "instance_group": [group],
    }


def check_config(message: Mapping[str, Value], manifest: Manifest) -> None:
    """Compare a configuration with the engine's tensors, and those with the model's, name by name.

    Raises:
        ManifestError: naming the first tensor and field that differ.
    """
    found = {name: (kind, dict(fields)) for kind, name, fields in _declared(message)}
    for kind, name, fields in _needed(manifest):
        declared_kind, declared = found.pop(name, ("nothing", {}))
        if declared_kind != kind:
            raise ManifestError(f"{name}: found {declared_kind} in the configuration; needed {kind}.")
        for key, value in fields.items():
            if declared.get(key) != value:
                raise ManifestError(f"{name}: found {key} {declared.get(key)} in the configuration; needed {value}.")
    if found:
        raise ManifestError(f"configuration: found {', '.join(found)}, which the engine does not have; needed none.")
    recorded = {(record.name, record.dtype, record.shape, record.is_input) for record in manifest.tensors}
    expected = set(_bindings(manifest))
    if recorded != expected:
        names = ", ".join(sorted({name for name, *_ in recorded ^ expected})[:5])
        raise ManifestError(f"manifest: found other tensors than the model's geometry has: {names}. Build it again.")


def _declared(message: Mapping[str, Value]) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Return (kind, name, fields) of every tensor of a configuration."""
    batching = message["sequence_batching"]
    assert isinstance(batching, Mapping)
    for kind, tensors in (("input", message["input"]), ("output", message["output"]), ("state", batching["state"])):
        assert isinstance(tensors, list)
        for tensor in tensors:
            yield kind, str(tensor["input_name" if kind == "state" else "name"]), tensor


def _needed(manifest: Manifest) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Return the same of what the model's geometry says, independently of how the configuration was made."""
    for spec in step_specs():
        yield "input", spec.name, {"data_type": DATA_TYPES[spec.dtype], "dims": dims_of(spec.shape)}
    for spec in _results(manifest):
        yield "output", spec.name, {"data_type": DATA_TYPES[spec.dtype], "dims": dims_of(spec.shape)}
    for spec in state_specs(manifest.geometry, manifest.replay, manifest.limits):
        yield (
            "state",
            spec.past_name,
            {
                "output_name": spec.present_name,
                "data_type": DATA_TYPES[spec.dtype],
                "dims": dims_of(spec.shape),
                "use_same_buffer_for_input_output": True,
            },
        )


def _bindings(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int | str, ...], bool]]:
    for spec in step_specs():
        yield spec.name, spec.dtype, spec.shape, True
    for spec in _results(manifest):
        yield spec.name, spec.dtype, spec.shape, False
    for spec in state_specs(manifest.geometry, manifest.replay, manifest.limits):
        yield spec.past_name, spec.dtype, spec.shape, True
        yield spec.present_name, spec.dtype, spec.shape, False


def _results(manifest: Manifest) -> Iterator[TensorSpec]:
    yield logits_spec(manifest.geometry)
    if manifest.mtp is not None:
        yield hidden_states_spec(manifest.geometry)


def dims_of(shape: tuple[int | str, ...]) -> list[int]:
    """Return a shape as Triton writes it: the rows of a step are one, its tokens and positions any number."""
    return [1 if dim == "B" else -1 if isinstance(dim, str) else dim for dim in shape]


def _tensor(record: TensorRecord) -> dict[str, Value]:
    return {"name": record.name, "data_type": Name(DATA_TYPES[record.dtype]), "dims": list(dims_of(record.shape))}


def _state(pasts: Mapping[str, TensorRecord], present: TensorRecord) -> dict[str, Value]:
    past = pasts[present.shares_address_with or ""]
    dims: list[Value] = list(dims_of(past.shape))
    data_type = Name(DATA_TYPES[past.dtype])
    return {
        "input_name": past.name,
        "output_name": present.name,
        "data_type": data_type,
        "dims": dims,
        "use_same_buffer_for_input_output": True,
        # Recurrent states are not read before they are written; a cache must be finite where it is masked.
        "initial_state": [{"name": "zero", "data_type": data_type, "dims": dims, "zero_data": True}],
    }
