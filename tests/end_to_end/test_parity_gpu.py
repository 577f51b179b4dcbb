"""The torch executor on CUDA against the CPU, and speculation there: the kernels inside a whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.reference import LogitRecorder, Reference
from tests.end_to_end.test_parity import LONG, PIECE, PROMPTS, tokens_of
from tests.runtime.helpers import ScriptedDrafter
from tests.tiny_models import make_nemotron_h, make_qwen
from tests.tolerances import LOGITS_FP32
from trtllm_replayssm import LLM, NGramDecodingConfig, ReplayConfig
from trtllm_replayssm.errors import UnsupportedError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    # State sizes that the kernels support.
    if request.param == "qwen3_5":
        return make_qwen(tmp_path_factory.mktemp("gpu") / "hf", seed=3, pattern="GG*G", value_dim=32)
    return make_nemotron_h(
        tmp_path_factory.mktemp("gpu") / "hf", seed=3, pattern="M-M*-M", n_groups=2, head_dim=64, d_state=64
    )


@pytest.fixture(scope="module", autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make_llm(folder: Path, device: str, **options: Any) -> LLM:
    llm = LLM(folder, device=device, max_num_tokens=PIECE, **options)
    executor: Any = llm._executor
    for spec, state in zip(executor._specs, executor._states, strict=True):
        # Flash attention weighs values that it does not see by zero: they are finite always.
        is_weighed = state.is_cuda and state.dtype != torch.float32 and spec.name.startswith("value_cache")
        state.fill_(3e4 if is_weighed else float("nan"))
    return llm


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> list[list[int]]:
    return tokens_of(make_llm(folder, "cpu"), PROMPTS, LONG)


@pytest.mark.parametrize("max_draft_len", [0, 4])
def test_fp32_tokens_on_cuda_equal_the_cpus(folder: Path, on_cpu: list[list[int]], max_draft_len: int) -> None:
    speculative = NGramDecodingConfig(max_draft_len=max_draft_len, adaptive=False) if max_draft_len else None
    assert tokens_of(make_llm(folder, "cuda", speculative_config=speculative), PROMPTS, LONG) == on_cpu


@pytest.mark.parametrize("wrong_from", [0, 2, None], ids=["all_rejected", "two_accepted", "all_accepted"])
def test_speculation_on_cuda_leaves_the_tokens_as_they_are(
    folder: Path, on_cpu: list[list[int]], wrong_from: int | None
) -> None:
    script = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, on_cpu, strict=True)}
    llm = make_llm(
        folder, "cuda", drafter=ScriptedDrafter(script, 4, wrong_from=wrong_from), replay=ReplayConfig(history=8)
    )
    assert tokens_of(llm, PROMPTS, LONG) == on_cpu


def test_fp32_logits_on_cuda_equal_transformers(folder: Path) -> None:
    prompt = PROMPTS[2]
    llm = make_llm(folder, "cuda", replay=ReplayConfig(history=8))
    recorder = LogitRecorder(llm._executor)
    sequence = prompt + tokens_of(llm, [prompt], 60)[0]
    expected = Reference(folder).logits(sequence)
    decoded = range(len(prompt) - 1, len(sequence) - 1)
    worst = max((recorder.by_position[at].cpu() - expected[at]).abs().max().item() for at in decoded)
    assert worst < LOGITS_FP32


@pytest.mark.parametrize("enabled", [True, False], ids=["replay", "conventional"])
def test_bf16_logits_on_cuda_stay_as_near_to_fp32_as_on_the_cpu(folder: Path, enabled: bool) -> None:
    prompt = PROMPTS[2]
    exact = make_llm(folder, "cpu")
    expected = LogitRecorder(exact._executor)
    text = tokens_of(exact, [prompt], 30)[0]
    logits, agreed = {}, 29
    for device in ("cpu", "cuda"):
        llm = make_llm(folder, device, dtype="bfloat16", replay=ReplayConfig(history=4, enabled=enabled))
        logits[device] = LogitRecorder(llm._executor).by_position
        ours = tokens_of(llm, [prompt], 30)[0]
        # The logits answer the same text up to the first token that rounding has changed.
        agreed = min(agreed, next((i for i in range(30) if ours[i] != text[i]), 29))
    # Of both devices at the same positions: some lose more than others.
    positions = range(len(prompt) - 1, len(prompt) + agreed)
    errors = {
        device: torch.stack([(found[at].cpu() - expected.by_position[at]).norm() for at in positions]).mean().item()
        for device, found in logits.items()
    }
    assert errors["cuda"] < 2 * errors["cpu"]


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [(make_nemotron_h, {"pattern": "M", "d_state": 24}, "d_state=24"), (make_qwen, {"value_dim": 24}, "value_dim=24")],
)
def test_a_shape_without_kernels_is_refused_before_anything_is_loaded(
    tmp_path: Path, make: Callable[..., Path], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        LLM(make(tmp_path / "hf", **options), device="cuda")


def test_two_runs_on_cuda_are_bitwise_equal(folder: Path) -> None:
    runs = []
    for _ in range(2):
        llm = make_llm(folder, "cuda", dtype="bfloat16", speculative_config=NGramDecodingConfig(adaptive=False))
        recorder = LogitRecorder(llm._executor)
        tokens_of(llm, PROMPTS[2:], 60)
        runs.append(recorder.by_position)
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][at], runs[1][at]) for at in runs[0])
