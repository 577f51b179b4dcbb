"""Clients leave, read slowly or stay; the server ends, starts again, or its model fails."""

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.audit import forbidden, watching
from tests.serving.openai.servers import MODEL, InBackground, ServerProcess, ask, metric, wait_until
from trtllm_replayssm import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from trtllm_replayssm.errors import CapacityError, ExecutorError, QueueFullError, RequestError, ShutdownError
from trtllm_replayssm.serving.openai.errors import refused
from trtllm_replayssm.serving.openai.server import Server, listen
from trtllm_replayssm.serving.openai.service import Service
from trtllm_replayssm.serving.openai.settings import ServerSettings

ENDLESS: Any = {"model": "tiny", "prompt": [5], "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
BODY = {"model": "tiny", "prompt": [5], "max_tokens": 2000, "ignore_eos": True}
CANCELLED = 'sequences_total{end="cancelled"}'


def request_bytes(**changes: Any) -> bytes:
    data = json.dumps(BODY | changes).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (
            len(data),
            data,
        )
    )


def test_a_client_that_leaves_a_stream_frees_its_slot(server: ServerProcess) -> None:
    before = server.metric(CANCELLED)
    stream = server.client().completions.create(**ENDLESS, stream=True, n=2)
    for _, _ in zip(range(6), stream, strict=False):
        assert server.metric("running_sequences") == 2
    stream.close()
    server.wait_for_metric("running_sequences", 0)
    assert server.metric(CANCELLED) == before + 2
    assert "Traceback" not in server.log


def test_a_client_that_leaves_before_the_result_frees_its_slot(server: ServerProcess) -> None:
    before = server.metric(CANCELLED)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request_bytes())
        server.wait_for_metric("running_sequences", 1)
    server.wait_for_metric("running_sequences", 0)
    assert server.metric(CANCELLED) == before + 1
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.3).completions.create(**ENDLESS)
    server.wait_for_metric("running_sequences", 0)
    wait_until(lambda: server.metric('http_requests_total{path="/v1/completions",status="499"}') >= 2, "two 499")


def test_a_reader_that_does_not_read_holds_no_slot(server: ServerProcess) -> None:
    before = server.metric('sequences_total{end="finished"}')
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request_bytes(stream=True, max_tokens=100))
        # It generates to its end, and others are served meanwhile.
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices
        server.wait_for_metric("running_sequences", 0)
        assert server.metric('sequences_total{end="finished"}') == before + 2


def test_a_server_ends_in_order_and_starts_again(tmp_path: Path) -> None:
    options = ["--served_model_name", "tiny", "--shutdown_timeout_s", "20"]
    short = ENDLESS | {"prompt": "import os\n", "temperature": 0.0, "max_tokens": 200}
    with ServerProcess(options, tmp_path / "first") as server:
        port, whole = server.port, server.client().completions.create(**short).choices[0].text
        stream = server.client().completions.create(**short, stream=True)
        pieces = [next(stream).choices[0].text]
        waiting = InBackground(lambda: server.client().completions.create(**short))
        server.wait_for_metric("running_sequences", 2)
        server.terminate()
        # What runs is finished.
        pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == whole == waiting.outcome().choices[0].text
        assert server.process.wait(30) == 0
        assert "all requests have ended" in server.log and "Traceback" not in server.log
    with ServerProcess(
        [*options[:2], "--shutdown_timeout_s", "0.3", "--port", str(port)], tmp_path / "second"
    ) as server:
        assert server.port == port
        assert server.client().completions.create(**short).choices[0].text == whole
        stream = server.client().completions.create(**ENDLESS, stream=True)
        next(stream)
        waiting = InBackground(lambda: server.client().completions.create(**ENDLESS))
        server.wait_for_metric("running_sequences", 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as unfinished:
            asking = b"\r\nExpect: 100-continue\r\n\r\n"
            unfinished.sendall(request_bytes()[:-5].replace(b"\r\n\r\n", asking, 1))
            # Said when the server waits for the body.
            assert unfinished.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            server.terminate()
            # What runs too long is told why it ends, and so is what never came whole.
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            error = waiting.outcome()
            assert isinstance(error, openai.InternalServerError) and error.status_code == 503
            answer = read_all(unfinished)
            assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log and " ERROR " not in server.log


def is_refused(port: int) -> bool:
    """Say whether nobody listens any more."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_interrupt_ends_the_server_at_once(tmp_path: Path) -> None:
    with ServerProcess(["--served_model_name", "tiny"], tmp_path / "log") as server:
        stream = server.client().completions.create(**ENDLESS, stream=True)
        next(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: is_refused(server.port), "the first to be heeded")  # two at once would be one
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert time.monotonic() - started < 20, "a stream has 30 s to finish after the first"
        assert "ended at once" in server.log and "Traceback" not in server.log


@contextmanager
def served(llm: LLM, send_buffer: int | None = None, **settings: Any) -> Iterator[tuple[int, Service]]:
    """Serve an ``LLM`` of this process; the system keeps so many bytes for a client that does not read."""
    service = Service(llm, ServerSettings(model_name="tiny", **settings), None)
    with listen("127.0.0.1", 0) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = listener.getsockname()[1]
        server = Server(service)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started, "the server")
            yield port, service
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


LONG_RESPONSE = {"n": 4, "logprobs": 20, "max_tokens": 40, "temperature": 1}


@contextmanager
def connected(port: int, **changes: Any) -> Iterator[socket.socket]:
    """Ask for something on a socket for which the system keeps little."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        client.sendall(request_bytes(**changes))
        yield client


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes."""
    read = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(2**20):
            read += piece
    return read


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reader_that_takes_nothing_is_cut_off(is_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(MODEL, device="cpu", max_batch_size=4) as llm, served(llm, 4096, send_timeout_s=0.3) as (port, _):
        # A stream goes on for as long as it is read; what is not one is in the server's memory as a whole.
        with connected(
            port, **LONG_RESPONSE | {"stream": is_stream, "max_tokens": 2000 if is_stream else 40}
        ) as client:
            wait_until(lambda: "took nothing of its response for 0.3 s and was cut off" in caplog.text, "the cut")
            read = read_all(client)
        assert read.startswith(b"HTTP/1.1 200") and b"[DONE]" not in read
        assert len(read) < 100_000, "a part of the response"
        wait_until(lambda: llm.metrics()["num_running"] == 0, "the slots")
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_reader_that_is_slow_gets_all_of_it() -> None:
    with LLM(MODEL, device="cpu", max_batch_size=4) as llm, served(llm, 4096, send_timeout_s=1.0) as (port, _):
        with connected(port, **LONG_RESPONSE) as client:
            started, read = time.monotonic(), b""
            while not read.endswith(b"}}"):
                piece = client.recv(4096)
                assert piece, "it was cut off"
                read += piece
                time.sleep(0.1)  # far below that time, for the machine may have pauses of its own
            assert time.monotonic() - started > 2.0, "it took more than the time in which something must be taken"
        head, _, body = read.partition(b"\r\n\r\n")
        assert len(json.loads(body)["choices"]) == 4 and head.startswith(b"HTTP/1.1 200")


def test_a_model_that_failed_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm, shutdown_timeout_s=0.0) as (port, _):
        step, num_steps = llm._executor.step, iter(range(100))

        def failing(inputs: Any) -> Any:
            if next(num_steps) == 3:
                raise SystemExit("the worker was killed")
            return step(inputs)

        monkeypatch.setattr(llm._executor, "step", failing)
        assert ask(port, "/health").content == {"status": "ready"} and metric(port, "ready") == 1
        answer = ask(port, "/v1/completions", BODY)
        assert answer.status == 500 and "the worker was killed" in answer.message
        health = ask(port, "/health")
        assert health.status == 503 and health.content["status"] == "not ready" and "failed" in health.content["reason"]
        assert metric(port, "ready") == 0 and metric(port, 'sequences_total{end="error"}') == 1
        refusal = ask(port, "/v1/completions", BODY)
        assert refusal.status == 503 and "found an LLM whose executor has failed" in refusal.message


def test_a_failing_stream_ends_with_an_event_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm, shutdown_timeout_s=0.0) as (port, _):
        step, num_steps = llm._executor.step, iter(range(100))

        def failing(inputs: Any) -> Any:
            if next(num_steps) == 5:
                raise RuntimeError("the device is on fire")
            return step(inputs)

        monkeypatch.setattr(llm._executor, "step", failing)
        answer = ask(port, "/v1/completions", BODY | {"stream": True})
        *texts, last = answer.body.decode().strip().split("\n\n")
        assert answer.status == 200 and texts
        assert "the device is on fire" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert not [text for text in texts if '"finish_reason":"error"' in text]


def test_an_error_of_the_servers_own_tells_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm) as (port, service):
        monkeypatch.setattr(service, "check_model", lambda name: 1 / 0)
        answer = ask(port, "/v1/completions", BODY)
        assert answer.status == 500 and "server: found an error of its own" in answer.message
        assert "division" not in answer.message and answer.headers["x-request-id"]


def test_a_librarys_panic_is_an_error_of_the_servers_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicError(BaseException):
        """What a library in Rust raises where it panics is no ``Exception``."""

    def panic(*_: object, **__: object) -> None:
        raise PanicError

    # The level outlasts the server: the line of a request is written after its answer.
    with caplog.at_level("INFO"), LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm) as (port, _):
        monkeypatch.setattr(llm, "submit", panic)
        answer = ask(port, "/v1/completions", BODY)
    assert answer.status == 500 and "server: found an error of its own" in answer.message
    assert "PanicError" in caplog.text and "status=500" in caplog.text


def test_a_draining_server_is_not_ready_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm) as (port, service):
        service.is_draining = True
        health = ask(port, "/health")
        assert health.status == 503 and health.content["reason"] == "shutting down"
        answer = ask(port, "/v1/completions", BODY)
        assert answer.status == 503 and answer.headers["retry-after"] == "1" and "shutting down" in answer.message


def test_a_slow_body_has_its_time() -> None:
    scheduling = SchedulerConfig(max_queue_size=1)
    with LLM(MODEL, device="cpu", scheduler_config=scheduling) as llm, served(llm, body_timeout_s=0.2) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(request_bytes()[:-5])
            assert connection.recv(12) == b"HTTP/1.1 408"


def test_reused_prompts_are_counted() -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8)
    with LLM(MODEL, device="cpu", kv_cache_config=cache) as llm, served(llm) as (port, _):
        body = BODY | {"prompt": list(range(5, 25)), "max_tokens": 3, "temperature": 0}
        answers = [ask(port, "/v1/completions", body).content for _ in range(3)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 16, 16]
        asked = body | {"stream": True, "stream_options": {"include_usage": True}, "prompt": [body["prompt"]] * 2}
        *_, last, _ = ask(port, "/v1/completions", asked).body.decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        assert metric(port, "prefix_hits_total") == 4 and metric(port, "reused_tokens_total") == 64
        assert metric(port, "prefix_device_bytes") > 0


def test_a_model_without_a_tokenizer_takes_and_gives_tokens(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(MODEL / name, tmp_path / name)
    with LLM(tmp_path, device="cpu") as llm, served(llm) as (port, _):
        own = llm.generate([5, 6], SamplingParams(max_tokens=6, temperature=0.0)).outputs[0].token_ids
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        choice = ask(port, "/v1/completions", body | {"logprobs": 0, "echo": None}).content["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", own, [5, 6])
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in own]
        answer = ask(port, "/v1/completions", body | {"prompt": "text"})
        assert answer.status == 400 and "has no tokenizer.json" in answer.message


def test_no_word_of_a_request_reaches_the_file_system(tmp_path: Path) -> None:
    marked = str(tmp_path / "marked")
    Path(marked).write_text('{"const": "leaked"}')  # a library in Rust would read it unseen
    words: Any = [
        {"prompt": marked},
        {"prompt": [marked, "file://" + marked], "stop": marked},
        {"model": marked},
        {"user": marked},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": f"file://{marked}"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": marked}}}},
    ]
    chats: Any = [
        {"messages": [{"role": "user", "content": "{% include '" + marked + "' %}"}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": marked}},
    ]
    with LLM(MODEL, device="cpu", max_batch_size=2) as llm, served(llm) as (port, _):
        assert ask(port, "/v1/completions", BODY | {"max_tokens": 2}).status == 200  # lazy imports
        with watching() as seen:
            answers = [ask(port, "/v1/completions", BODY | {"max_tokens": 20} | change) for change in words]
            for change in chats:
                answers.append(ask(port, "/v1/chat/completions", {"model": "tiny", "max_tokens": 2} | change))
            answers += [ask(port, f"/v1/models/{marked}"), ask(port, marked)]
    assert not forbidden(seen, "marked")
    assert [answer.status for answer in answers[4:6]] == [400, 400]
    assert not [answer for answer in answers if b"leaked" in answer.body]


def test_what_is_no_fault_of_the_request_is_none_of_the_clients() -> None:
    statuses = {QueueFullError: 429, ShutdownError: 503, ExecutorError: 503, CapacityError: 503, RequestError: 400}
    for kind, status in statuses.items():
        error = refused(kind("object: found this; needed that."), 7)
        assert error.status == status
        assert (error.headers().get("retry-after") == "7") == (kind in (QueueFullError, ShutdownError, CapacityError))
