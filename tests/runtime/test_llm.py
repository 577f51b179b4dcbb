"""The public face: what goes in, what comes out, what is refused before anything runs, and what is counted."""

import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.manifests import tiny_manifest
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.builders.checkpoint.convert import convert
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.memory import checkpoint_bytes, ring_row_bytes
from trtllm_replayssm.errors import (
    BackendError,
    CapacityError,
    CheckpointError,
    ConfigError,
    ManifestError,
    ReplaySSMError,
    RequestError,
    UnsupportedError,
)
from trtllm_replayssm.runtime.tokenizer import Tokenizer

PATTERN = "M*-M"
RULES = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
EVERY_TOKEN_STOPS = {"min_tokens": 1, "stop_token_ids": tuple(range(320))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("llm") / "hf", pattern=PATTERN, tokenizer=True)


@pytest.fixture(scope="module")
def rank_checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(folder, tmp_path_factory.mktemp("llm") / "rank", "auto", 1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_batch_size=2, max_seq_len=64)


@pytest.fixture
def engine(rank_checkpoint: Path, llm: LLM, tmp_path: Path) -> Path:
    """Give the folder of an engine whose plan nobody can run."""
    manifest = tiny_manifest(
        geometry=llm.geometry,
        replay=ReplayGeometry(history=8, max_draft_len=2),
        limits=EngineLimits(max_batch_size=3, max_input_len=60, max_seq_len=64, max_num_tokens=11),
    )
    path = tmp_path / "engine"
    path.mkdir()
    for file in rank_checkpoint.iterdir():
        (path / file.name).hardlink_to(file)
    (path / "manifest.json").write_text(manifest.model_dump_json())
    return path


def token_ids(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, RULES).outputs[0].token_ids


def test_a_single_prompt_gives_one_output_and_a_list_gives_a_list(llm: LLM) -> None:
    text = llm.generate("hi", RULES)
    ids = llm.generate(text.prompt_token_ids, RULES)
    both = llm.generate(["hi", ids.prompt_token_ids], RULES)
    assert (text.prompt, ids.prompt) == ("hi", None)
    assert [output.outputs[0].token_ids for output in both] == [text.outputs[0].token_ids, ids.outputs[0].token_ids]
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids and len(text.outputs[0].token_ids) == 12
    assert len(llm.generate(["hi"], RULES)) == 1
    completion = text.outputs[0]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert text.finished


@pytest.mark.parametrize(
    "prompt", [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), range(5, 8)], ids=lambda p: type(p).__name__
)
def test_token_ids_may_come_in_any_sequence(llm: LLM, prompt: Any) -> None:
    assert llm.generate(prompt, RULES).prompt_token_ids == [5, 6, 7]
    assert [output.prompt_token_ids for output in llm.generate([prompt, [8]], RULES)] == [[5, 6, 7], [8]]


def test_each_prompt_may_have_its_own_rules(llm: LLM) -> None:
    rules = [RULES.model_copy(update={"max_tokens": n}) for n in (3, 1, 7)]
    outputs = llm.generate([[5], [6], [7]], rules)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 7]
    assert [output.prompt_token_ids for output in outputs] == [[5], [6], [7]]


def test_text_streams_as_the_tokenizer_decodes_it(llm: LLM, folder: Path) -> None:
    completion = llm.generate("hello", RULES.model_copy(update={"max_tokens": 50})).outputs[0]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert completion.text == tokenizer.decode(completion.token_ids)


def test_stop_strings_stop_tokens_and_the_end_token_end_a_generation(llm: LLM) -> None:
    ids = llm.generate([9, 10, 11], RULES).outputs[0].token_ids
    at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    for rules in ({"stop_token_ids": (ids[at],)}, {"end_id": ids[at], "ignore_eos": False}):
        completion = llm.generate([9, 10, 11], RULES.model_copy(update=rules)).outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (ids[: at + 1], "stop")
        assert completion.stop_reason == (ids[at] if "stop_token_ids" in rules else None)
    ignored = RULES.model_copy(update={"end_id": ids[at], "ignore_eos": True})
    assert llm.generate([9, 10, 11], ignored).outputs[0].token_ids == ids


def test_a_stop_string_cuts_the_text_across_token_borders(llm: LLM) -> None:
    whole = llm.generate("stop", RULES.model_copy(update={"max_tokens": 40})).outputs[0].text
    start = next(i for i in range(2, len(whole) - 2) if "\N{REPLACEMENT CHARACTER}" not in whole[i : i + 2])
    stop = whole[start : start + 2]
    completion = llm.generate("stop", RULES.model_copy(update={"max_tokens": 40, "stop": (stop,)})).outputs[0]
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_min_tokens_keeps_the_end_away(llm: LLM) -> None:
    ids = llm.generate([9, 10, 11], RULES).outputs[0].token_ids
    rules = RULES.model_copy(update={"end_id": ids[0], "ignore_eos": False, "min_tokens": 6})
    completion = llm.generate([9, 10, 11], rules).outputs[0]
    assert len(completion.token_ids) >= 6 and ids[0] not in completion.token_ids[:6]


def test_every_token_may_stop_where_none_is_kept_away(llm: LLM) -> None:
    rules = RULES.model_copy(update=EVERY_TOKEN_STOPS | {"min_tokens": 0})
    assert len(llm.generate([5], rules).outputs[0].token_ids) == 1
    but_one = EVERY_TOKEN_STOPS | {"stop_token_ids": tuple(set(range(320)) - {7})}
    assert llm.generate([5], RULES.model_copy(update=but_one)).outputs[0].token_ids[0] == 7


def test_generation_ends_at_max_seq_len(folder: Path) -> None:
    for speculative in (None, NGramDecodingConfig(max_draft_len=7)):
        small = LLM(folder, device="cpu", max_seq_len=32, speculative_config=speculative)
        output = small.generate([5, 6] * 10, RULES.model_copy(update={"max_tokens": 500}))
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "rules", "message"),
    [
        ("", RULES, "prompt 0: found no tokens"),
        ([], RULES, "found an empty list"),
        ([[5], []], RULES, "prompt 1: found no tokens"),
        ([[5], [5, 320]], RULES, "prompt 1: found token id 320; needed 0 <= id < 320"),
        ([[5], [-1]], RULES, "prompt 1: found token id -1"),
        ([[5, 2.5]], RULES, "prompt 0: found 2.5 among its token ids"),
        ([[5, True]], RULES, "prompt 0: found True among its token ids"),
        ([None], RULES, "prompt 0: found NoneType"),
        (7, RULES, "inputs: found int"),
        ([5] * 64, RULES, r"prompt 0: found 64 tokens; needed at most max_input_len \(63\)"),
        ([[5], [6]], [RULES], "sampling_params: found 1 for 2 prompts"),
        ([[5]], RULES.model_copy(update={"stop_token_ids": (400,)}), "stop or end token id 400"),
        ([[5]], RULES.model_copy(update=EVERY_TOKEN_STOPS), "prompt 0: found min_tokens=1 with all 320 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompts: Any, rules: Any, message: str) -> None:
    before = llm.metrics()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, rules)
    assert llm.metrics() == before


def test_a_folder_without_a_tokenizer_works_with_token_ids_alone(tmp_path: Path) -> None:
    bare = LLM(make_nemotron_h(tmp_path / "bare", pattern="M"), device="cpu", max_seq_len=32)
    completion = bare.generate([5, 6], RULES).outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 12)
    for prompt, rules in (("text", RULES), ([5], RULES.model_copy(update={"stop": ("x",)}))):
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            bare.generate(prompt, rules)


def test_a_rank_checkpoint_and_its_source_generate_the_same(folder: Path, rank_checkpoint: Path) -> None:
    ours, theirs = (LLM(path, device="cpu").generate("same", RULES) for path in (rank_checkpoint, folder))
    assert ours.outputs == theirs.outputs


def test_an_engine_folder_runs_in_torch_with_the_engines_settings(engine: Path, llm: LLM) -> None:
    for executor in ("torch", "auto"):
        opened = LLM(engine, executor=executor, device="cpu")
        assert (opened.executor, opened.replay.history, opened.limits.max_batch_size) == ("torch", 8, 3)
        assert token_ids(opened, "same") == token_ids(llm, "same")
    with pytest.raises(ConfigError, match="history=16, built for 8"):
        LLM(engine, device="cpu", replay=ReplayConfig(history=16))
    with pytest.raises(ConfigError, match="max_draft_len=4, built for at most 2"):
        LLM(engine, device="cpu", speculative_config=NGramDecodingConfig(max_draft_len=4))


def test_auto_takes_a_history_that_suits_the_model(folder: Path) -> None:
    opened = LLM(folder, device="cpu", replay=ReplayConfig(history="auto", state_dtype="bfloat16"))
    # Of so small a state, in half its bytes, most of what a step moves are ring rows in fp32.
    assert opened.replay == ReplayGeometry(history=8, state_dtype="bfloat16")
    assert repr(opened).endswith(", history=8)")


def test_a_folder_without_weights_that_is_no_engine_is_told_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    """The option checkpoint_dir is for engines alone."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"found no weights; needed model.safetensors"):
        LLM(tmp_path, device="cpu")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="Convert to safetensors"):
        LLM(tmp_path, device="cpu")


def test_an_engine_folder_without_weights_takes_them_from_a_checkpoint(
    engine: Path, rank_checkpoint: Path, folder: Path, llm: LLM, tmp_path: Path
) -> None:
    (engine / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="checkpoint_dir"):
        LLM(engine, device="cpu")
    for weights in (rank_checkpoint, folder):
        opened = LLM(engine, device="cpu", checkpoint_dir=weights)
        assert token_ids(opened, "same") == token_ids(llm, "same")
    other = make_nemotron_h(tmp_path / "other", pattern="MM")
    with pytest.raises(CheckpointError, match="not those of the engine's model"):
        LLM(engine, device="cpu", checkpoint_dir=other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"executor": "onnx"}, ConfigError, "executor: found 'onnx'"),
        ({"executor": "tensorrt"}, ManifestError, "trtllm-replayssm build"),
        ({"executor": "tensorrt", "replay": ReplayConfig(enabled=False)}, UnsupportedError, "--executor torch"),
        ({"device": "tpu"}, ConfigError, "device: found 'tpu'"),
        ({"device": "mps"}, ConfigError, "device: found 'mps'"),
        ({"device": None}, ConfigError, "device: found 'None'"),
        ({"device": "cuda:99"}, ConfigError, "device: found 'cuda:99'"),
        ({"dtype": "float8"}, ConfigError, "float8"),
        ({"dtype": torch.float16}, ConfigError, "dtype: found torch.float16; needed a valid string"),
        ({"checkpoint_dir": "x"}, ConfigError, "checkpoint_dir: found x"),
        ({"checkpoint_dir": 3}, ConfigError, "checkpoint_dir: found int; needed the path"),
        ({"max_batch_size": "3"}, ConfigError, "max_batch_size: found '3'; needed a valid integer"),
        ({"replay": {"history": 4}}, ConfigError, "replay: found {'history': 4}; needed an instance of ReplayConfig"),
        ({"speculative_config": {}}, ConfigError, "speculative_config: found dict; needed NGramDecodingConfig"),
        ({"drafter": 3}, ConfigError, "drafter: found int; needed an object with max_draft_len, begin"),
        ({"max_batch_size": 10**7, "max_seq_len": 10**6}, CapacityError, "needed .* GiB for max_batch_size"),
        ({"replay": ReplayConfig(history=2), "speculative_config": NGramDecodingConfig()}, ConfigError, "history: f"),
    ],
)
def test_an_impossible_option_is_refused_with_a_way_out(
    folder: Path, options: dict[str, Any], error: type[ReplaySSMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(folder, **{"device": "cpu", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA device")
def test_tensorrt_without_a_gpu_is_an_error_that_names_the_torch_executor(engine: Path) -> None:
    with pytest.raises(BackendError, match="Use the torch executor"):
        LLM(engine, executor="tensorrt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why the engine cannot run where there is no CUDA device")
def test_an_engine_that_cannot_run_here_is_replaced_with_one_line_that_says_why(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert LLM(engine).executor == "torch"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name.startswith("trtllm_replayssm.")
    assert re.search(
        r"engine: engine not run, torch modules on cpu instead.*no CUDA device; needed a GPU of .* 8\.0, 8\.9",
        record.message,
    )
    assert "\n" not in record.message
    caplog.clear()
    # Who asks for the CPU, or for the conventional decode, knows that no engine will run.
    for options in ({"device": "cpu"}, {"replay": ReplayConfig(history=8, enabled=False)}, {"executor": "torch"}):
        assert LLM(engine, **options).executor == "torch"
    assert not caplog.records


def test_a_tokenizer_that_cannot_be_read_is_a_fault_of_the_folder(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(b"{" if file.name == "tokenizer.json" else file.read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: found no readable tokenizer"):
        LLM(tmp_path, device="cpu")


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="Check the path.( \\[K001\\])?$|no config.json"):
            LLM(path)
    with pytest.raises(ConfigError, match="model: found NoneType; needed the path of a folder"):
        LLM(None)  # type: ignore[arg-type]


def test_a_name_of_the_hub_is_not_downloaded_and_the_message_says_how_to() -> None:
    with pytest.raises(CheckpointError, match="Run `hf download nvidia/Some-Model-9B-v2 --local-dir DIR`"):
        LLM("nvidia/Some-Model-9B-v2")


def test_an_llm_closes_itself_and_is_not_used_again(folder: Path) -> None:
    with LLM(folder, device="cpu", max_seq_len=32) as llm:
        assert repr(llm) == (
            f"LLM({str(folder)!r}, executor='torch', device='cpu', dtype='float32', max_batch_size=8, max_seq_len=32, "
            "history=16)"
        )
        assert token_ids(llm, "same")
    llm.close()
    assert repr(llm).endswith(", closed)")
    before = llm.metrics()
    with pytest.raises(RequestError, match="found an LLM that was closed"):
        llm.generate("same", RULES)
    assert llm.metrics() == before


def test_a_notebook_shows_the_progress_bar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate([5], RULES)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    llm.generate([5], RULES)
    assert "1/1" in capsys.readouterr().err
    llm.generate([5], RULES, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_model_opens_without_transformers_onnx_or_tensorrt(folder: Path) -> None:
    code = f"""
        import sys
        for name in ("transformers", "onnx", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "cuda"):
            sys.modules[name] = None
        from trtllm_replayssm import LLM, SamplingParams
        output = LLM({str(folder)!r}, device="cpu").generate([5, 6], SamplingParams(max_tokens=3))
        print(len(output.outputs[0].token_ids))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.strip() == "3"


def test_metrics_count_tokens_steps_and_flushes_of_a_plain_run(folder: Path) -> None:
    llm = LLM(folder, device="cpu", max_num_tokens=8, replay=ReplayConfig(history=4))
    llm.generate([list(range(5, 25))], RULES.model_copy(update={"max_tokens": 10}))
    counted = llm.metrics()
    state, row = checkpoint_bytes(llm.geometry, "float32"), ring_row_bytes(llm.geometry)
    # Pieces of 8, 8 and 4 tokens fold all; then nine windows of one token: c - f is 0 1 2 3 | 4 -> 1 2 3 | 4 -> 1 ...
    pending = [0, 1, 2, 3, 4, 1, 2, 3, 4]
    flushes = 2
    assert (counted["num_prompt_steps"], counted["num_decode_steps"]) == (3, 9)
    assert (counted["num_prompt_tokens"], counted["num_generated_tokens"], counted["num_requests"]) == (20, 10, 1)
    assert counted["num_flushes"] == flushes
    assert counted["state_bytes_read"] == (2 + 9) * state + sum(pending) * row
    assert counted["state_bytes_written"] == (3 + flushes) * state + 9 * row
    assert counted["conventional_state_bytes_read"] == (2 + 9) * state
    assert counted["conventional_state_bytes_written"] == (3 + 9) * state
    assert counted["wall_time_s"] > 0 and counted["tokens_per_s"] > 0
    assert counted["acceptance_rate"] is None
    llm.reset_metrics()
    assert set(llm.metrics().values()) == {0, None}


def test_a_pattern_that_repeats_is_drafted_and_saves_steps(folder: Path) -> None:
    llm = LLM(folder, device="cpu", speculative_config=NGramDecodingConfig(max_draft_len=3))
    llm.generate([[7, 8, 9] * 6], RULES)
    counted = llm.metrics()
    assert counted["num_draft_tokens"] > 0
    assert counted["acceptance_rate"] == counted["num_accepted_drafts"] / counted["num_draft_tokens"]
    assert counted["num_decode_rows"] + counted["num_accepted_drafts"] + 1 == counted["num_generated_tokens"]


@pytest.mark.parametrize("drafts", [[99999], [-1], ["a"], [None], [2.5], [7, "a"], 3], ids=repr)
def test_a_drafter_that_proposes_nonsense_is_refused(folder: Path, drafts: Any) -> None:
    class Nonsense:
        max_draft_len = 2

        def begin(self, request_id: int, prompt_token_ids: Any) -> None: ...
        def observe(self, request_id: int, token_ids: Any) -> None: ...
        def end(self, request_id: int) -> None: ...
        def propose(self, limits: Any) -> Any:
            return {request_id: drafts for request_id in limits if request_id % 2 == 0}

    with LLM(folder, device="cpu", drafter=Nonsense()) as llm:
        spoilt, other = [llm.generate_async([5], RULES) for _ in range(2)]
        with pytest.raises(RequestError, match=re.escape(f"drafts: found {drafts}; needed token ids")):
            spoilt.result()
        assert other.result().outputs[0].finish_reason == "length"
    with pytest.raises(ConfigError, match="one of the two"):
        LLM(folder, device="cpu", drafter=Nonsense(), speculative_config=NGramDecodingConfig())
