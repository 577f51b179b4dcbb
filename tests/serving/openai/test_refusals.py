"""What cannot be served has its status and a sentence, whatever the body holds."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.openai.servers import JSON, MODEL, Answer, InBackground, ServerProcess, ask
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.runtime.tokenizer import Tokenizer
from trtllm_replayssm.serving.openai.chat_template import ChatTemplate
from trtllm_replayssm.serving.openai.protocol import ChatBody, CompletionBody

COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        ({"prompt": ""}, None, "found no tokens; needed at least one"),
        ({"prompt": []}, "prompt", "found an empty list"),
        ({"prompt": None}, "prompt", "found nothing; needed a value"),
        ({"prompt": 3.5}, "prompt", "found 3.5; needed text, a list of token ids, or a list of these"),
        ({"prompt": ["a", 1]}, "prompt", "found 1; needed text"),
        ({"prompt": [True]}, "prompt", "found True; needed text"),
        ({"prompt": [-1]}, None, "found token id -1; needed 0 <= id < 2048"),
        ({"prompt": [10**30]}, None, "needed 0 <= id < 2048"),
        ({"prompt": [5] * 2048}, None, "found 2048 tokens; needed at most max_input_len (2047)"),
        ({"max_tokens": 0}, "max_tokens", "found 0; needed greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "found '9'; needed a valid integer"),
        ({"min_tokens": 3}, None, "min_tokens: found 3; needed at most max_tokens (2)"),
        ({"temperature": -0.1}, "temperature", "found -0.1"),
        ({"top_p": 0}, "top_p", "needed greater than 0"),
        ({"n": 17}, "n", "found 17 sequences, prompts times n; needed at most 16"),
        ({"n": 2, "temperature": 0}, None, "n: found 2 with temperature 0"),
        ({"logprobs": 21}, "logprobs", "needed less than or equal to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "found the key 'x'; needed a token id"),
        ({"logit_bias": {"1": 1000}}, "logit_bias", "found 1000; needed a number from -100 to 100"),
        ({"logit_bias": {"4000": 1}}, None, "found logit_bias token id 4000"),
        ({"logit_bias": [1]}, "logit_bias", "found [1]; needed an object of at most 1024 token ids"),
        (
            {"logit_bias": {str(token): 1 for token in range(1025)}},
            "logit_bias",
            "found 1025 entries; needed an object of at most 1024 token ids",
        ),
        ({"stream": True, "stream_options": 1}, "stream_options", "found 1; needed an object"),
        ({"stop": [""]}, "stop", "found ''; needed at least 1 character"),
        ({"stop_token_ids": [4000]}, None, "found stop or end token id 4000"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options: found without stream"),
        ({"echo": True, "logprobs": 1}, None, "echo: found with logprobs"),
        ({"best_of": 2}, "best_of", "found a parameter that this server does not know"),
        ({"tools": [{}]}, "tools", "found a parameter that this server does not know"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "found type 'json_schema' without"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
            None,
            "guided_decoding.json",
        ),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else "",
)
def test_a_completion_that_cannot_be_served_says_why(
    server: ServerProcess, change: dict[str, Any], param: str | None, sentence: str
) -> None:
    answer = server.ask("/v1/completions", COMPLETION | change)
    assert answer.status == 400
    assert sentence in answer.message
    assert answer.content["error"]["type"] == "invalid_request_error"
    assert answer.content["error"]["param"] == param
    assert answer.headers["x-request-id"]


def test_of_several_prompts_the_bad_one_is_named_and_none_runs(server: ServerProcess) -> None:
    ends = [f'sequences_total{{end="{end}"}}' for end in ("finished", "cancelled", "error")]
    before = [server.metric(end) for end in ends]
    for prompts, sentence in ((["a", "b", ""], "prompt 2: found no tokens"), ([[5], [-1]], "prompt 1: found token id")):
        answer = server.ask("/v1/completions", COMPLETION | {"prompt": prompts})
        assert answer.status == 400 and sentence in answer.message
    assert [server.metric(end) for end in ends] == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role: found 'nobody'; needed 'system'"),
        ({"messages": [{"role": "user", "content": 1}]}, "found 1; needed text, or a list of text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "models here read text",
        ),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "chat template refuses (no such words)"),
        ({"messages": [USER | {"tool_calls": []}]}, "messages.0.tool_calls: found a parameter"),
        ({"top_logprobs": 2}, "top_logprobs: found without logprobs"),
        ({"max_completion_tokens": 5}, "found another number than max_tokens"),
        ({"response_format": {"type": "xml"}}, "found 'xml'"),
        ({"chat_template_kwargs": {"speaker": [1, {"a": 2}]}, "messages": 3}, "messages: found 3"),
    ],
)
def test_a_chat_that_cannot_be_served_says_why(server: ServerProcess, change: dict[str, Any], sentence: str) -> None:
    answer = server.ask("/v1/chat/completions", CHAT | change)
    assert answer.status == 400 and sentence in answer.message


@pytest.mark.parametrize(
    ("path", "options", "status", "sentence"),
    [
        ("/v1/completions", {"body": b"{"}, 400, "found no valid JSON"),
        ("/v1/completions", {"body": b"\xff\xfe"}, 400, "found no valid JSON"),
        ("/v1/completions", {"body": b""}, 400, "found no valid JSON"),
        ("/v1/completions", {"body": b"[" * 100_000}, 400, "found no valid JSON"),
        ("/v1/completions", {"body": b"[1]"}, 400, "found [1]; needed a JSON object"),
        ("/v1/completions", {"body": b'{"model":"tiny","prompt":"\\ud800"}'}, 400, "found no valid JSON"),
        ("/v1/completions", {"body": b'{"model":"tiny","prompt":"x","top_p":NaN}'}, 400, "found no valid JSON"),
        (
            "/v1/completions",
            {"body": b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}"},
            400,
            "out of range",
        ),
        (
            "/v1/completions",
            {"body": b'{"model":"tiny","prompt":"x","seed":' + b"9" * 4000 + b"}"},
            400,
            "seed: found 9999",
        ),
        ("/v1/completions", {"body": b"{}", "headers": {"content-type": "text/plain"}}, 415, "application/json"),
        ("/v1/completions", {"body": b"x" * (2**20 + 1)}, 413, "needed at most so many"),
        ("/v1/completions", {"content": COMPLETION | {"model": "../../etc/passwd"}}, 404, "needed 'tiny'"),
        ("/v1/models/../../etc/passwd", {}, 404, "needed"),
        ("/v1/models/other", {}, 404, "found 'other'; needed 'tiny'"),
        ("/etc/passwd", {}, 404, "path: found one that is not served"),
        ("/v1/completions/", {"content": COMPLETION}, 404, "path: found one that is not served"),
        ("/v1/completions", {"method": "GET"}, 405, "method: found one that this path does not have"),
        ("/v1/completions", {"method": "DELETE"}, 405, "method: found one"),
    ],
)
def test_what_is_no_request_says_why(
    server: ServerProcess, path: str, options: dict[str, Any], status: int, sentence: str
) -> None:
    answer = server.ask(path, **options)
    assert answer.status == status and sentence in answer.message


def test_a_method_that_a_path_does_not_have_is_told_those_that_it_has(server: ServerProcess) -> None:
    assert server.ask("/v1/completions", method="GET").headers["allow"] == "POST"
    assert set(server.ask("/v1/models", COMPLETION).headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_the_client_library_raises_its_own_errors(server: ServerProcess) -> None:
    create: Any = server.client().completions.create
    with pytest.raises(openai.BadRequestError, match="found 9; needed less than or equal to 2"):
        create(model="tiny", prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError, match="needed 'tiny'") as caught:
        create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_request_id_of_the_client_is_kept_where_it_is_a_plain_word(server: ServerProcess) -> None:
    for given_id, is_kept in (("abc-1.2_X", True), ("a b", False), ("x" * 129, False), ("a;rm", False)):
        answer = server.ask("/v1/completions", COMPLETION, headers=JSON | {"x-request-id": given_id})
        assert answer.status == 200
        assert (answer.headers["x-request-id"] == given_id) is is_kept
        assert answer.content["id"] == "cmpl-" + answer.headers["x-request-id"]
    assert "request_id=abc-1.2_X path=/v1/completions status=200" in server.log
    assert "a;rm" not in server.log


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    tokenizer = Tokenizer.from_folder(MODEL)
    assert tokenizer is not None
    brace = {str(tokenizer.encode("{")[0]): 100}  # behind it one of the 600 names may come
    body = COMPLETION | {"max_tokens": 60, "temperature": 0, "logit_bias": brace, "response_format": wanted}
    whole = server.ask("/v1/completions", body)
    assert whole.status == 400 and whole.message.startswith("guided_decoding: found Parser Error: Current row has")
    *_, last = stream = server.ask("/v1/completions", body | {"stream": True}).body.decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == whole.content["error"]
    # No client knows of such a reason.
    assert not [event for event in stream if '"finish_reason":"error"' in event]
    assert server.ask("/v1/completions", COMPLETION).status == 200


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("small")
    keys = folder / "keys"
    keys.write_text("\ufefffirst-key\n\nsecond-key\nkéy à\n", encoding="utf-8")
    options = ["--api_key_file", str(keys), "--max_batch_size", "1", "--max_queue_size", "1", "--max_body_bytes", "500"]
    options += ["--max_concurrent_requests", "3", "--request_timeout_s", "4"]
    with ServerProcess(options, folder / "log") as started:
        yield started


def with_key(server: ServerProcess, content: Any, key: str = "Bearer first-key") -> Answer:
    return server.ask("/v1/completions", content, headers=JSON | {"authorization": key})


def test_a_key_is_asked_for(small: ServerProcess) -> None:
    body = {"model": "model", "prompt": "x", "max_tokens": 2}
    assert with_key(small, body).status == with_key(small, body, "bearer second-key").status == 200
    assert with_key(small, body, "Bearer kéy à".encode().decode("latin-1")).status == 200, (
        "its bytes, as most clients send"
    )
    for wrong in ("", "Bearer", "Bearer first-key2", "Basic first-key", "Bearer \xe9"):
        answer = with_key(small, body, wrong)
        assert answer.status == 401 and "found no valid key" in answer.message
        assert answer.headers["www-authenticate"] == "Bearer"
    assert small.ask("/v1/models").status == 401
    assert small.ask("/health").status == small.ask("/metrics").status == 200
    with pytest.raises(openai.AuthenticationError):
        small.client(api_key="wrong").models.list()
    assert "first-key" not in small.log


def test_bodies_are_limited_with_and_without_a_length(small: ServerProcess) -> None:
    body = {"model": "model", "prompt": "x" * 500}
    assert with_key(small, body).status == 413
    key = {"authorization": "Bearer first-key", "transfer-encoding": "chunked"}
    data = json.dumps(body).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    assert small.ask("/v1/completions", body=chunked, headers=JSON | key).status == 413


def test_more_than_the_queue_can_ever_hold_is_no_matter_of_time(small: ServerProcess) -> None:
    answer = with_key(small, {"model": "model", "prompt": ["a", "b", "c"]})
    assert answer.status == 400 and "found 3 new requests; needed at most 2" in answer.message
    assert "retry-after" not in answer.headers


def test_a_full_queue_and_a_busy_server_say_when_to_come_again(small: ServerProcess) -> None:
    endless = {"model": "model", "prompt": [5], "max_tokens": 2000, "ignore_eos": True}
    long = [InBackground(lambda: with_key(small, endless)) for _ in range(2)]
    small.wait_for_metric("waiting_sequences", 1)
    full = with_key(small, endless)
    assert full.status == 429 and full.headers["retry-after"] == "1"
    assert "found 2 unfinished requests and 1 new ones; needed at most 2" in full.message
    assert full.content["error"]["type"] == "rate_limit_error"
    # The third place is taken by a body that does not come.
    with socket.create_connection(("127.0.0.1", small.port)) as silent:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n"
        silent.sendall(f"{head}content-type: application/json\r\ncontent-length: 9\r\n\r\n".encode())
        statuses = set()
        for _ in range(50):
            busy = with_key(small, endless)
            statuses.add(busy.status)
            if busy.status == 503:
                break
        assert busy.status == 503 and busy.headers["retry-after"] == "1" and "found 3 requests at work" in busy.message
    # Neither ends in time: a request's time is short here.
    for answer in [work.outcome() for work in long]:
        assert answer.status == 504 and "needed a shorter one" in answer.message
    small.wait_for_metric("running_sequences", 0)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers(-3, 300) | st.floats(-3, 3) | st.sampled_from([0, 1, 2**63, -(2**63), 1e308, 1e-308])


def bodies(kind: type[CompletionBody | ChatBody], base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Make bodies of which some parameters are well formed, some nearly, and some anything."""
    schemas = st.sampled_from([{}, {"type": "object"}, {"type": "x"}, {"$ref": "#/no"}, {"enum": []}, {"pattern": "("}])
    near: dict[str, st.SearchStrategy[Any]] = {
        "prompt": st.text(max_size=20) | st.lists(st.integers(-1, 2100), max_size=5) | st.lists(st.text(max_size=5)),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "x"]), "content": JSON_VALUES})
        ),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=4),
        "logit_bias": st.dictionaries(st.integers(-1, 2100).map(str), NUMBERS, max_size=3),
        "response_format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "json_object", "json_schema"])},
            optional={
                "json_schema": st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"schema": schemas})
            },
        ),
        "stop_token_ids": st.lists(st.integers(-1, 2100), max_size=3),
    }
    names = [name for name in kind.model_fields if name not in ("model", "max_tokens", "n", "max_completion_tokens")]
    entries = {name: near.get(name, NUMBERS | st.booleans()) | JSON_VALUES for name in names}
    changes = st.fixed_dictionaries({}, optional=entries)
    # Few of them at a time, or nearly every body would be refused for one of them.
    few = st.lists(st.sampled_from(names), max_size=3, unique=True)
    return st.builds(lambda all_, kept: base | {k: v for k, v in all_.items() if k in kept}, changes, few)


@pytest.mark.parametrize(
    ("path", "kind", "base"),
    [
        ("/v1/completions", CompletionBody, COMPLETION),
        ("/v1/chat/completions", ChatBody, CHAT),
    ],
    ids=["completions", "chat"],
)
def test_random_bodies_are_served_or_refused_but_break_nothing(
    server: ServerProcess, path: str, kind: type[CompletionBody | ChatBody], base: dict[str, Any]
) -> None:
    statuses = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(kind, base) | JSON_VALUES)
    def check(body: Any) -> None:
        data = json.dumps(body).encode()
        answer = ask(server.port, path, body=data)
        statuses.add(answer.status)
        assert answer.status in (200, 400, 404), (data, answer.body)
        if answer.status != 200:
            assert answer.message
        elif b"text/event-stream" in answer.headers["content-type"].encode():
            assert answer.body.endswith(b"data: [DONE]\n\n"), (data, answer.body)

    check()
    assert {200, 400} <= statuses
    assert server.ask("/health").status == 200
    assert " 500 " not in server.log and "Traceback" not in server.log


def test_the_shipped_model_has_no_chat_template_and_says_so(small: ServerProcess) -> None:
    body = {"model": "model", "messages": [USER]}
    answer = small.ask("/v1/chat/completions", body, headers=JSON | {"authorization": "Bearer first-key"})
    assert answer.status == 400 and "--chat_template" in answer.message


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "no.such.host.invalid"], "host, port: found 'no.such.host.invalid' and 8000"),
        (["--api_key_file", "/dev/null"], "found no key; needed one a line"),
        (["--api_key_file", str(MODEL / "model.safetensors")], "found no UTF-8 text; needed API keys, one a line"),
        (["--max_sequences", "0"], "max_sequences: found 0; needed greater than or equal to 1"),
        (["--host_cache_size", "9"], "host_cache_size: found without --enable_block_reuse; needed both or neither"),
        (["--max_prompt_steps", "0"], "max_prompt_steps: found 0; needed greater than"),
        (["--max_queue_size", "-1"], "max_queue_size: found -1; needed greater than or equal to 0"),
        (["--free_gpu_memory_fraction", "0"], "free_gpu_memory_fraction: found 0.0; needed greater than 0"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(MODEL), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_that_another_has_is_known_before_the_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", str(MODEL), "--port", str(other.getsockname()[1])]) == 2
    assert "Address already in use" in (error := capsys.readouterr().err)
    assert "Name others with --host and --port; --port 0 takes a free one." in error


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("trtllm_replayssm.serving.openai.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("trtllm_replayssm.serving.openai.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(MODEL)]) == 2
    error = capsys.readouterr().err
    assert "found no Python package 'uvicorn'; needed those of the extra serve" in error and "pip install" in error


@pytest.mark.parametrize("content", [b"{% for %}", b"\xff\xfe", None], ids=["no template", "no text", "missing"])
@pytest.mark.parametrize("is_in_folder", [False, True])
def test_a_chat_template_that_is_none_is_refused_at_once(
    content: bytes | None, is_in_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model") if is_in_folder else MODEL
    file = (folder if is_in_folder else tmp_path) / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    assert main(["serve", str(folder), "--chat_template", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}: " in error
    assert ("No such file" if content is None else "needed") in error


@pytest.mark.parametrize("content", ['["text"]', '[{"name": ["a"], "template": 3}]', '[{"name": "tool_use"}]', "3"])
def test_of_several_chat_templates_one_is_the_default(content: str, tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(f'{{"chat_template": {content}}}')
    assert ChatTemplate.from_folder(tmp_path) is None
    config.write_text('{"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]}')
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([], add_generation_prompt=True, variables={}) == "yes"
