"""The layout for Triton's TensorRT backend: every field against the engine's tensors, and as a real Triton reads it.

There is no TensorRT backend here, nor a GPU: what the engine does in it is not tested.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.tiny_geometry import tiny_geometry, tiny_qwen_geometry
from tests.runtime.manifests import PLAN, tiny_manifest
from tests.serving.triton import server as triton
from trtllm_replayssm.builders.profiles import bindings
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import ENGINE_FILE, MANIFEST_FILE, Manifest, MtpRecord
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.errors import ManifestError
from trtllm_replayssm.serving.triton import engine_repository
from trtllm_replayssm.serving.triton.engine_repository import check_config, model_config, write_model
from trtllm_replayssm.serving.triton.pbtxt import Name, render
from trtllm_replayssm.serving.triton.repository import Instances

ONE_SLOT = EngineLimits(max_batch_size=1, max_input_len=60, max_seq_len=64, max_num_tokens=11)
GPU = Instances("gpu")


def servable(geometry: ModelGeometry | None = None, **changes: Any) -> Manifest:
    geometry = tiny_geometry() if geometry is None else geometry
    replay = ReplayGeometry(history=8, max_draft_len=2)
    made = {
        "geometry": geometry,
        "limits": ONE_SLOT,
        "backend": "tensorrt",
        "weights": "embedded",
        "tensors": bindings(geometry, replay, ONE_SLOT, "embedded"),
    }
    return tiny_manifest(**(made | changes))


def engine_folder(folder: Path, manifest: Manifest) -> Path:
    folder.mkdir()
    (folder / ENGINE_FILE).write_bytes(PLAN)
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return folder


@pytest.mark.parametrize("geometry", [tiny_geometry(), tiny_qwen_geometry()], ids=["mamba2", "gated_delta_net"])
def test_every_tensor_of_the_engine_is_declared_once(geometry: ModelGeometry) -> None:
    manifest = servable(geometry)
    message: Any = model_config("e", manifest, GPU)
    check_config(message, manifest)
    states = message["sequence_batching"]["state"]
    names = [tensor["name"] for tensor in (*message["input"], *message["output"])]
    names += [state[key] for state in states for key in ("input_name", "output_name")]
    assert sorted(names) == sorted(record.name for record in manifest.tensors)
    for state in states:
        (zero,) = state["initial_state"]
        assert (zero["dims"], zero["data_type"], zero["zero_data"]) == (state["dims"], state["data_type"], True)
    assert message["instance_group"][0]["profile"] == ["0", "1"]


def _drop_state(message: Any) -> None:
    message["sequence_batching"]["state"].pop()


def _other_type(message: Any) -> None:
    message["input"][0]["data_type"] = "TYPE_INT64"


def _other_dims(message: Any) -> None:
    message["sequence_batching"]["state"][0]["dims"][1] += 1


def _other_partner(message: Any) -> None:
    states = message["sequence_batching"]["state"]
    states[0]["output_name"], states[1]["output_name"] = states[1]["output_name"], states[0]["output_name"]


def _own_buffers(message: Any) -> None:
    message["sequence_batching"]["state"][0]["use_same_buffer_for_input_output"] = False


def _state_as_input(message: Any) -> None:
    state = message["sequence_batching"]["state"].pop()
    message["input"].append({"name": state["input_name"], "data_type": state["data_type"], "dims": state["dims"]})


def _one_more(message: Any) -> None:
    message["input"].append({"name": "more", "data_type": "TYPE_INT32", "dims": [1]})


@pytest.mark.parametrize(
    "spoil", [_drop_state, _other_type, _other_dims, _other_partner, _own_buffers, _state_as_input, _one_more]
)
def test_a_spoilt_configuration_is_found(spoil: Callable[[Any], None]) -> None:
    manifest = servable()
    message = model_config("e", manifest, GPU)
    spoil(message)
    with pytest.raises(ManifestError, match="configuration"):
        check_config(message, manifest)


def test_an_engine_with_a_head_has_hidden_states_as_an_output() -> None:
    geometry, replay = tiny_geometry(), ReplayGeometry(history=8, max_draft_len=2)
    head = MtpRecord(tensors=(), engine_sha256="0", engine_bytes=1)
    tensors = bindings(geometry, replay, ONE_SLOT, "embedded", returns_hidden_states=True)
    manifest = servable(tensors=tensors, mtp=head)
    message: Any = model_config("e", manifest, GPU)
    check_config(message, manifest)
    assert [(tensor["name"], tensor["dims"][2]) for tensor in message["output"]] == [
        ("logits", geometry.vocab_size),
        ("hidden_states", geometry.d_model),
    ]
    with pytest.raises(ManifestError, match="hidden_states"):
        check_config(message, servable(tensors=tensors))


def test_an_engine_of_another_geometry_is_found() -> None:
    other = bindings(tiny_geometry("MM*M"), ReplayGeometry(history=8, max_draft_len=2), ONE_SLOT, "embedded")
    manifest = servable(tensors=other)
    with pytest.raises(ManifestError):
        check_config(model_config("e", manifest, GPU), manifest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "tensorrt_rtx"}, "backend 'tensorrt_rtx', needed 'tensorrt'"),
        ({"weights": "external"}, "external weights, needed embedded ones"),
        ({"limits": ONE_SLOT.model_copy(update={"max_batch_size": 3})}, "max_batch_size 3, needed 1"),
    ],
)
def test_an_engine_that_triton_cannot_serve_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = engine_folder(tmp_path / "engine", servable(**changes))
    with pytest.raises(ManifestError, match=reason):
        write_model(tmp_path / "repository", "e", folder, instances=GPU)
    assert not (tmp_path / "repository").exists()


def test_the_folder_has_the_plan_the_library_and_the_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libtrtllm_replayssm_plugin.so"
    library.write_bytes(b"a library")
    monkeypatch.setattr(engine_repository, "plugin_library", lambda: library)
    folder = engine_folder(tmp_path / "engine", servable())
    written = write_model(tmp_path / "repository", "e", folder, instances=GPU)
    assert (written.folder / "1" / "model.plan").read_bytes() == PLAN
    assert written.plugin_library.read_bytes() == b"a library"
    assert "key/value caches" in written.notes[0]
    only_recurrent = engine_folder(tmp_path / "other", servable(tiny_geometry("MM")))
    (note,) = write_model(tmp_path / "repository", "f", only_recurrent, instances=GPU).notes
    assert "copies" in note


_ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            found = {t.name(): t.as_numpy() for t in request.inputs()}
            states = [a for name, a in found.items() if name.startswith("past_") and name != "past_lengths"]
            facts = [len(states), sum(a.size for a in states), sum(float(np.abs(a).sum()) for a in states)]
            logits = np.zeros((1, 1, VOCAB_SIZE), dtype=np.float32)
            logits[0, 0, :3] = facts
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits)]))
        return responses
"""


def test_triton_reads_the_configuration_and_keeps_the_states(has_server: None, tmp_path: Path) -> None:
    """With a Python model in the engine's place: it sees the states that Triton makes for a new sequence."""
    grpc_client = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    manifest = servable()
    message: Any = model_config("e", manifest, GPU)
    del message["platform"], message["default_model_filename"], message["instance_group"][0]["profile"]
    message["backend"] = "python"
    message["instance_group"][0]["kind"] = Name("KIND_CPU")
    (tmp_path / "repository" / "e" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "e" / "config.pbtxt").write_text(render(message))
    source = _ECHO.replace("VOCAB_SIZE", str(manifest.geometry.vocab_size))
    (tmp_path / "repository" / "e" / "1" / "model.py").write_text(source)
    scratch = tmp_path / "server"
    scratch.mkdir()
    shapes = {"input_ids": [1, 5], "logits_indices": [1, 1]}
    inputs = []
    for name in ("input_ids", "past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids", "logits_indices"):
        tensor = grpc_client.InferInput(name, shapes.get(name, [1]), "INT32")
        tensor.set_data_from_numpy(np.zeros(shapes.get(name, [1]), dtype=np.int32))
        inputs.append(tensor)
    with (
        triton.running(tmp_path / "repository", scratch) as server,
        grpc_client.InferenceServerClient(f"{triton.HOST}:{server.grpc}") as client,
    ):
        config = client.get_model_config("e", as_json=True)["config"]
        results = [
            client.infer("e", inputs, sequence_id=7, sequence_start=step == 0, sequence_end=step == 2)
            for step in range(3)
        ]
    specs = state_specs(manifest.geometry, manifest.replay, manifest.limits)
    assert {(s["input_name"], s["output_name"]) for s in config["sequence_batching"]["state"]} == {
        (spec.past_name, spec.present_name) for spec in specs
    }
    elements = sum(int(np.prod(engine_repository.dims_of(spec.shape))) for spec in specs)
    for result in results:
        assert result.as_numpy("logits")[0, 0, :3].tolist() == [len(specs), elements, 0.0]
