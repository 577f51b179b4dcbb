"""Prompt pieces padded to captured lengths; on the CPU "captured" means called again, on the same tensors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.builders.test_flash_attention import on_cpu
from tests.builders.tiny_geometry import random_weights, tiny_geometry, tiny_qwen_geometry
from tests.end_to_end.test_mtp import Recorder as DraftRecorder
from tests.mtp_models import make_with_mtp
from tests.runtime.test_step_graphs import CPU, SIZES, Recorder, call_again, step_inputs
from tests.tiny_models import make_nemotron_h, make_qwen
from tests.tolerances import LOGITS_FP32
from trtllm_replayssm import (
    LLM,
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    ReplayConfig,
    SamplingParams,
)
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.executors.buckets import bucket_of, prompt_buckets
from trtllm_replayssm.runtime.executors.step_graphs import GraphKey, StaticInputs, StepGraphs
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.inputs import build_fold_inputs
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

__all__ = ["on_cpu"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


LENGTHS = (8, 16)
PROMPTS = replace(SIZES, prompt_lengths=LENGTHS)


@given(st.integers(0, 5000), st.integers(1, 40))
def test_every_prompt_length_has_a_bucket_of_at_most_twice_its_tokens(longest: int, window: int) -> None:
    buckets = prompt_buckets(longest, window)
    assert list(buckets) == sorted(set(buckets)) and len(buckets) <= 1 + longest.bit_length()
    for length in range(window + 1, longest + 1):
        bucket = bucket_of(buckets, length)
        assert bucket is not None and length <= bucket <= max(32, 2 * length)
    assert bucket_of(buckets, max(longest, window) + 1) is None


def test_the_longest_captured_prompt_is_the_users_where_named() -> None:
    assert CudaGraphConfig().max_prompt_tokens == 1024 and CudaGraphConfig(max_prompt_tokens=0).max_prompt_tokens == 0
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        CudaGraphConfig(max_prompt_tokens=-1)


@pytest.mark.parametrize(
    ("inputs", "length"),
    [
        (step_inputs(1, 4, positions=1), 8),
        (step_inputs(1, 8, past=700, first_slot=5, positions=1), 8),
        (step_inputs(1, 9, first_slot=2, positions=1), 16),
        (step_inputs(1, 16, positions=1), 16),
        (step_inputs(1, 17, positions=1), None),
        # No room for the padding, and just enough.
        (step_inputs(1, 9, past=1485, positions=1), None),
        (step_inputs(1, 9, past=1484, positions=1), 16),
        # Not a prompt's piece: it is short enough for a step, has several rows, or wants more logits.
        (step_inputs(1, 3, positions=1), None),
        (step_inputs(2, 4, positions=1), None),
        (step_inputs(1, 4), None),
    ],
)
def test_prompt_pieces_have_a_graph_where_the_caches_hold_their_padding(inputs: StepInputs, length: int | None) -> None:
    assert PROMPTS.key_of(inputs) == (None if length is None else GraphKey(1, length, 1500, is_prompt=True))


def test_without_padding_exact_lengths_alone_have_a_graph() -> None:
    exact = replace(PROMPTS, is_padding=False)
    assert exact.key_of(step_inputs(1, 16, positions=1)) == exact.prompt_key(16)
    assert exact.key_of(step_inputs(1, 15, positions=1)) is None


def test_tokens_that_a_piece_does_not_fill_are_padding_again() -> None:
    static = StaticInputs(PROMPTS.prompt_key(16), CPU)
    addresses = [tensor.data_ptr() for tensor in static.inputs.tensors()]
    for count in (12, 16, 9, 14):
        static.fill(step_inputs(1, count, past=7, first_slot=3, positions=1))
        assert static.inputs.input_ids.tolist() == [[9] * count + [0] * (16 - count)]
        assert static.inputs.num_tokens.tolist() == [count] and static.inputs.slot_ids.tolist() == [3]
        assert static.inputs.logits_indices.shape == (1, 1)
    assert [tensor.data_ptr() for tensor in static.inputs.tensors()] == addresses


def test_a_piece_gets_one_tokens_logits_and_the_hidden_states_of_its_own_tokens() -> None:
    record = Recorder()

    def run(inputs: StepInputs, key_length: int, logits: torch.Tensor) -> StepOutputs:
        assert key_length == 1500
        return StepOutputs(record(inputs, key_length, logits).logits, torch.zeros(*inputs.input_ids.shape, 2))

    graphs = StepGraphs(run, PROMPTS, 5, CPU, call_again)
    outputs = graphs.step(step_inputs(1, 11, first_slot=4, positions=1))
    assert outputs is not None and outputs.hidden_states is not None
    assert outputs.logits.shape == (1, 1, 5) and outputs.hidden_states.shape == (1, 11, 2)
    assert record.slots == [[-1], [4]] and graphs.keys == (PROMPTS.prompt_key(16),)


def test_warming_up_captures_every_prompt_length_on_padding() -> None:
    run = Recorder()
    graphs = StepGraphs(run, PROMPTS, 5, CPU, call_again)
    graphs.warm_up()
    assert {key.window for key in graphs.keys if key.is_prompt} == {8, 16}
    assert {slot for slots in run.slots for slot in slots} == {-1}
    count = len(run.slots)
    graphs.step(step_inputs(1, 5, first_slot=1, positions=1))
    assert len(run.slots) == count + 1


def capture_prompts(executor: Any, lengths: Sequence[int] = LENGTHS) -> StepGraphs:
    """Let an executor run decode steps and prompt pieces as graphs do: padded, on tensors that stay."""
    assert isinstance(executor, TorchExecutor)
    sizes = replace(executor._sizes(CudaGraphConfig()), prompt_lengths=lengths)
    executor._graphs = StepGraphs(executor._run, sizes, executor.geometry.vocab_size, CPU, call_again)
    return executor._graphs


def spoil(executor: Any) -> None:
    """Fill the states with what no request may read: value caches, too, of which flash attention wants finite ones."""
    for spec, state in zip(executor._specs, executor._states, strict=True):
        state.fill_(3e4 if spec.name.startswith("value_cache") else torch.nan)


SLOTS, LONGEST = 4, 40


def make_executor(geometry: ModelGeometry, max_draft_len: int, *, conventional: bool) -> TorchExecutor:
    limits = EngineLimits(max_batch_size=SLOTS, max_input_len=LONGEST, max_seq_len=LONGEST, max_num_tokens=LONGEST)
    executor = TorchExecutor(
        geometry,
        ReplayGeometry(history=5, max_draft_len=max_draft_len),
        limits,
        lambda device: random_weights(geometry),
        CPU,
        conventional=conventional,
        returns_hidden_states=True,
    )
    spoil(executor)
    return executor


def window_of(slot: int, past: int, count: int, *, is_prompt: bool) -> StepInputs:
    """A piece of a prompt in its slot, or the same as a window of a decode step, behind folded tokens."""
    first = slot if is_prompt else 0
    rows = slot - first + 1

    def column(value: int, padding: int = 0) -> torch.Tensor:
        return torch.tensor([padding] * (rows - 1) + [value], dtype=torch.int32)

    ids = torch.arange(past, past + count, dtype=torch.int32) * 7 % 91 + 3
    return StepInputs(
        input_ids=ids.expand(rows, count).contiguous(),
        past_lengths=column(past, 9),
        checkpoint_lengths=column(past, 9),
        num_tokens=column(count),
        slot_ids=column(slot, -1),
        logits_indices=column(count - 1)[:, None] if is_prompt else torch.arange(count).expand(rows, count).int(),
        first_slot=first,
        max_past_length=past,
    )


def assert_alike(found: StepOutputs, expected: StepOutputs) -> None:
    assert found.hidden_states is not None and expected.hidden_states is not None
    for ours, theirs in ((found.logits, expected.logits), (found.hidden_states, expected.hidden_states)):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[-1], theirs[-1], atol=LOGITS_FP32, rtol=LOGITS_FP32)


GEOMETRIES = [tiny_geometry("M*-M"), tiny_qwen_geometry("G-*-"), tiny_geometry("M-M"), tiny_qwen_geometry("G-")]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("max_draft_len", [0, 2], ids=["T1", "T3"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["M*-M", "G-*-", "M-M", "G-"])
def test_a_piece_of_any_length_at_any_place_is_what_it_is_unpadded(
    geometry: ModelGeometry, max_draft_len: int, conventional: bool
) -> None:
    exact, padded = (make_executor(geometry, max_draft_len, conventional=conventional) for _ in range(2))
    graphs, window = capture_prompts(padded), 1 + max_draft_len
    for past in (0, window + 1, 11, LONGEST - 17, LONGEST - 12, LONGEST - 6):
        for number, count in enumerate(range(window + 1, min(18, LONGEST - past))):
            slot = (past + count) % SLOTS
            steps = [window_of(slot, past, count, is_prompt=True)]
            if past:
                steps.insert(0, window_of(slot, 0, past, is_prompt=True))
            if number % 3 == 0:
                steps.append(window_of(slot, past + count, window, is_prompt=False))
            for step in steps:
                assert_alike(padded.step(step), exact.step(step))
    # Whatever slot and position they have.
    assert {key.window for key in graphs.keys if key.is_prompt} == set(LENGTHS)
    assert sum(key.is_prompt for key in graphs.keys) == len(LENGTHS)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=["M*-M", "G-*-"])
def test_a_padded_piece_touches_no_other_slot(geometry: ModelGeometry, conventional: bool) -> None:
    executor = make_executor(geometry, 0, conventional=conventional)
    capture_prompts(executor)
    before = [state.clone() for state in executor._states]
    executor.step(window_of(2, 0, 9, is_prompt=True))
    for spec, ours, theirs in zip(executor._specs, executor._states, before, strict=True):
        if spec.is_cache:
            # Where padding writes, and no token that is kept stands: the capture's own row has the cache of its number.
            ours[0, :, -1] = theirs[0, :, -1]
        for slot in (0, 1, 3):
            assert torch.equal(ours[slot].view(torch.uint8), theirs[slot].view(torch.uint8)), spec.name


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=["M*-M", "G-*-"])
def test_what_is_pending_is_folded_by_a_padded_piece_without_tokens(geometry: ModelGeometry) -> None:
    exact, padded = (make_executor(geometry, 1, conventional=False) for _ in range(2))
    graphs = capture_prompts(padded)
    for executor in (exact, padded):
        executor.step(window_of(1, 0, 6, is_prompt=True))
        executor.step(window_of(1, 6, 2, is_prompt=False))
        executor.step(build_fold_inputs(1, 8, 6, 3, device=CPU))
    assert {key.window for key in graphs.keys if key.is_prompt} == {8}
    for spec, ours, theirs in zip(padded._specs, padded._states, exact._states, strict=True):
        if spec.name.startswith("ssm_state"):
            torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)
    after = window_of(1, 8, 3, is_prompt=True)
    assert_alike(padded.step(after), exact.step(after))


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("prompt_graphs") / "hf"
    return make_nemotron_h(path, seed=3) if request.param == "nemotron_h" else make_qwen(path, seed=3)


TEXTS = [[(7 * i + 3 * j) % 300 + 5 for j in range(1 + 4 * i)] for i in range(13)]


def generate(llm: LLM, texts: Sequence[Sequence[int]] = TEXTS, **rules: Any) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=4 + 5 * (i % 4), temperature=0.8 * (i % 2), seed=i, ignore_eos=True, **rules)
        for i in range(len(texts))
    ]
    return [output.outputs[0].token_ids for output in llm.generate([list(text) for text in texts], params)]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("max_num_tokens", [9, 64])
@pytest.mark.parametrize(
    ("enabled", "drafts"), [(True, 0), (True, 3), (False, 0)], ids=["replay", "drafts", "conventional"]
)
def test_padded_prompts_give_the_tokens_of_exact_ones(
    folder: Path, enabled: bool, drafts: int, max_num_tokens: int
) -> None:
    """Sequences end where the caches do, so that the last pieces of the longest prompt have no room for padding."""
    options: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 3,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": 54,
        "speculative_config": NGramDecodingConfig(max_draft_len=drafts, adaptive=False) if drafts else None,
        "replay": ReplayConfig(history=5, enabled=enabled),
    }
    with LLM(folder, **options) as exact, LLM(folder, **options) as llm:
        graphs = capture_prompts(llm._executor, LENGTHS if max_num_tokens < 16 else (8, 16, 40))
        spoil(llm._executor)
        expected = generate(exact)
        for _ in range(2):
            assert generate(llm) == expected
        lengths = {key.window for key in graphs.keys if key.is_prompt}
        assert lengths == ({8, 16} if max_num_tokens < 16 else {8, 16, 40})


@pytest.mark.usefixtures("on_cpu")
def test_a_reused_prefix_gives_what_a_padded_prompt_without_reuse_does(folder: Path) -> None:
    config = KvCacheConfig(enable_block_reuse=True, tokens_per_block=16, device_cache_size=2**24)
    base = TEXTS[-1]
    texts = [[*base[:shared], *TEXTS[5][:rest]] for shared in (15, 17, 33, 41) for rest in (1, 5, 20)]
    with LLM(folder, device="cpu", max_batch_size=2, max_seq_len=96, kv_cache_config=config) as llm:
        graphs = capture_prompts(llm._executor)
        expected = generate(llm, texts, enable_block_reuse=False)
        assert llm.metrics()["num_prefix_hits"] == 0
        for _ in range(2):
            assert generate(llm, texts) == expected
        assert llm.metrics()["num_prefix_hits"] > len(texts)
        assert {key.window for key in graphs.keys if key.is_prompt} == {8, 16}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_a_head_reads_the_hidden_states_of_padded_prompts(tmp_path: Path, family: str) -> None:
    folder = make_with_mtp(tmp_path / "hf", family, "random", seed=3)
    config = MTPDecodingConfig(max_draft_len=3, adaptive=False)
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 3, "max_seq_len": 80, "speculative_config": config}
    with LLM(folder, **options) as exact, LLM(folder, **options) as llm:
        capture_prompts(llm._executor, (8, 16, 32))
        recorders = [DraftRecorder(opened, None) for opened in (exact, llm)]
        assert generate(llm) == generate(exact)
        expected, found = (recorder.proposals for recorder in recorders)
        assert found == expected and len({drafts for _, drafts in found}) > 20
