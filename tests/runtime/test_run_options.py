"""``trtllm-replayssm run``: guided decoding, shared prompts, and a text that is printed while it grows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, KvCacheConfig, RequestOutput, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.cli.run_output import print_growing

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("run") / "hf", pattern="M*M", tokenizer=True)


def run(folder: Path, *arguments: str) -> int:
    return main(["run", "--model", str(folder), "--device", "cpu", "--max_seq_len", "96", *arguments])


def result_of(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("option", "content", "allowed"),
    [
        ("--guided_json", '{"enum": ["yes", "no"]}', ('"yes"', '"no"')),
        ("--guided_regex", None, ("ab", "ba")),
        ("--guided_grammar", 'root ::= "left" | "right"', ("left", "right")),
        ("--guided_grammar", 'start: "left" | "right"', ("left", "right")),
    ],
    ids=["json", "regex", "gbnf", "lark"],
)
def test_texts_are_what_the_option_asks_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: str | None, allowed: Any
) -> None:
    value = "ab|ba"
    if content is not None:
        (tmp_path / "guide").write_text(content, encoding="utf-8-sig")
        value = str(tmp_path / "guide")
    assert run(folder, "--prompt", "a", "--prompt", "b", option, value, "--json") == 0
    completions = [output["outputs"][0] for output in result_of(capsys)["outputs"]]
    assert all(c["text"] in allowed and c["finish_reason"] == "stop" for c in completions)


def test_a_json_object_is_one_option_beside_the_json_that_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--prompt", "a", "--guided_json_object", "--json", "--max_tokens", "8") == 0
    assert result_of(capsys)["outputs"][0]["outputs"][0]["text"].startswith("{")


def test_prompts_that_begin_alike_share_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [word for end in "abcd" for word in ("--prompt", "the same sixteen characters and more " + end)]
    options = ["--enable_block_reuse", "--tokens_per_block", "8", "--device_cache_size", str(2**22)]
    texts = []
    for more in ([], options):
        assert run(folder, *prompts, "--max_batch_size", "1", "--max_tokens", "4", "--json", "--metrics", *more) == 0
        result = result_of(capsys)
        texts.append([output["outputs"][0]["token_ids"] for output in result["outputs"]])
    assert texts[0] == texts[1]
    assert result["metrics"]["num_prefix_hits"] == 3 and result["metrics"]["num_reused_tokens"] >= 3 * 16


def test_options_of_the_cache_reach_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[KvCacheConfig] = []

    class Recorder(LLM):
        def __init__(self, model: Path, **options: Any) -> None:
            seen.append(options["kv_cache_config"])
            super().__init__(model, **options)

    monkeypatch.setattr("trtllm_replayssm.runtime.llm.LLM", Recorder)
    options = [
        *("--free_gpu_memory_fraction", "0.5", "--enable_block_reuse", "--tokens_per_block", "16"),
        *("--tokens_per_snapshot", "32"),
        *("--device_cache_size", "4096", "--host_cache_size", "8192"),
    ]
    for arguments in ([], options):
        assert run(folder, "--prompt", "abc", "--max_tokens", "2", *arguments) == 0
    assert seen[0] == KvCacheConfig()
    assert seen[1] == KvCacheConfig(
        free_gpu_memory_fraction=0.5,
        enable_block_reuse=True,
        tokens_per_block=16,
        tokens_per_snapshot=32,
        device_cache_size=4096,
        host_cache_size=8192,
    )


def test_a_text_that_streams_is_printed_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = LLM(folder, device="cpu").generate("stream", GREEDY).outputs[0]
    arguments = ("--prompt", "stream", "--max_tokens", "12", "--ignore_eos", "--streaming")
    assert run(folder, *arguments, "--metrics") == 0
    heading = "--- prompt 0\nstream\n--- completion 0\n"
    assert capsys.readouterr().out.startswith(
        f"{heading}{expected.text}\n--- 12 tokens, finish_reason length\n--- metrics\n"
    )


def test_a_text_that_streams_is_printed_as_it_comes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def watched() -> Iterator[RequestOutput]:
        text = ""
        for output in llm.generate_async("stream", GREEDY, streaming=True):
            printed = capsys.readouterr().out
            assert printed.endswith(text)
            pieces.append(printed)
            text = output.outputs[0].text_diff
            yield output

    pieces: list[str] = []
    with LLM(folder, device="cpu") as llm:
        print_growing(watched(), is_text=True)
    assert len(pieces) > 2 and pieces[0] == "" and pieces[1].startswith("--- prompt 0\nstream\n--- completion 0\n")


def test_tokens_stream_where_there_is_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = make_nemotron_h(tmp_path / "hf", pattern="M*M")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [4, 5]}\n')
    arguments = ("--input_file", str(tmp_path / "prompts.jsonl"), "--max_tokens", "12", "--ignore_eos", "--streaming")
    assert run(bare, *arguments) == 0
    expected = LLM(bare, device="cpu").generate([4, 5], GREEDY).outputs[0].token_ids
    heading = "--- prompt 0, token ids\n4 5\n--- completion 0, token ids\n"
    ending = "--- 12 tokens, finish_reason length\n"
    assert capsys.readouterr().out == f"{heading}{' '.join(map(str, expected))} \n{ending}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--guided_json", "absent.json"], "absent.json: No such file"),
        (["--guided_regex", "a", "--guided_json_object"], "guided_regex, guided_json_object: found 2 kinds"),
        (["--guided_regex", "[a"], "prompt 0: guided_decoding.regex: "),
        (["--guided_regex", "a", "--max_tokens", "0"], "max_tokens: found 0"),
        (["--tokens_per_block", "8"], "tokens_per_block: found without --enable_block_reuse; needed both or neither."),
        (["--host_cache_size", "8", "--device_cache_size", "8"], "device_cache_size, host_cache_size: found without"),
        (["--free_gpu_memory_fraction", "2"], "free_gpu_memory_fraction: found 2.0"),
        (["--streaming", "--json"], "streaming: found --json; needed"),
        (["--streaming", "--prompt", "b"], "streaming: found 2 prompts and n=1; needed"),
        (["--streaming", "--n", "2", "--temperature", "1"], "streaming: found 1 prompts and n=2; needed"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(folder, "--prompt", "a", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_that_is_no_text_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grammar").write_bytes(b"root ::= \xff")
    assert run(folder, "--prompt", "a", "--guided_grammar", str(tmp_path / "grammar")) == 2
    assert "grammar: found no UTF-8 text" in capsys.readouterr().err
