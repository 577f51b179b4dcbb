"""Tensors -> requests, results -> tensors, settings and configurations, without a server."""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.triton.conftest import MODEL
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.config import CudaGraphConfig, KvCacheConfig, SamplingParams, SchedulerConfig
from trtllm_replayssm.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    QueueFullError,
    ReplaySSMError,
    RequestError,
)
from trtllm_replayssm.runtime.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from trtllm_replayssm.serving.triton.fields import INPUTS, OUTPUTS
from trtllm_replayssm.serving.triton.metrics import TritonMetrics
from trtllm_replayssm.serving.triton.model import device_of, status_of
from trtllm_replayssm.serving.triton.pbtxt import Comment, Name, render
from trtllm_replayssm.serving.triton.repository import Instances, write_model
from trtllm_replayssm.serving.triton.requests import GenerationRequest, read_request
from trtllm_replayssm.serving.triton.responses import response_tensors
from trtllm_replayssm.serving.triton.settings import ModelSettings

ALL = frozenset(field.name for field in OUTPUTS)
DTYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64, "TYPE_BOOL": np.bool_}


def tensors(**values: Any) -> dict[str, Any]:
    types = {field.name: field.data_type for field in INPUTS}
    made: dict[str, Any] = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        made[name] = np.array([items], dtype=DTYPES.get(types[name], np.object_))
    return made


def request(**values: Any) -> GenerationRequest:
    return read_request(tensors(**values), {}, is_decoupled=True)


def test_a_request_without_sampling_options_is_greedy() -> None:
    assert request(text_input="a").params.temperature == 0.0
    assert request(text_input="a", temperature=0.8).params.temperature == 0.8  # not 0.800000011920929
    assert request(text_input="a", top_k=5).params.temperature == 1.0
    assert request(text_input="a", top_k=5, temperature=0.0).params.temperature == 0.0


def test_every_option_reaches_the_rules() -> None:
    same: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "end_id": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 6,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "prompt_ignore_length": 3,
    }
    asked = request(text_input="a", **same, stop_words=["x"], bad_words=["y"], num_return_sequences=2)
    assert asked.params == SamplingParams(**same, stop=("x",), bad=("y",), n=2)


def test_words_that_are_empty_are_none() -> None:
    params = request(text_input="a", stop_words=["", "end"], bad_words="").params
    assert (params.stop, params.bad) == (("end",), ())


def test_an_older_name_is_taken_alone() -> None:
    assert request(text_input="a", min_length=3).params.min_tokens == 3
    with pytest.raises(RequestError, match="min_length: found together with min_tokens"):
        request(text_input="a", min_length=3, min_tokens=3)


def test_a_time_in_microseconds() -> None:
    read = read_request(tensors(text_input="a"), {}, is_decoupled=False, timeout_us=1_500_000)
    assert read.timeout_s == 1.5
    assert request(text_input="a").timeout_s is None


def test_what_is_not_text_is_refused() -> None:
    with pytest.raises(RequestError, match="text_input: found bytes that are no UTF-8"):
        read_request({"text_input": np.array([[b"\xff"]], dtype=np.object_)}, {}, is_decoupled=True)
    with pytest.raises(RequestError, match="max_tokens: found 2 values; needed one"):
        request(text_input="a", max_tokens=[1, 2])


def test_parameters_of_triton_are_no_misspelt_inputs() -> None:
    read_request(tensors(text_input="a"), {"triton_enable_empty_final_response": True}, is_decoupled=True)
    with pytest.raises(RequestError, match="Was temperature meant"):
        read_request(tensors(text_input="a"), {"temprature": 1}, is_decoupled=True)


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in INPUTS if field.data_type != "TYPE_STRING"]),
        st.integers(-5, 5),
        max_size=4,
    )
)
def test_any_numbers_are_read_or_refused(values: dict[str, int]) -> None:
    # What cannot be written in the type does not come over the wire.
    values = {name: abs(value) if name == "seed" else value for name, value in values.items()}
    try:
        read = request(text_input="a", **{name: [v] if name == "input_ids" else v for name, v in values.items()})
    except ReplaySSMError as error:
        assert status_of(error) == "INVALID_ARG"
        assert ": found " in str(error)
    else:
        assert read.params.max_tokens == values.get("max_tokens", 32)


def output(*texts: str, reason: FinishReason | None = None) -> RequestOutput:
    sequences = []
    for index, text in enumerate(texts):
        ids = [ord(letter) for letter in text]
        found = [{token: Logprob(-0.5, 1)} for token in ids]
        sequences.append(CompletionOutput(index, text, ids, -0.5 * len(ids), reason, None, found))
    return RequestOutput(0, "p:", [1, 2], sequences, finished=reason is not None)


def iteration(*outputs: RequestOutput) -> list[RequestOutput]:
    return [outputs[0], *(new.since(before) for before, new in pairwise(outputs))]


def test_pieces_add_up_to_the_whole() -> None:
    asked = request(
        text_input="p:", num_return_sequences=2, temperature=1.0, return_log_probs=True, return_num_output_tokens=True
    )
    outputs = iteration(output("a", ""), output("abc", "x"), output("abcd", "xyz", reason="stop"))
    pieces = [response_tensors(item, asked, ALL) for item in outputs]
    joined = [b"".join(piece["text_output"][0, index] for piece in pieces) for index in range(2)]
    assert joined == [b"abcd", b"xyz"]
    assert [piece["sequence_length"].tolist() for piece in pieces] == [[[1, 0]], [[2, 1]], [[1, 2]]]
    assert pieces[1]["output_ids"].tolist() == [[[98, 99], [120, -1]]]
    assert pieces[1]["output_log_probs"].tolist() == [[[-0.5, -0.5], [-0.5, 0.0]]]
    assert pieces[2]["cum_log_probs"].tolist() == [[-2.0, -1.5]]
    assert pieces[2]["num_output_tokens"].tolist() == [[4, 3]]
    assert pieces[2]["finish_reason"].tolist() == [[b"stop", b"stop"]]


def test_the_prompt_comes_once_and_only_what_is_wanted() -> None:
    asked = request(text_input="p:", exclude_input_in_output=False)
    outputs = iteration(output(""), output("a"), output("ab", reason="length"))
    pieces = [response_tensors(item, asked, {"text_output"}) for item in outputs]
    assert [piece["text_output"].tolist() for piece in pieces] == [[[b""]], [[b"p:a"]], [[b"b"]]]
    assert all(set(piece) == {"text_output"} for piece in pieces)


def test_settings_are_read_from_text_and_written_to_it() -> None:
    settings = ModelSettings.from_parameters(
        {"engine_dir": "engine", "history": "8", "max_batch_size": "4", "FORCE_CPU_ONLY_INPUT_TENSORS": "yes"}
    )
    assert (settings.history, settings.max_batch_size) == (8, 4)
    assert ModelSettings.from_parameters(settings.parameters()) == settings
    options = settings.llm_options(Path("/version"), "cpu")
    assert (options["model"], options["replay"].history) == (Path("/version/engine"), 8)
    assert options["replay"].model_fields_set == {"history"}, "an engine has a state type of its own"
    with pytest.raises(ConfigError, match="max_batch: unknown key"):
        ModelSettings.from_parameters({"engine_dir": "engine", "max_batch": "4"})
    with pytest.raises(ConfigError, match="max_draft_len: found without speculative"):
        ModelSettings(engine_dir="engine", max_draft_len=2).llm_options(Path(), "cpu")


def test_the_scheduler_is_the_llms_own() -> None:
    options = {"engine_dir": "e", "max_queue_size": "7", "max_prompt_steps": "3"}
    settings = ModelSettings.from_parameters(options)
    assert settings.parameters().items() >= options.items()
    expected = SchedulerConfig(max_queue_size=7, max_prompt_steps=3)
    assert settings.llm_options(Path(), "cpu")["scheduler_config"] == expected
    assert ModelSettings(engine_dir="e").llm_options(Path(), "cpu")["scheduler_config"] == SchedulerConfig()
    with pytest.raises(ConfigError, match="max_prompt_steps"):
        ModelSettings.from_parameters({"engine_dir": "e", "max_prompt_steps": "0"})


def test_an_instance_captures_its_graphs_before_it_is_ready_unless_told_otherwise() -> None:
    for options, warm_up in (({}, True), ({"warm_up": "False"}, False)):
        settings = ModelSettings.from_parameters({"engine_dir": "e", **options})
        assert ModelSettings.from_parameters(settings.parameters()) == settings
        assert settings.llm_options(Path(), "cpu")["cuda_graph_config"] == CudaGraphConfig(warm_up=warm_up)


def test_the_cache_of_states_is_the_llms_own() -> None:
    reuse = {"tokens_per_block": 8, "tokens_per_snapshot": 16, "device_cache_size": 4096, "host_cache_size": 0}
    given: dict[str, Any] = {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5, **reuse}
    settings = ModelSettings.from_parameters({"engine_dir": "e", **{name: str(wish) for name, wish in given.items()}})
    assert ModelSettings.from_parameters(settings.parameters()) == settings
    assert settings.llm_options(Path(), "cpu")["kv_cache_config"] == KvCacheConfig(**given)
    assert ModelSettings(engine_dir="e").llm_options(Path(), "cpu")["kv_cache_config"] == KvCacheConfig()
    for name, value in reuse.items():
        with pytest.raises(ConfigError, match=f"{name}: found without enable_block_reuse"):
            ModelSettings(engine_dir="e", **{name: value}).llm_options(Path(), "cpu")  # type: ignore[arg-type]


def test_text_format() -> None:
    message: dict[str, Any] = {
        Comment("why"): "",
        "name": 'a "b"\n',
        "kind": Name("KIND_CPU"),
        "on": True,
        "dims": [1, -1],
        "words": ["x"],
        "state": [{"n": 1}, {"n": 2}],
        "one": {"two": {}},
    }
    assert render(message) == (
        '# why\nname: "a \\"b\\"\\n"\nkind: KIND_CPU\non: true\ndims: [1, -1]\nwords: ["x"]\n'
        "state {\n  n: 1\n}\nstate {\n  n: 2\n}\none {\n  two {\n\n  }\n}"
    )


def test_a_repository_holds_several_models_each_whole_or_not_at_all(tmp_path: Path) -> None:
    settings = ModelSettings(engine_dir=str(MODEL))
    for name in ("a", "b"):
        write_model(tmp_path, name, settings, instances=Instances("gpu", 2, (0, 1)), by_reference=name == "b")
    config = (tmp_path / "a" / "config.pbtxt").read_text()
    assert "kind: KIND_GPU\n  count: 2\n  gpus: [0, 1]" in config
    placed = tmp_path / "a" / "1" / "engine" / "model.safetensors"
    assert placed.read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert f'string_value: "{MODEL}"' in (tmp_path / "b" / "config.pbtxt").read_text()
    with pytest.raises(ConfigError, match="found a folder that is not empty"):
        write_model(tmp_path, "a", settings, instances=Instances("cpu"))
    with pytest.raises(CheckpointError):
        write_model(tmp_path, "c", ModelSettings(engine_dir=str(tmp_path)), instances=Instances("cpu"))
    wrong = [Instances("cpu", 1, (0,)), Instances("gpu", 1, (-1,)), Instances("gpu", 1, (0, 0))]
    for instances in (*wrong, Instances("cpu", 0), Instances("cpu", 10**20)):
        with pytest.raises(ConfigError, match=r"(gpus|instances): found"):
            write_model(tmp_path, "c", settings, instances=instances)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seq_len": 1}, "max_seq_len: found 1; needed 2 or more"),
        (
            {"max_batch_size": 10**6, "speculative": "ngram", "max_draft_len": 50},
            "history: found 16 with max_draft_len",
        ),
        ({"history": 0}, "history: found 0"),
        ({"speculative": "mtp"}, "found no multi-token prediction head"),
        ({"enable_block_reuse": True, "tokens_per_block": 1}, "tokens_per_block: found 1 with max_num_tokens"),
        ({"checkpoint_dir": str(MODEL)}, "checkpoint_dir: found .* which is no engine; needed none"),
        ({"executor": "tensorrt"}, "found no engine; executor 'tensorrt' needed an engine folder"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_no_machine_could_open_is_refused_when_it_is_written(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Triton would say so at its start, or not even then."""
    with pytest.raises(ReplaySSMError, match=sentence):
        write_model(tmp_path, "a", ModelSettings(engine_dir=str(MODEL), **options), instances=Instances("cpu"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "../c", "/c", "a b", "a\n", 'a"b', "é", "$(a)", "-a", "a;b", "a\0"])
def test_a_name_that_triton_does_not_open_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name: found .*; needed a folder's name"):
        write_model(tmp_path, name, ModelSettings(engine_dir=str(MODEL)), instances=Instances("cpu"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("folder", "is_noted"), [("models", False), ("my models", True), ("modèles", True)])
def test_a_path_that_triton_does_not_open_is_noted(
    folder: str, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / folder
    assert main(["triton", "--engine_dir", str(MODEL), "--repository", str(repository)]) == 0
    said = capsys.readouterr().out
    assert ("note: Triton opens no model" in said) is is_noted
    assert shlex.split(said.splitlines()[-1]) == ["tritonserver", f"--model-repository={repository}"]


def test_the_device_is_that_of_the_instance() -> None:
    assert device_of({"model_instance_kind": "CPU", "model_instance_device_id": "0"}) == "cpu"
    assert device_of({"model_instance_kind": "GPU", "model_instance_device_id": "3"}) == "cuda:3"


def test_a_full_queue_is_no_fault_of_the_request() -> None:
    assert status_of(QueueFullError("queue")) == status_of(CapacityError("worker")) == "UNAVAILABLE"


def test_requests_run_where_the_server_has_no_metrics() -> None:
    class NoMetrics:
        class MetricFamily:
            COUNTER, GAUGE = 1, 2

            def __init__(self, **_: object) -> None:
                raise RuntimeError("metrics are not enabled")

    from trtllm_replayssm.runtime.metrics import Latencies

    metrics = TritonMetrics(NoMetrics, {})
    assert metrics.obstacle == "metrics are not enabled"
    metrics.update({}, Latencies())
