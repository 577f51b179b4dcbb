"""A real Triton server with the shipped model, over HTTP and gRPC: its answers are those of ``LLM`` in this process."""

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")

import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.serving.triton.clients import Answer, Stream, generate, generate_stream, grpc, http, post, tensors
from tests.serving.triton.server import HOST, Server
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.serving.triton.fields import INPUTS, OUTPUTS

PROMPT = "def main():\n"
CLIENTS = 64
# Of the text that the tests continue, different beginnings of different lengths.
PROMPTS = [f"import os\n\n\nclass Parser{number}:\n" + "    value = 1\n" * (number % 5) for number in range(CLIENTS)]


def greedy(llm: LLM, prompt: "str | list[int]", max_tokens: int) -> Any:
    return llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0), use_tqdm=False)


def metric(server: Server, name: str, model: str) -> float:
    """Return a metric, summed over the instances of a model."""
    values = re.findall(rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', server.read_metrics(), re.MULTILINE)
    assert values, f"no metric {name} of {model}"
    return sum(map(float, values))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not so within 30 s"
        time.sleep(0.05)


@pytest.mark.parametrize("model", ["stream", "whole"])
def test_generate_returns_what_the_llm_returns(server: Server, llm: LLM, model: str) -> None:
    answer = generate(
        server,
        model,
        text_input=PROMPT,
        max_tokens=24,
        stop_words="",
        bad_words="",
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    expected = greedy(llm, PROMPT, 24)
    (sequence,) = expected.outputs
    assert answer["text_output"] == sequence.text
    assert answer["output_ids"] == sequence.token_ids
    assert (answer["sequence_length"], answer["num_output_tokens"]) == (24, 24)
    assert answer["num_input_tokens"] == len(expected.prompt_token_ids)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", "")
    assert sequence.logprobs is not None
    own = [found[token].logprob for found, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
    assert answer["output_log_probs"] == pytest.approx(own, abs=1e-4)
    assert answer["cum_log_probs"] == pytest.approx(sequence.cumulative_logprob, abs=1e-3)


def test_token_ids_are_a_prompt_as_well(server: Server, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, 8)
    answer = generate(server, "whole", input_ids=expected.prompt_token_ids, max_tokens=8)
    assert answer["output_ids"] == expected.outputs[0].token_ids


def test_the_prompt_comes_back_where_it_is_asked_for(server: Server, llm: LLM) -> None:
    pieces = generate_stream(
        server, "stream", text_input=PROMPT, max_tokens=8, stream=True, exclude_input_in_output=False
    )
    assert "".join(piece["text_output"] for piece in pieces) == PROMPT + greedy(llm, PROMPT, 8).outputs[0].text


def test_sampled_sequences_are_those_of_the_seed(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=40, top_p=0.9, seed=7, n=3)
    expected = llm.generate(PROMPT, params, use_tqdm=False).outputs
    answer = generate(
        server,
        "whole",
        text_input=PROMPT,
        max_tokens=12,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        seed=7,
        num_return_sequences=3,
        pad_id=0,
    )
    assert answer["text_output"] == [sequence.text for sequence in expected]
    assert answer["sequence_length"] == [len(sequence.token_ids) for sequence in expected]
    rows = np.array(answer["output_ids"]).reshape(3, -1)
    assert [row[: len(s.token_ids)].tolist() for row, s in zip(rows, expected, strict=True)] == [
        sequence.token_ids for sequence in expected
    ]


def test_a_stop_word_ends_the_text_and_is_named(server: Server, llm: LLM) -> None:
    text = greedy(llm, PROMPT, 24).outputs[0].text
    word = text.strip().split()[2]
    answer = generate(server, "whole", text_input=PROMPT, max_tokens=24, stop_words=[word, "no such text"])
    assert answer["text_output"] == text[: text.index(word)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", word)


def test_a_guide_is_followed(server: Server) -> None:
    answer = generate(
        server,
        "whole",
        text_input=PROMPT,
        max_tokens=32,
        guided_decoding_guide_type="regex",
        guided_decoding_guide="[0-9]{3}-[ab]",
    )
    assert re.fullmatch("[0-9]{3}-[ab]", answer["text_output"])


@pytest.mark.parametrize("protocol", [http, grpc])
def test_infer_of_either_protocol(server: Server, llm: LLM, protocol: Any) -> None:
    library = http_client if protocol is http else grpc_client
    with protocol(server) as client:
        wanted = [library.InferRequestedOutput(name) for name in ("text_output", "output_ids")]
        result = client.infer(
            "whole", tensors(library, {"text_input": PROMPT, "max_tokens": 16}), outputs=wanted, request_id="r1"
        )
    (sequence,) = greedy(llm, PROMPT, 16).outputs
    assert result.as_numpy("text_output").tolist() == [[sequence.text.encode()]]
    assert result.as_numpy("output_ids").tolist() == [[sequence.token_ids]]
    assert result.as_numpy("finish_reason") is None, "it was not asked for"


def test_a_stream_of_events_has_the_text_in_pieces(server: Server, llm: LLM) -> None:
    pieces = generate_stream(server, "stream", text_input=PROMPT, max_tokens=24, stream=True)
    (sequence,) = greedy(llm, PROMPT, 24).outputs
    assert len(pieces) > 4
    assert "".join(piece["text_output"] for piece in pieces) == sequence.text
    assert sum(piece["sequence_length"] for piece in pieces) == 24
    assert [piece["finish_reason"] for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]


def test_a_grpc_stream_has_the_tokens_in_pieces(server: Server, llm: LLM) -> None:
    answer = Stream(server, "stream", text_input=PROMPT, max_tokens=24, stream=True).read()
    (sequence,) = greedy(llm, PROMPT, 24).outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == (sequence.text, sequence.token_ids, "length")
    assert answer.pieces > 4


def test_many_streams_at_a_time_are_batched(server: Server, llm: LLM) -> None:
    def read(number: int) -> Answer:
        return Stream(server, "stream", text_input=PROMPTS[number], max_tokens=12, stream=True).read()

    steps, rows = (metric(server, f"replayssm_decode_{name}_total", "stream") for name in ("steps", "rows"))
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(read, range(CLIENTS)))
    expected = [greedy(llm, prompt, 12).outputs[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == [sequence.token_ids for sequence in expected]
    assert [answer.text for answer in answers] == [sequence.text for sequence in expected]
    wait_for(lambda: metric(server, "replayssm_running_sequences", "stream") == 0, "all slots are free")
    more_steps = metric(server, "replayssm_decode_steps_total", "stream") - steps
    assert (metric(server, "replayssm_decode_rows_total", "stream") - rows) / more_steps > 2


def test_many_http_clients_at_a_time_on_two_instances(server: Server, llm: LLM) -> None:
    def ask(number: int) -> dict[str, Any]:
        return generate(server, "whole", text_input=PROMPTS[number], max_tokens=8)

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(CLIENTS)))
    expected = [greedy(llm, prompt, 8).outputs[0].token_ids for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in answers] == expected
    page = server.read_metrics()
    for instance in ("whole_0_0", "whole_0_1"):
        found = re.search(rf'^replayssm_prompt_steps_total{{[^}}]*instance="{instance}"[^}}]*}} (\S+)$', page, re.M)
        assert found is not None
        assert float(found[1]) > 0, f"{instance} had nothing to do"


def test_a_cancelled_stream_frees_its_slot(server: Server) -> None:
    before = metric(server, "replayssm_cancelled_sequences_total", "stream")
    stream = Stream(server, "stream", text_input=PROMPT, max_tokens=4000, stream=True)
    for _ in range(3):
        assert stream.next() is not None
    stream.cancel()
    wait_for(
        lambda: metric(server, "replayssm_cancelled_sequences_total", "stream") == before + 1,
        "the request is cancelled",
    )
    wait_for(lambda: metric(server, "replayssm_running_sequences", "stream") == 0, "its slot is free")
    assert generate(server, "stream", text_input=PROMPT, max_tokens=2)["sequence_length"] == 2


def test_an_http_stream_whose_client_has_gone_frees_its_slot(server: Server) -> None:
    before = metric(server, "replayssm_cancelled_sequences_total", "stream")
    body = json.dumps({"text_input": PROMPT, "max_tokens": 4000, "stream": True})
    with closing(HTTPConnection(HOST, server.http, timeout=30)) as client:
        client.request("POST", "/v2/models/stream/generate_stream", body)
        assert client.getresponse().read(10)
    wait_for(
        lambda: metric(server, "replayssm_cancelled_sequences_total", "stream") == before + 1,
        "the request is cancelled",
    )


def test_a_reader_that_does_not_read_holds_no_slot(server: Server) -> None:
    names = ("sequences", "cancelled_sequences")
    before = [metric(server, f"replayssm_{name}_total", "stream") for name in names]
    data = json.dumps({"text_input": PROMPT, "max_tokens": 600, "stream": True, "return_log_probs": True}).encode()
    head = f"POST /v2/models/stream/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((HOST, server.http))
        client.sendall(head.encode() + data)
        wait_for(lambda: metric(server, "replayssm_sequences_total", "stream") > before[0], "it has run to its end")
        wait_for(lambda: metric(server, "replayssm_running_sequences", "stream") == 0, "its slot is free")
        assert generate(server, "stream", text_input=PROMPT, max_tokens=2)["sequence_length"] == 2
        # What it did not take is still there for it.
        client.settimeout(30)
        read = b""
        while b'"finish_reason":"length"' not in read:
            piece = client.recv(2**16)
            assert piece, "it was cut off"
            read = read[-100:] + piece
    assert metric(server, "replayssm_cancelled_sequences_total", "stream") == before[1]


def test_a_prompt_that_begins_like_another_starts_from_its_states(server: Server, llm: LLM) -> None:
    system = "import os\n\n\nclass Shared:\n" + "    value = 1\n" * 12

    def count() -> tuple[float, float, float]:
        names = ("prefix_hits", "reused_tokens", "prompt_tokens")
        hits, reused, ran = (metric(server, f"replayssm_{name}_total", "stream") for name in names)
        return hits, reused, reused + ran

    time.sleep(0.5)  # what ran before is shown
    hits, reused, tokens = count()
    for tail in ("def one(self):\n", "def two(self, x):\n"):
        answer = generate(server, "stream", text_input=system + tail, max_tokens=8)
        expected = greedy(llm, system + tail, 8)
        assert answer["output_ids"] == expected.outputs[0].token_ids
        tokens += len(expected.prompt_token_ids)
        wait_for(lambda tokens=tokens: count()[2] == tokens, "each token was reused or ran")  # type: ignore[misc]
    # The second of the two found the states after 1, 2, 4, ... blocks of the first.
    assert count()[0] == hits + 1 and count()[1] >= reused + 32
    assert metric(server, "replayssm_prefix_device_bytes", "stream") > 0
    assert metric(server, "replayssm_prefix_hits_total", "whole") == 0, "it has no such cache"


def test_a_request_that_runs_out_of_time_says_so(server: Server) -> None:
    with grpc(server) as client:
        result = client.infer(
            "whole", tensors(grpc_client, {"text_input": PROMPT, "max_tokens": 4000}), timeout=200_000
        )
    assert result.as_numpy("finish_reason").tolist() == [[b"timeout"]]


BAD = {
    "no prompt": ({"max_tokens": 4}, "prompt: found neither text_input nor input_ids; needed one of the two."),
    "two prompts": ({"text_input": "a", "input_ids": [1]}, "prompt: found text_input and input_ids; needed one"),
    "empty prompt": ({"text_input": ""}, "prompt 0: found no tokens; needed at least one."),
    "unknown token": ({"input_ids": [99999]}, "prompt 0: found token id 99999; needed 0 <= id < 2048."),
    "long prompt": ({"text_input": "x " * 4000}, "needed at most max_input_len"),
    "no tokens wanted": (
        {"text_input": "a", "max_tokens": 0},
        "max_tokens: found 0; needed greater than or equal to 1",
    ),
    "cold": ({"text_input": "a", "temperature": -1.0}, "temperature: found -1.0; needed greater than or equal to 0"),
    "misspelt": ({"text_input": "a", "max_token": 4}, "max_token: found a name that is no input of this model"),
    "beams": ({"text_input": "a", "beam_width": 2}, "beam_width: found 2; needed 1"),
    "greedy several": (
        {"text_input": "a", "num_return_sequences": 2, "temperature": 0.0},
        "n: found 2 with temperature 0; needed 1",
    ),
    "a guide of no kind": ({"text_input": "a", "guided_decoding_guide": "x"}, "guided_decoding_guide_type: found None"),
    "a guide that is none": (
        {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
        "guided_decoding",
    ),
    "a stream of one answer": ({"text_input": "a", "stream": True}, "stream: found true for a model that answers once"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_with_a_sentence(server: Server, case: str) -> None:
    body, sentence = BAD[case]
    status, text = post(server, "whole", "generate", body)
    assert (status, sentence in json.loads(text)["error"]) == (400, True), text


def test_grpc_has_the_same_sentence_and_a_status(server: Server) -> None:
    with grpc(server) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("whole", tensors(grpc_client, {"text_input": "a", "max_tokens": 0}))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "max_tokens: found 0; needed greater than or equal to 1" in caught.value.message()


def test_what_triton_refuses_itself_reaches_no_model(server: Server) -> None:
    pair = np.array([[b"a"], [b"b"]], dtype=np.object_)
    two = http_client.InferInput("text_input", [2, 1], "BYTES")
    two.set_data_from_numpy(pair)
    with http(server) as client:
        with pytest.raises(InferenceServerException, match="batch-size must be <= 1"):
            client.infer("whole", [two])
        one = http_client.InferInput("text_input", [1, 1], "BYTES")
        one.set_data_from_numpy(pair[:1])
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("stream", [one])
    assert post(server, "whole", "generate", b"{")[0] >= 400
    assert generate(server, "whole", text_input=PROMPT, max_tokens=2)["sequence_length"] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([field.name for field in INPUTS]) | st.text(max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=3))
def test_any_body_is_answered_or_refused_and_the_next_request_runs(server: Server, body: dict[str, Any]) -> None:
    # Triton's own reader of JSON has 500 for what is not of an input's type; what reaches the model is 200 or 400.
    status, text = post(server, "whole", "generate", {"text_input": "a", "max_tokens": 2, **body})
    assert status in (200, 400, 500), text
    if status != 200:
        error = json.loads(text)["error"]
        assert "Traceback" not in error
        assert "internal error" not in error
    assert generate(server, "whole", text_input="a", max_tokens=1)["sequence_length"] == 1


def test_the_configuration_is_as_triton_reads_it(server: Server) -> None:
    with http(server) as client:
        config = client.get_model_config("stream")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert (config["backend"], config["max_batch_size"]) == ("python", 1)
    for fields, found in ((INPUTS, config["input"]), (OUTPUTS, config["output"])):
        assert [(t["name"], t["data_type"], [int(d) for d in t["dims"]]) for t in found] == [
            (field.name, field.data_type, list(field.dims)) for field in fields
        ]
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


def test_drafts_and_flushes_are_counted(server: Server) -> None:
    generate(server, "stream", text_input="a = 1\na = 1\na = 1\n", max_tokens=64)
    wait_for(lambda: metric(server, "replayssm_flushes_total", "stream") > 0, "flushes are shown")
    wait_for(lambda: metric(server, "replayssm_draft_tokens_total", "stream") > 0, "drafts are shown")
    assert 0 <= metric(server, "replayssm_acceptance_rate", "stream") <= 1
