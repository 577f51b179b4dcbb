"""The model behind ``model.py`` with a double of Triton's module: also where no server is to be had, and on a GPU."""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.audit import forbidden, watching
from tests.serving.triton.conftest import BATCH_SIZE, MODEL
from tests.serving.triton.test_requests import ALL, tensors
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.serving.triton.model import ReplayModel

PROMPT = "import os\n"
DEVICES = ["CPU", pytest.param("GPU", marks=pytest.mark.gpu)]


@dataclass
class Metric:
    number: float = 0.0

    def set(self, value: float) -> None:
        self.number = value

    def increment(self, more: float) -> None:
        assert more > 0, "a counter of Triton only rises"
        self.number += more


@dataclass
class Sender:
    """A response sender.

    Attributes:
        responses: what was sent.
        is_over: set with the final flag, after which Triton takes no more.
        given_up: whether the client has cancelled.
    """

    responses: list[Any] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False

    def send(self, response: Any, flags: int = 0) -> None:
        assert not self.is_over.is_set(), "a response after the final one"
        self.responses.append(response)
        if flags:
            self.is_over.set()

    def is_cancelled(self) -> bool:
        return self.given_up


class Family:
    """A metric family; all metrics of it by name."""

    COUNTER, GAUGE = 0, 1
    metrics: dict[str, Metric] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert description.endswith("."), name
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - Triton's name
        assert labels == {"model": "m", "version": "1", "instance": "m_0_0"}
        return self.metrics.setdefault(self._name, Metric())


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


PB_UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    TritonError=TritonError,
    MetricFamily=Family,
    Logger=SimpleNamespace(log_info=lambda message: None),
    Tensor=lambda name, array: (name, array),
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=dict(tensors), error=error),
    using_decoupled_model_transaction_policy=lambda config: config["decoupled"],
)


def open_model(kind: str, tensors: dict[str, Any] | None = None, **parameters: str) -> ReplayModel:
    options = {"engine_dir": str(MODEL), "dtype": "float32", "max_batch_size": str(BATCH_SIZE)} | parameters
    config = {"decoupled": True, "parameters": {name: {"string_value": value} for name, value in options.items()}}
    config |= tensors or {}
    args = {
        "model_config": json.dumps(config),
        "model_repository": "/repository/m",
        "model_version": "1",
        "model_name": "m",
        "model_instance_name": "m_0_0",
        "model_instance_kind": kind,
        "model_instance_device_id": "0",
    }
    return ReplayModel(PB_UTILS, args)


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest) -> Iterator[ReplayModel]:
    model = open_model(request.param, cancellation_check_period_ms="5", metrics_period_ms="20", max_queue_size="60")
    yield model
    model.finalize()


def request(**values: object) -> tuple[Any, Sender]:
    sender = Sender()
    inputs = [
        SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array)
        for name, array in tensors(**values).items()
    ]
    made = SimpleNamespace(
        get_response_sender=lambda: sender,
        inputs=lambda: inputs,
        parameters=lambda: "{}",
        timeout=lambda: 0,
        requested_output_names=lambda: ALL,
    )
    return made, sender


def ask(model: ReplayModel, **values: object) -> Sender:
    made, sender = request(**values)
    model.execute([made])
    return sender


def error_of(sender: Sender) -> Any:
    assert sender.is_over.wait(60)
    return sender.responses[-1].error


def text_of(sender: Sender) -> str:
    assert sender.is_over.wait(60)
    assert [response.error for response in sender.responses] == [None] * len(sender.responses)
    return b"".join(response.tensors["text_output"][0, 0] for response in sender.responses).decode()


def test_many_requests_stream_at_a_time(model: ReplayModel) -> None:
    senders = [ask(model, text_input=PROMPT * (1 + n % 3), max_tokens=10 + n % 4, stream=True) for n in range(24)]
    texts = [text_of(sender) for sender in senders]
    with LLM(MODEL, device="cpu", dtype="float32") as llm:
        for number, text in enumerate(texts):
            params = SamplingParams(max_tokens=10 + number % 4, temperature=0.0)
            assert text == llm.generate(PROMPT * (1 + number % 3), params, use_tqdm=False).outputs[0].text
    assert all(len(sender.responses) > 3 for sender in senders)


def test_what_is_given_up_ends_and_the_rest_goes_on(model: ReplayModel) -> None:
    endless = [ask(model, text_input=PROMPT, max_tokens=4000, stream=number % 2 == 0) for number in range(3)]
    other = ask(model, text_input=PROMPT, max_tokens=8)
    for sender in endless:
        sender.given_up = True
    assert [error_of(sender).code for sender in endless] == ["CANCELLED"] * 3
    assert text_of(other)
    deadline = time.monotonic() + 30
    while Family.metrics["replayssm_running_sequences"].number:
        assert time.monotonic() < deadline, "the slots are not free"
        time.sleep(0.01)
    assert Family.metrics["replayssm_cancelled_sequences_total"].number >= 3


def test_a_full_queue_and_a_fault_have_their_statuses(model: ReplayModel) -> None:
    assert error_of(ask(model, text_input="a", max_tokens=0)).code == "INVALID_ARG"
    running = [ask(model, text_input=PROMPT, max_tokens=4000) for _ in range(BATCH_SIZE + 60)]
    deadline = time.monotonic() + 30
    while sum(Family.metrics[f"replayssm_{name}_sequences"].number for name in ("running", "waiting")) < len(running):
        assert time.monotonic() < deadline, "not all are queued"
        time.sleep(0.01)
    assert error_of(ask(model, text_input=PROMPT, max_tokens=4000)).code == "UNAVAILABLE"
    for sender in running:
        sender.given_up = True
    assert {error_of(sender).code for sender in running} == {"CANCELLED"}


def test_more_sequences_than_may_be_are_refused_before_they_are_made(model: ReplayModel) -> None:
    error = error_of(ask(model, text_input=PROMPT, num_return_sequences=2**31 - 1, temperature=1.0))
    assert (error.code, "found 2147483647; needed at most 128" in error.message) == ("INVALID_ARG", True)


def test_a_long_text_keeps_nobody_waiting(model: ReplayModel, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, generate = threading.Event(), model._llm.generate_async

    def slow(prompt: Any, *args: Any, **options: Any) -> Any:
        assert prompt != "long" or may_go_on.wait(60)
        return generate(prompt, *args, **options)

    monkeypatch.setattr(model._llm, "generate_async", slow)
    long = ask(model, text_input="long", max_tokens=3)
    assert text_of(ask(model, text_input=PROMPT, max_tokens=3))
    assert not long.is_over.is_set()
    may_go_on.set()
    assert text_of(long)


def test_a_request_that_cannot_be_read_is_answered_and_the_others_run(model: ReplayModel) -> None:
    broken, told = request(text_input=PROMPT)
    broken.parameters = lambda: "{"
    good, sender = request(text_input=PROMPT, max_tokens=3)
    model.execute([broken, good])
    error = error_of(told)
    assert error.code == "INTERNAL" and "JSONDecodeError" in error.message and "Traceback" not in error.message
    assert text_of(sender)


def test_a_librarys_panic_is_answered(model: ReplayModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library in Rust raises where it panics is no ``Exception``."""

    class PanicError(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicError("called `unwrap` on nothing")

    with monkeypatch.context() as patch:
        patch.setattr(model._llm, "generate_async", panic)
        error = error_of(ask(model, text_input=PROMPT))
    assert error.code == "INTERNAL" and "PanicError: called `unwrap` on nothing" in error.message
    assert text_of(ask(model, text_input=PROMPT, max_tokens=3))


def test_no_word_of_a_request_reaches_the_file_system(model: ReplayModel, tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    marked.write_text('{"const": "leaked"}')
    assert text_of(ask(model, text_input=PROMPT, max_tokens=2)) is not None  # lazy imports
    guides = [json.dumps({"$ref": f"file://{marked}"}), json.dumps({"$ref": str(marked)})]
    with watching() as seen:
        text_of(
            ask(model, text_input=str(marked), max_tokens=2, stop_words=[f"file://{marked}"], bad_words=str(marked))
        )
        senders = [
            ask(
                model,
                text_input=PROMPT,
                max_tokens=20,
                guided_decoding_guide_type="json_schema",
                guided_decoding_guide=guide,
            )
            for guide in guides
        ]
        assert [error_of(sender) is not None for sender in senders] == [True, True]
    assert not forbidden(seen, "marked")


@pytest.mark.parametrize("kind", DEVICES)
def test_the_end_answers_what_runs(kind: str) -> None:
    model = open_model(kind)
    assert model.is_ready()
    sender = ask(model, text_input=PROMPT, max_tokens=4000)
    model.finalize()
    assert error_of(sender).code == "UNAVAILABLE"
    assert not model.is_ready()


def test_an_answer_that_cannot_be_written_ends_its_request_alone(
    model: ReplayModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no shared memory")

    with monkeypatch.context() as patch:
        patch.setattr(PB_UTILS, "Tensor", fail)
        error = error_of(ask(model, text_input=PROMPT, max_tokens=4))
    assert (error.code, "no shared memory" in error.message) == ("INTERNAL", True)
    assert text_of(ask(model, text_input=PROMPT, max_tokens=4))


def test_the_end_waits_for_what_is_not_queued_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model("CPU")
    is_called, generate = threading.Event(), model._llm.generate_async

    def late(*args: Any, **options: Any) -> Any:
        is_called.set()
        while model._llm.is_healthy:
            time.sleep(0.01)
        return generate(*args, **options)

    monkeypatch.setattr(model._llm, "generate_async", late)
    sender = ask(model, text_input=PROMPT)
    assert is_called.wait(30)
    model.finalize()
    assert error_of(sender).code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"input": [{"name": "lora_id", "data_type": "TYPE_INT32"}]}, "input lora_id: found it in config.pbtxt"),
        ({"input": [{"name": "seed", "data_type": "TYPE_INT64"}]}, "input seed: found TYPE_INT64 in config.pbtxt"),
        ({"output": [{"name": "logits", "data_type": "TYPE_FP32"}]}, "output logits: found it in config.pbtxt"),
    ],
)
def test_tensors_that_the_model_does_not_have_stop_it(declared: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        open_model("CPU", declared)


def test_parameters_that_are_unknown_stop_the_model() -> None:
    with pytest.raises(ConfigError, match="max_batch: unknown key"):
        open_model("CPU", max_batch="3")
