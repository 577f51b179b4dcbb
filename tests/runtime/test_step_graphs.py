"""Buckets and padding of captured steps; on the CPU "captured" means called again, on the same tensors."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm import LLM, CudaGraphConfig, NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.errors import CapacityError, ConfigError
from trtllm_replayssm.runtime.executors.buckets import batch_buckets, bucket_of, key_length_buckets
from trtllm_replayssm.runtime.executors.step_graphs import CudaCapture, GraphKey, StaticInputs, StepGraphs, StepSizes
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

CPU = torch.device("cpu")
SIZES = StepSizes((1, 2, 4, 6), (512, 1024, 1500), 3, is_padding=True)


def call_again(run: Callable[[], None]) -> Callable[[], None]:
    """Stand in for a capture: run once on padding, then on what the input tensors hold."""
    run()
    return run


def step_inputs(num_rows: int, window: int, *, past: int = 0, first_slot: int = 0, positions: int | None = None) -> Any:
    def column(value: int) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.int32)

    return StepInputs(
        input_ids=torch.full((num_rows, window), 9, dtype=torch.int32),
        past_lengths=column(past),
        checkpoint_lengths=column(past),
        num_tokens=column(window),
        slot_ids=torch.arange(first_slot, first_slot + num_rows, dtype=torch.int32),
        logits_indices=torch.zeros((num_rows, window if positions is None else positions), dtype=torch.int32),
        first_slot=first_slot,
        max_past_length=past,
    )


@given(st.integers(1, 5000))
def test_every_batch_has_a_bucket_with_little_padding(max_batch_size: int) -> None:
    buckets = batch_buckets(max_batch_size, CudaGraphConfig())
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == max_batch_size
    assert len(buckets) <= 8 + 4 * max_batch_size.bit_length()
    for size in range(1, max_batch_size + 1):
        bucket = bucket_of(buckets, size)
        assert bucket is not None and 0 <= bucket - size <= max(7, bucket // 5)


@given(st.integers(1, 10**6), st.data())
def test_attention_reads_at_most_twice_what_the_longest_sequence_asks_for(capacity: int, data: st.DataObject) -> None:
    buckets = key_length_buckets(capacity)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == capacity
    length = data.draw(st.integers(1, capacity))
    bucket = bucket_of(buckets, length)
    assert bucket is not None and length <= bucket <= max(512, 2 * length)
    assert len(buckets) <= 1 + capacity.bit_length()


def test_batch_sizes_are_the_users_where_named() -> None:
    assert batch_buckets(8, CudaGraphConfig(batch_sizes=(4, 2, 4))) == (2, 4)
    assert batch_buckets(64, CudaGraphConfig(max_batch_size=12)) == (1, 2, 4, 8, 12)
    assert batch_buckets(3, CudaGraphConfig(max_batch_size=12)) == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"batch_sizes: found 16; needed at most max_batch_size \(8\)"):
        batch_buckets(8, CudaGraphConfig(batch_sizes=(1, 16)))


@pytest.mark.parametrize(
    "wrong", [{"batch_sizes": []}, {"batch_sizes": [0]}, {"batch_sizes": [2], "max_batch_size": 4}]
)
def test_impossible_batch_sizes_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="batch_sizes"):
        CudaGraphConfig(**wrong)
    assert CudaGraphConfig(batch_sizes=[1, 2]).batch_sizes == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "key"),
    [
        (step_inputs(1, 1), GraphKey(1, 1, 512)),
        (step_inputs(3, 1, past=511), GraphKey(4, 1, 512)),
        (step_inputs(3, 2, past=511), GraphKey(4, 2, 1024)),
        (step_inputs(6, 3, past=1499), GraphKey(6, 3, 1500)),
        (step_inputs(7, 1), None),
        (step_inputs(1, 4), None),
        (step_inputs(1, 3, positions=1), None),
        (step_inputs(1, 1, first_slot=2), None),
    ],
)
def test_decode_and_verification_steps_have_a_graph_and_prompts_have_none(
    inputs: StepInputs, key: GraphKey | None
) -> None:
    assert SIZES.key_of(inputs) == key


def test_many_rows_have_one_graph_for_all_key_lengths() -> None:
    sizes = replace(SIZES, own_length_rows=3)
    assert sizes.key_of(step_inputs(2, 1)) == GraphKey(2, 1, 512)
    for num_rows, captured in ((3, 4), (6, 6)):
        for past in (0, 511, 1497):
            assert sizes.key_of(step_inputs(num_rows, 2, past=past)) == GraphKey(captured, 2, 1500)


@pytest.mark.parametrize("own_length_rows", [None, 1, 3])
def test_every_graph_that_a_step_can_have_is_listed(own_length_rows: int | None) -> None:
    sizes = replace(SIZES, own_length_rows=own_length_rows, prompt_lengths=(8, 16))
    steps = [step_inputs(n, s, past=past) for n in range(1, 7) for s in (1, 2, 3) for past in (0, 511, 1023, 1497)]
    steps += [step_inputs(1, length, positions=1) for length in range(4, 17)]
    assert {sizes.key_of(step) for step in steps} == set(sizes.keys)
    assert len(sizes.keys) == len(set(sizes.keys))


def test_without_padding_exact_sizes_alone_have_a_graph() -> None:
    exact = StepSizes(SIZES.batch_sizes, SIZES.key_lengths, SIZES.window, is_padding=False)
    assert exact.key_of(step_inputs(4, 2)) == GraphKey(4, 2, 512)
    assert exact.key_of(step_inputs(3, 2)) is None


def test_rows_that_a_step_does_not_fill_are_padding_again() -> None:
    static = StaticInputs(GraphKey(6, 2, 512), CPU)
    addresses = [tensor.data_ptr() for tensor in static.inputs.tensors()]
    assert static.inputs.slot_ids.tolist() == [-1] * 6
    for num_rows in (5, 2, 6, 1, 3):
        static.fill(step_inputs(num_rows, 2, past=7))
        assert static.inputs.slot_ids.tolist() == [*range(num_rows), *[-1] * (6 - num_rows)]
        assert static.inputs.past_lengths[:num_rows].tolist() == [7] * num_rows
    assert [tensor.data_ptr() for tensor in static.inputs.tensors()] == addresses


class Recorder:
    """Notes the slots of every run, and writes the number of the run as its logits."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []

    def __call__(self, inputs: StepInputs, key_length: int, logits: torch.Tensor) -> StepOutputs:
        self.slots.append(inputs.slot_ids.tolist())
        return StepOutputs(logits.fill_(len(self.slots)))


def test_a_capture_runs_padding_alone_and_a_step_runs_once() -> None:
    run = Recorder()
    graphs = StepGraphs(run, SIZES, 5, CPU, call_again)
    outputs = graphs.step(step_inputs(3, 2))
    assert outputs is not None and outputs.logits.shape == (3, 2, 5)
    assert run.slots == [[-1] * 4, [0, 1, 2, -1]]
    again = graphs.step(step_inputs(4, 2))
    assert again is not None and run.slots[2:] == [[0, 1, 2, 3]] and bool((again.logits == 3).all())
    assert graphs.step(step_inputs(1, 3, positions=1)) is None and len(run.slots) == 3
    assert graphs.keys == (GraphKey(4, 2, 512),)


def test_warming_up_captures_everything_on_padding() -> None:
    run = Recorder()
    graphs = StepGraphs(run, SIZES, 5, CPU, call_again)
    graphs.warm_up()
    assert set(graphs.keys) == set(SIZES.keys)
    assert {slot for slots in run.slots for slot in slots} == {-1}
    count = len(run.slots)
    for steps, past in enumerate((0, 800, 1400)):
        graphs.step(step_inputs(5, 2, past=past))
        assert len(run.slots) == count + 1 + steps, "a step runs once, and captures nothing"


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()], ids=["memory", "user"])
def test_warming_up_that_fails_leaves_nothing_on_the_device(
    tmp_path: Path, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(make_qwen(tmp_path / "hf", seed=3), device="cpu", max_batch_size=4)
    executor = llm._executor
    assert isinstance(executor, TorchExecutor)
    norm = executor._module.final_norm
    run, calls = norm.forward, []

    def fail_at_the_fifth(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise failure
        return run(*arguments)

    # Within the module, whose variables the error then remembers.
    monkeypatch.setattr(norm, "forward", fail_at_the_fifth)
    sizes = executor._sizes(CudaGraphConfig())
    executor._graphs = StepGraphs(executor._run, sizes, executor.geometry.vocab_size, CPU, call_again)
    weights, graphs = weakref.ref(executor._module), executor._graphs
    gc.disable()  # what it would find would have stayed until it ran
    try:
        with pytest.raises(type(failure)) as found:
            executor._warm_up(executor._graphs)
        assert found.value is failure, "which somebody still has"
        assert weights() is None and not executor.states and not graphs.keys
    finally:
        gc.enable()


def chained(last: RuntimeError, first: RuntimeError) -> RuntimeError:
    last.__context__ = first
    return last


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        chained(torch.AcceleratorError("CUDA error: capture invalidated"), torch.OutOfMemoryError("no room")),
    ],
)
def test_no_room_to_capture_says_what_to_lower(failure: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError, match=r"no room on cuda:0 to capture a step \(CUDA.*max_batch_size"):
        capture_that_fails(failure, monkeypatch)


def test_what_is_no_lack_of_room_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        capture_that_fails(RuntimeError("CUDA error: an illegal memory access was encountered"), monkeypatch)


def capture_that_fails(failure: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CudaCapture, run: Callable[[], None]) -> Callable[[], None]:
        raise failure

    monkeypatch.setattr(CudaCapture, "_captured", fail)
    capture = CudaCapture.__new__(CudaCapture)
    capture._device = torch.device("cuda:0")
    capture(lambda: None)


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "hf"
    return make_nemotron_h(path, seed=3) if request.param == "nemotron_h" else make_qwen(path, seed=3)


def generate(llm: LLM, temperature: float) -> list[list[int]]:
    """Run requests of many lengths, so that batches grow and shrink, prompts between decode steps."""
    prompts = [[7 + i] * (1 + 5 * (i % 4)) + [3 * i + 1] for i in range(9)]
    params = [
        SamplingParams(max_tokens=4 + 7 * (i % 5), temperature=temperature, seed=i, ignore_eos=True) for i in range(9)
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("speculative", [None, NGramDecodingConfig(max_draft_len=3)], ids=["plain", "ngram"])
@pytest.mark.parametrize("enabled", [True, False], ids=["replay", "conventional"])
def test_padded_steps_give_the_tokens_of_exact_ones(
    folder: Path, temperature: float, speculative: NGramDecodingConfig | None, enabled: bool
) -> None:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 6,
        "max_num_tokens": 8,
        "speculative_config": speculative,
        "replay": ReplayConfig(history=5, enabled=enabled),
    }
    exact = generate(LLM(folder, **options), temperature)
    llm = LLM(folder, **options)
    executor = llm._executor
    assert isinstance(executor, TorchExecutor)
    for state in executor._states:
        state.fill_(float("nan"))
    sizes = executor._sizes(CudaGraphConfig(batch_sizes=(2, 5, 6)))
    executor._graphs = StepGraphs(executor._run, sizes, executor.geometry.vocab_size, CPU, call_again)
    assert generate(llm, temperature) == exact
    assert {key.num_rows for key in executor._graphs.keys} == {2, 5, 6}


def test_steps_that_are_not_captured_read_keys_up_to_the_longest_running_sequence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, device="cpu", max_batch_size=2, max_seq_len=500)
    executor = llm._executor
    assert isinstance(executor, TorchExecutor)
    run, seen = executor._run, []

    def watched(inputs: StepInputs, key_length: int, logits: torch.Tensor | None = None) -> StepOutputs:
        seen.append((inputs.first_slot, len(inputs.slot_ids), key_length))
        return run(inputs, key_length, logits)

    monkeypatch.setattr(executor, "_run", watched)
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (3, 6)]
    llm.generate([[5] * 40, [6] * 9], params)
    # Two prompts; two steps of both, as long as the first; then what is left of the second.
    assert seen == [(0, 1, 40), (1, 1, 9), (0, 2, 41), (0, 2, 42), (0, 2, 12), (0, 2, 13), (0, 2, 14)]
