"""Clients of a Triton server: its JSON routes, and the gRPC streams of ``tritonclient``."""

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from tests.serving.triton.server import HOST, TIMEOUT_S, Server
from trtllm_replayssm.serving.triton.fields import INPUTS
from trtllm_replayssm.serving.triton.requests import Array

_DTYPES = {
    "TYPE_STRING": ("BYTES", np.object_),
    "TYPE_INT32": ("INT32", np.int32),
    "TYPE_FP32": ("FP32", np.float32),
    "TYPE_UINT64": ("UINT64", np.uint64),
    "TYPE_BOOL": ("BOOL", np.bool_),
}
_TYPES = {each.name: each.data_type for each in INPUTS}


def post(server: Server, model: str, route: str, body: object) -> tuple[int, str]:
    """Send JSON; return the status and the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v2/models/{model}/{route}", data=data)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: Server, model: str, **body: object) -> dict[str, Any]:
    """Return the answer of the route ``generate``."""
    status, text = post(server, model, "generate", body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def generate_stream(server: Server, model: str, **body: object) -> list[dict[str, Any]]:
    """Return the events of the route ``generate_stream``."""
    status, text = post(server, model, "generate_stream", body)
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def tensors(client: Any, values: Mapping[str, object]) -> list[Any]:
    """Return the inputs of a request as either client has them, of the batch size 1."""
    made = []
    for name, value in values.items():
        datatype, dtype = _DTYPES[_TYPES[name]]
        items = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        array: Array = np.array([items], dtype=dtype)
        tensor = client.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


@dataclass
class Answer:
    """The responses of one request over gRPC, put together.

    Attributes:
        text: of the first sequence.
        token_ids: of the first sequence.
        pieces: responses that came.
        finish_reason: the last one.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: int = 0
    finish_reason: str = ""

    def add(self, result: Any) -> None:
        """Take in a response."""
        self.text += result.as_numpy("text_output")[0, 0].decode()
        self.token_ids += result.as_numpy("output_ids")[0, 0].tolist()
        self.finish_reason = result.as_numpy("finish_reason")[0, 0].decode()
        self.pieces += 1


@contextmanager
def http(server: Server) -> Iterator[Any]:
    """Give a client of the HTTP protocol."""
    client = http_client.InferenceServerClient(f"{HOST}:{server.http}", network_timeout=TIMEOUT_S)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def grpc(server: Server) -> Iterator[Any]:
    """Give a client of the gRPC protocol."""
    with grpc_client.InferenceServerClient(f"{HOST}:{server.grpc}") as client:
        yield client


class Stream:
    """A gRPC stream with one request on it.

    Args:
        server: the server.
        model: a decoupled one.
        values: the inputs.
    """

    def __init__(self, server: Server, model: str, **values: object) -> None:
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpc_client.InferenceServerClient(f"{HOST}:{server.grpc}")
        self._client.start_stream(lambda result, error: self._results.put((result, error)))
        self._client.async_stream_infer(model, tensors(grpc_client, values), enable_empty_final_response=True)

    def next(self) -> Any:
        """Return the next response that has something in it, or None after the last; an error is raised."""
        result, error = self._results.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        is_final = result.get_response().parameters["triton_final_response"].bool_param
        self._is_over = is_final
        return result if result.get_response().outputs else None

    def read(self) -> Answer:
        """Read to the end and close."""
        answer = Answer()
        self._is_over = False
        while not self._is_over:
            result = self.next()
            if result is not None:
                answer.add(result)
        self.close()
        return answer

    def cancel(self) -> None:
        """Give the request up."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        """End the stream after its requests."""
        self._client.stop_stream()
        self._client.close()
