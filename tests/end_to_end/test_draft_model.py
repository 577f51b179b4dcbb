"""Drafts of a second model: the tokens stay, and its states are those of a model that never saw a rejected draft."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import DEFAULTS, Checkpoint, Checkpoints
from tests.end_to_end.test_parity import PIECE, PROMPTS, make_llm, tokens_of
from tests.tiny_models import make_nemotron_h, write_byte_tokenizer
from trtllm_replayssm import LLM, DraftTargetDecodingConfig, SamplingParams
from trtllm_replayssm.contract.geometry import LayerType
from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.speculative.draft_model import DraftModelDrafter

LENGTH = 90


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=DEFAULTS)
def checkpoint(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> Checkpoint:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def attention_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nemotron_h(tmp_path_factory.mktemp("draft") / "attention", pattern="*-", seed=11)


def speculating(folder: Path, draft: Path, max_draft_len: int = 4, **options: Any) -> LLM:
    config = DraftTargetDecodingConfig(speculative_model=draft, max_draft_len=max_draft_len, adaptive=False)
    llm = make_llm(folder, speculative_config=config, **options)
    for state in executor_of(llm)._states:
        state.fill_(float("nan"))
    return llm


def drafter_of(llm: LLM) -> DraftModelDrafter:
    assert isinstance(llm._drafter, DraftModelDrafter)
    return llm._drafter


def executor_of(llm: LLM) -> TorchExecutor:
    executor = drafter_of(llm)._executor
    assert isinstance(executor, TorchExecutor)
    return executor


@pytest.mark.parametrize("max_draft_len", [1, 4])
@pytest.mark.parametrize("draft", ["mamba_attention_mlp", "qwen3_5", "attention_alone"])
def test_greedy_tokens_are_those_of_plain_decoding(
    checkpoint: Checkpoint, checkpoints: Checkpoints, attention_alone: Path, draft: str, max_draft_len: int
) -> None:
    folder = attention_alone if draft == "attention_alone" else checkpoints[draft].folder
    llm = speculating(checkpoint.folder, folder, max_draft_len, max_batch_size=3)
    assert tokens_of(llm, PROMPTS, LENGTH) == tokens_of(make_llm(checkpoint.folder), PROMPTS, LENGTH)
    metrics = llm.metrics()
    assert metrics["num_draft_tokens"] > 0
    if folder == checkpoint.folder:
        assert metrics["acceptance_rate"] == 1.0


def test_long_prompts_are_read_a_piece_a_step(checkpoint: Checkpoint) -> None:
    llm = speculating(checkpoint.folder, checkpoint.folder)
    drafter = drafter_of(llm)
    drafter._max_num_tokens = PIECE
    longest = []
    step = drafter._executor.step

    def watched(inputs: Any) -> Any:
        longest.append(inputs.input_ids.shape[1])
        return step(inputs)

    drafter._executor.step = watched  # type: ignore[method-assign]
    prompts = [list(range(3, 83)), list(range(90, 150))]
    assert tokens_of(llm, prompts, 40) == tokens_of(make_llm(checkpoint.folder), prompts, 40)
    assert max(longest) == PIECE
    assert llm.metrics()["acceptance_rate"] == 1.0


def test_sampled_tokens_are_those_of_plain_decoding(checkpoint: Checkpoint) -> None:
    rules = [SamplingParams(max_tokens=50, temperature=0.6, top_k=20, seed=seed) for seed in range(4)]
    expected = make_llm(checkpoint.folder).generate(PROMPTS, rules)
    found = speculating(checkpoint.folder, checkpoint.folder).generate(PROMPTS, rules)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("draft", DEFAULTS)
def test_states_are_those_of_a_fresh_run_over_the_accepted_tokens(
    checkpoint: Checkpoint, checkpoints: Checkpoints, draft: str
) -> None:
    """Rejected drafts leave no trace: checkpoint, pending rows and cache rows equal a run without any draft."""
    llm = speculating(checkpoint.folder, checkpoints[draft].folder, max_batch_size=1)
    drafter, prompt = drafter_of(llm), PROMPTS[2]
    known: list[int] = []
    end = drafter.end

    def keep(request_id: int) -> None:
        sequence = drafter._sequences[request_id]
        drafter._settle(sequence)
        known.extend(sequence.tokens)
        end(request_id)

    drafter.end = keep  # type: ignore[method-assign]
    tokens_of(llm, [prompt], LENGTH)
    c, f = int(drafter._slots.past_lengths[0]), int(drafter._slots.checkpoint_lengths[0])
    assert len(prompt) < f <= c <= len(known)
    executor = executor_of(llm)
    for piece in (f, c):
        # Run as a prompt, which folds all tokens.
        with make_llm(checkpoints[draft].folder, max_batch_size=1) as fresh:
            fresh.generate([known[:piece]], SamplingParams(max_tokens=1, temperature=0.0))
            assert isinstance(fresh._executor, TorchExecutor)
            compare(executor, fresh._executor, piece, is_folded=piece == f)


def compare(found: TorchExecutor, fresh: TorchExecutor, length: int, *, is_folded: bool) -> None:
    num_compared = 0
    for spec, mine, theirs in zip(found._specs, found._states, fresh._states, strict=True):
        kind = spec.name.rpartition("_")[0]
        if kind == "ssm_state" and is_folded:
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
            num_compared += 1
        if spec.is_cache:
            torch.testing.assert_close(mine[0, :, :length], theirs[0, :, :length], rtol=1e-4, atol=1e-4)
            num_compared += 1
        if kind == "conv_ring" and not is_folded:
            rows = conv_rows(spec, length)
            torch.testing.assert_close(mine[0, rows[0]], theirs[0, rows[1]], rtol=1e-4, atol=1e-4)
    kinds = [LayerType.ATTENTION, *([LayerType.MAMBA2, LayerType.GATED_DELTA_NET] if is_folded else [])]
    assert num_compared == sum(
        (2 if kind is LayerType.ATTENTION else 1) * len(found.geometry.layers_of(kind)) for kind in kinds
    )


def conv_rows(spec: TensorSpec, length: int) -> tuple[list[int], list[int]]:
    """Give the places of a token's history before ``length`` in a ring for drafts, and in one for none."""
    count = int(spec.shape[1])
    without = count - 4  # the draft model's windows hold 4 drafts more
    positions = range(length - (without - 1), length)
    return [p % count for p in positions], [p % without for p in positions]


def test_another_vocabulary_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = make_nemotron_h(tmp_path / "other", vocab=321)
    with pytest.raises(ConfigError, match=r"speculative_model: .* found a vocabulary of 321 tokens; needed .* of 320"):
        speculating(checkpoint.folder, other)


def test_another_tokenizer_is_refused(checkpoint: Checkpoint, attention_alone: Path, tmp_path: Path) -> None:
    other = make_nemotron_h(tmp_path / "other", pattern="*-")
    write_byte_tokenizer(other, 320)
    speculating(checkpoint.folder, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a": ', '"ab": '))
    with pytest.raises(ConfigError, match="other ids for 2 tokens"):
        speculating(checkpoint.folder, other)


def test_errors_of_the_draft_model_name_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"speculative_model: .*nowhere: found nothing there"):
        speculating(checkpoint.folder, tmp_path / "nowhere")


def test_closing_the_llm_closes_the_draft_model(checkpoint: Checkpoint) -> None:
    llm = speculating(checkpoint.folder, checkpoint.folder)
    executor = executor_of(llm)
    llm.close()
    assert not executor._states
