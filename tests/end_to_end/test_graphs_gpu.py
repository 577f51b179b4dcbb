"""Decode steps as CUDA graphs against the same steps run operation by operation."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.test_spoilt_drafts import SPOILT, SpoiltDrafter, spoil
from tests.tiny_models import make_nemotron_h, make_qwen
from tests.tolerances import LOGITS_FP32
from trtllm_replayssm import LLM, CudaGraphConfig, NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.builders.layers import flash_attention
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

pytestmark = pytest.mark.gpu

NEVER = 78  # a token that is not generated either
PROMPTS = [[31 + i % 3, 32, 33] * (1 + 6 * (i % 4)) + [3 * i + 1] for i in range(14)]


class FiniteDrafter(SpoiltDrafter):
    """The same, with another token that is never the target's: the windows, and so the rounding, are the same."""

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        found = super().propose(limits)
        return {row: [NEVER if token == SPOILT else token for token in drafts] for row, drafts in found.items()}


@pytest.fixture(scope="module", autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "hf"
    if request.param == "qwen3_5":
        return make_qwen(path, seed=3, pattern="GG*G", value_dim=32)
    return make_nemotron_h(path, seed=3, pattern="M-M*-M", n_groups=2, head_dim=64, d_state=64)


def make_llm(folder: Path, *, graphs: CudaGraphConfig | None, **options: Any) -> LLM:
    return LLM(folder, device="cuda", max_batch_size=12, max_num_tokens=16, cuda_graph_config=graphs, **options)


def executor_of(llm: LLM) -> TorchExecutor:
    assert isinstance(llm._executor, TorchExecutor)
    return llm._executor


def generate(llm: LLM, temperature: float) -> list[list[int]]:
    """Run requests that end at different times: the batch grows and shrinks, with prompts between decode steps."""
    params = [
        SamplingParams(max_tokens=6 + 11 * (i % 6), temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("temperature", "speculative"),
    [(0.0, None), (0.8, None), (0.8, NGramDecodingConfig(max_draft_len=3))],
    ids=["greedy", "sampled", "ngram"],
)
def test_graphs_give_the_tokens_of_eager_steps(
    folder: Path, temperature: float, speculative: NGramDecodingConfig | None
) -> None:
    options: dict[str, Any] = {"speculative_config": speculative, "replay": ReplayConfig(history=5)}
    eager = generate(make_llm(folder, graphs=None, **options), temperature)
    llm = make_llm(folder, graphs=CudaGraphConfig(), **options)
    for _ in range(2):  # with captures, and with replays alone
        assert generate(llm, temperature) == eager
    graphs = executor_of(llm)._graphs
    assert graphs is not None and len({key.num_rows for key in graphs.keys}) > 3


def test_conventional_steps_are_captured_too(folder: Path) -> None:
    options: dict[str, Any] = {
        "speculative_config": NGramDecodingConfig(max_draft_len=2),
        "replay": ReplayConfig(enabled=False),
    }
    llm = make_llm(folder, graphs=CudaGraphConfig(batch_sizes=(4, 12)), **options)
    assert generate(llm, 0.0) == generate(make_llm(folder, graphs=None, **options), 0.0)
    graphs = executor_of(llm)._graphs
    assert graphs is not None and len(graphs.keys) >= 2


def test_warming_up_leaves_nothing_to_capture_and_no_trace(folder: Path) -> None:
    speculative = NGramDecodingConfig(max_draft_len=1)
    eager = generate(make_llm(folder, graphs=None, speculative_config=speculative), 0.0)
    llm = make_llm(folder, graphs=CudaGraphConfig(batch_sizes=(3, 12), warm_up=True), speculative_config=speculative)
    graphs = executor_of(llm)._graphs
    assert graphs is not None
    keys = graphs.keys
    assert {(key.num_rows, key.window) for key in keys} == {(rows, window) for rows in (3, 12) for window in (1, 2)}
    assert generate(llm, 0.0) == eager and graphs.keys == keys


def test_sizes_that_are_not_captured_run_eagerly(folder: Path) -> None:
    llm = make_llm(folder, graphs=CudaGraphConfig(batch_sizes=(2, 4), enable_padding=False))
    assert generate(llm, 0.0) == generate(make_llm(folder, graphs=None), 0.0)
    graphs = executor_of(llm)._graphs
    assert graphs is not None and {key.num_rows for key in graphs.keys} <= {2, 4}


def test_logits_hold_until_the_next_step_whatever_is_allocated_in_between(folder: Path) -> None:
    """Graphs share their memory: what one left there must not show in another, nor other tensors in either."""
    llms = [make_llm(folder, graphs=graphs) for graphs in (CudaGraphConfig(), None)]  # kept: an LLM closes at its end
    captured, eager = map(executor_of, llms)
    worst = 0.0
    for num_rows in (12, 1, 5, 12, 3, 1, 8):
        for past in (0, 3):
            found = [step(executor, num_rows, past) for executor in (captured, eager)]
            torch.full((64, 2**18), float("nan"), device="cuda")
            worst = max(worst, (found[0].logits - found[1].logits).abs().max().item())
    assert worst < LOGITS_FP32
    for ours, theirs in zip(captured._states, eager._states, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-4)


def test_one_graph_for_all_key_lengths_reads_the_rows_own_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_multiprocessors", lambda device: 2)  # of which any rows have more key heads
    options: dict[str, Any] = {"dtype": "bfloat16", "max_seq_len": 1300}
    llms = [make_llm(folder, graphs=graphs, **options) for graphs in (CudaGraphConfig(), None)]
    executors = [executor_of(llm) for llm in llms]
    torch.manual_seed(0)
    states = [torch.randn_like(state) for state in executors[0]._states]
    for past in (3, 600, 1200):
        for executor in executors:
            for state, value in zip(executor._states, states, strict=True):
                state.copy_(value)
        captured, eager = (step(executor, 3, past, checkpoint=past).logits for executor in executors)
        assert (captured - eager).abs().max() < 0.02 * eager.abs().max(), past
    graphs = executors[0]._graphs
    assert graphs is not None and len(graphs.keys) == 1


def step(executor: TorchExecutor, num_rows: int, past: int, checkpoint: int = 0) -> StepOutputs:
    """Run one decode step of slots 0, 1, ... on positions ``past``; they start again with each 0."""

    def column(value: int) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.int32, device="cuda")

    if past == 0:
        for state in executor._states:
            state.zero_()
    inputs = StepInputs(
        input_ids=torch.arange(num_rows, dtype=torch.int32, device="cuda")[:, None] + 40,
        past_lengths=column(past),
        checkpoint_lengths=column(checkpoint),
        num_tokens=column(1),
        slot_ids=torch.arange(num_rows, dtype=torch.int32, device="cuda"),
        logits_indices=column(0)[:, None],
        first_slot=0,
        max_past_length=past,
    )
    return executor.step(inputs)


@pytest.mark.parametrize("graphs", [CudaGraphConfig(), None], ids=["graphs", "eager"])
def test_a_decode_step_waits_for_the_device_once_for_its_tokens(folder: Path, graphs: CudaGraphConfig | None) -> None:
    llm = make_llm(folder, graphs=graphs)
    executor = executor_of(llm)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    llm.generate([[5, 6, 7]], params)  # captures
    waits: list[int] = []
    run = executor.step

    def counted(inputs: StepInputs) -> StepOutputs:
        # From the end of a step's preparation to that of the next one's.
        waits.append(len(found))
        return run(inputs)

    executor.step = counted  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            llm.generate([[5, 6, 7]], params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    per_step = [after - before for before, after in pairwise(waits)]
    assert len(per_step) == 19 and set(per_step) == {1}


@pytest.mark.parametrize("make", [make_nemotron_h, make_qwen], ids=["nemotron_h", "qwen3_5"])
@pytest.mark.parametrize("graphs", [CudaGraphConfig(), None], ids=["graphs", "eager"])
def test_a_rejected_draft_that_is_not_finite_changes_no_token_in_16_bits(
    tmp_path: Path, make: Any, graphs: CudaGraphConfig | None
) -> None:
    folder = make(tmp_path / "hf", **({"value_dim": 32} if make is make_qwen else {"d_state": 64}))
    spoil(folder, torch.inf)
    rules = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    tokens = []
    for drafter in (FiniteDrafter(), SpoiltDrafter()):
        llm = make_llm(folder, graphs=graphs, dtype="bfloat16", drafter=drafter)
        tokens.append([output.outputs[0].token_ids for output in llm.generate([[17], [5, 9, 250]], rules)])
    assert tokens[0] == tokens[1]
