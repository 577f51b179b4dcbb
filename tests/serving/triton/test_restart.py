"""A real Triton server that is full, loses its model's process, is stopped while it works, and starts again."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")

from tests.serving.triton import server as triton
from tests.serving.triton.clients import Stream, generate, post
from tests.serving.triton.conftest import write
from trtllm_replayssm import LLM, SamplingParams

PROMPT = "import os\n"


def test_a_server_fails_and_restarts_and_answers_the_same(has_server: None, llm: LLM, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write(repository, "small", "--max_queue_size", "0", "--max_batch_size", "1", "--kind", "auto")
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False).outputs[0].text
    for name in ("first", "second"):
        scratch = tmp_path / name
        scratch.mkdir()
        with triton.running(repository, scratch) as server:
            assert generate(server, "small", text_input=PROMPT, max_tokens=8)["text_output"] == expected
            if name == "first":
                refuses_what_cannot_wait(server)
                ends_what_runs(server)
            else:
                reports_a_killed_process(server)


def refuses_what_cannot_wait(server: triton.Server) -> None:
    running = Stream(server, "small", text_input=PROMPT, max_tokens=4000, stream=True)
    assert running.next() is not None
    status, text = post(server, "small", "generate", {"text_input": PROMPT, "max_tokens": 4})
    # Triton 2.51 has 400 for every error of ``generate``; its gRPC status is UNAVAILABLE.
    assert status in (400, 503)
    assert "needed at most 1, max_batch_size + max_queue_size. Try again later." in json.loads(text)["error"]
    running.cancel()
    deadline = time.monotonic() + 30
    while post(server, "small", "generate", {"text_input": PROMPT, "max_tokens": 4})[0] != 200:
        assert time.monotonic() < deadline, "the cancelled request still has the slot"
        time.sleep(0.05)


def ends_what_runs(server: triton.Server) -> None:
    """Stop the server while it streams: what has begun comes to its end, as Triton promises within its exit time."""
    running = Stream(server, "small", text_input=PROMPT, max_tokens=200, stream=True)
    assert running.next() is not None
    stopper = threading.Thread(target=triton.stop, args=(server,))
    stopper.start()
    answer = running.read()
    assert answer.finish_reason == "length"
    stopper.join()
    assert server.process.returncode == 0
    assert "successfully unloaded 'small'" in server.log.read_text()


def reports_a_killed_process(server: triton.Server) -> None:
    (stub,) = [pid for pid, name in children(server.process.pid) if "triton_python_backend_stub".startswith(name)]
    os.kill(stub, signal.SIGKILL)
    started = time.monotonic()
    status, text = post(server, "small", "generate", {"text_input": PROMPT, "max_tokens": 4})
    assert status >= 400
    assert "not healthy" in json.loads(text)["error"]
    assert time.monotonic() - started < 30


def children(parent: int) -> Iterator[tuple[int, str]]:
    """Return the number and the name, of at most 15 characters, of every child of a process."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(facts["PPid"]) == parent:
                yield int(facts["Pid"]), facts["Name"]


@pytest.mark.parametrize("arguments", [[], ["no/such/folder"], [str(Path(__file__))], ["a", "b"]])
def test_the_command_says_what_it_needs(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="needed the folder of a model repository, such as"):
        triton.main(arguments)


def test_the_command_says_why_a_model_does_not_load(has_server: None, tmp_path: Path) -> None:
    write(tmp_path, "broken")
    (tmp_path / "broken" / "1" / "model.py").write_text("raise ValueError('the model is broken')\n")
    with pytest.raises(SystemExit, match=r"(?s)^error: the server ended:.*the model is broken"):
        triton.main([str(tmp_path)])
