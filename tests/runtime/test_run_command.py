"""``trtllm-replayssm run``: prompts from options and files, text and JSON out, exit code 2 for mistakes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mtp_models import make_with_mtp
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, ReplayConfig, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.cli.run import read_prompts
from trtllm_replayssm.errors import RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("run") / "hf", pattern="M*M", tokenizer=True)


def run(folder: Path, *arguments: str) -> int:
    return main(["run", "--model", str(folder), "--device", "cpu", "--max_seq_len", "64", *arguments])


def test_text_is_printed_for_each_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--prompt", "one", "--prompt", "two", "--max_tokens", "5", "--ignore_eos") == 0
    printed = capsys.readouterr().out
    expected = LLM(folder, device="cpu").generate(
        ["one", "two"], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    )
    for number, output in enumerate(expected):
        assert (
            f"--- prompt {number}\n{output.prompt}\n"
            f"--- completion {number}, 5 tokens, finish_reason length\n{output.outputs[0].text}\n"
        ) in printed


def test_token_ids_are_told_from_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = make_nemotron_h(tmp_path / "hf", pattern="M*M")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt_token_ids": [4, 5]}\n')
    assert run(bare, "--input_file", str(lines), "--max_tokens", "2", "--ignore_eos", "--metrics") == 0
    printed = capsys.readouterr().out
    assert re.match(
        r"--- prompt 0, token ids\n4 5\n--- completion 0, token ids, 2 tokens, finish_reason length\n\d+ \d+\n", printed
    )
    assert re.search(r"executor +torch\ndevice +cpu\n", printed)


def test_the_memory_plan_is_printed_where_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--prompt", "one", "--max_tokens", "1", "--max_batch_size", "3", "--memory", "--eager")
    with caplog.at_level("INFO", "trtllm_replayssm"):
        assert run(folder, *arguments, "--json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["limits"]["max_batch_size"] == 3 and memory["weights"] > 0
    assert re.search(r"memory of cpu: [\d.]+ MiB for max_batch_size 3, max_seq_len 64, .*: weights ", caplog.text)
    assert run(folder, *arguments) == 0
    assert re.search(rf"--- memory, bytes\nweights +{memory['weights']}\n", capsys.readouterr().out)


@pytest.mark.parametrize("redirection", ["", ">&-"], ids=["ascii", "closed"])
def test_any_text_can_be_printed_anywhere(folder: Path, redirection: str) -> None:
    options = f"--model {folder} --device cpu --max_tokens 1 --prompt Pr\u00fcfung"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        f"{sys.executable} -m trtllm_replayssm run {options} {redirection}",
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Pr\\xfcfung" in done.stdout) != bool(redirection)


def test_json_holds_outputs_and_metrics_and_speculation_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for options in ([], ["--speculative", "ngram", "--max_draft_len", "3", "--history", "8"], ["--conventional"]):
        common = ["--prompt", "abcabcabc", "--max_tokens", "20", "--ignore_eos", "--json", "--metrics"]
        assert run(folder, *common, *options) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["metrics"]["num_generated_tokens"] == 20
        assert (result["executor"], result["device"]) == ("torch", "cpu")
        assert result["history"] == (8 if "--history" in options else 16)
        (output,) = result["outputs"]
        assert (output["prompt"], output["finished"]) == ("abcabcabc", True)
        texts.append(output["outputs"][0]["token_ids"])
    assert texts[0] == texts[1] == texts[2]


def test_drafts_come_from_another_model_or_from_the_models_own_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_with_mtp(tmp_path / "model", "qwen3_5", "copying", mixing=0.0)
    common = ["--prompt", "abc", "--max_tokens", "20", "--ignore_eos", "--json", "--metrics", "--fixed_draft_len"]
    options = (
        ["--speculative", "draft", "--speculative_model", str(folder), "--max_draft_len", "2"],
        ["--speculative", "mtp"],
        ["--speculative", "mtp", "--max_draft_len", "3"],
    )
    for option, num_drafts in zip(options, (2, 1, 3), strict=True):
        assert run(folder, *common, *option) == 0
        metrics = json.loads(capsys.readouterr().out)["metrics"]
        assert metrics["acceptance_rate"] == 1.0
        assert metrics["num_decode_rows"] == -(-19 // (num_drafts + 1))


def test_options_reach_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Recorder(LLM):
        def __init__(self, model: Path, **options: Any) -> None:
            seen.append(options)
            super().__init__(model, **options)

    monkeypatch.setattr("trtllm_replayssm.runtime.llm.LLM", Recorder)
    options = ["--state_dtype", "bfloat16", "--max_num_tokens", "3", "--history", "4"]
    for arguments in ([], options):
        assert run(folder, "--prompt", "abc", "--max_tokens", "2", *arguments) == 0
    assert [options["max_num_tokens"] for options in seen] == [None, 3]
    assert seen[0]["replay"].model_fields_set == set()  # what was left open, an engine may fill in
    assert seen[1]["replay"] == ReplayConfig(history=4, state_dtype="bfloat16")
    assert run(folder, "--prompt", "abc", "--max_tokens", "2", "--history", "auto", "--json") == 0
    assert seen[2]["replay"] == ReplayConfig(history="auto")


def test_prompts_come_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("first line\n\n  second\n")
    assert read_prompts([], plain) == ["first line", "  second"]
    for name in ("prompts.jsonl", "PROMPTS.JSONL"):
        lines = tmp_path / name
        lines.write_text('{"prompt": "text"}\n{"prompt_token_ids": [4, 5]}\n', encoding="utf-8-sig")
        assert read_prompts([], lines) == ["text", [4, 5]]


def test_token_ids_of_a_file_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt_token_ids": [4, 5]}\n{"prompt": "text"}\n')
    assert run(folder, "--input_file", str(lines), "--max_tokens", "3", "--json") == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["prompt"] for output in outputs] == [None, "text"]
    assert outputs[0]["prompt_token_ids"] == [4, 5]


@pytest.mark.parametrize(
    "line",
    [
        *("not json", "[1, 2]", "{}", '{"prompt": 5}', '{"prompt_token_ids": "x"}', '{"prompt": "a", "b": 1}'),
        *("[" * 100_000, "1" * 5000),
    ],
    ids=lambda line: line[:30],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(RequestError, match=r"prompts\.jsonl:2: found"):
        read_prompts([], path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt 0: found no tokens"),
        ([], "needed --prompt or --input_file"),
        (["--prompt", "a", "--input_file", "b"], "one of the two"),
        (["--input_file", "absent.txt"], "absent.txt: No such file"),
        (["--prompt", "half \ud800 a pair"], "prompt: found no valid Unicode at character 5 ('half \\ud800 a pair')"),
        (["--prompt", "a", "--device", "cpu:3"], "device: found 'cpu:3'; needed 'auto', 'cpu', 'cuda' or 'cuda:<n>'."),
        (["--prompt", "a" * 70], "max_input_len (63). Shorten it, or raise max_seq_len"),
        (["--prompt", "a", "--max_tokens", "0"], "max_tokens: found 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: found -1.0"),
        (["--prompt", "a", "--speculative", "mtp"], "found no multi-token prediction head; needed its weights"),
        (["--prompt", "a", "--speculative", "guess"], "'guess' is not one of 'ngram', 'mtp', 'draft'. Try --help."),
        (["--prompt", "a", "--speculative", "draft"], "found no --speculative_model with --speculative draft"),
        (["--prompt", "a", "--speculative", "ngram", "--speculative_model", "x"], "needed it with --speculative draft"),
        (["--prompt", "a", "--fixed_draft_len"], "fixed_draft_len: found without --speculative"),
        (["--prompt", "a", "--max_draft_len", "2"], "without --speculative; needed both or neither. [C001]"),
        (["--prompt", "a", "--logprobs", "2"], "logprobs: found without --json; needed both or neither. [C001]"),
        (["--prompt", "a", "--speculative", "ngram", "--history", "2"], "history: found 2 with max_draft_len=4"),
        (["--prompt", "a", "--history", "most"], "history: found 'most'; needed an integer or 'auto'"),
        (["--prompt", "a", "--history", "0"], "history: found 0; needed an integer from 1 up or 'auto'. [C001]"),
        (["--prompt", "a", "--executor", "tensorrt"], "found no engine"),
        (["--prompt", "a", "--max_batch_size", "0"], "max_batch_size: found 0"),
        (["--prompt", "a", "--max_num_tokens", "0"], "max_num_tokens"),
        (["--prompt", "a", "--state_dtype", "int8"], "'--state_dtype': 'int8' is not one of"),
        (["--prompt", "a", "--unknown", "0"], "--unknown"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(folder, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == ""
