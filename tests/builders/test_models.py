"""The modules against ``transformers``, and what their states may and may not hold."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.builders.tiny_geometry import is_cache, poisoned_states, random_model, tiny_geometry, tiny_qwen_geometry
from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.tensors import weight_specs

LIMITS = EngineLimits(max_batch_size=3, max_input_len=64, max_seq_len=96, max_num_tokens=64)
States = dict[str, torch.Tensor]


def run(
    model: torch.nn.Module, tokens: torch.Tensor, lengths: tuple[int, int], slot: int, states: States
) -> torch.Tensor:
    """Run all tokens [S] of one slot as one window; logits [S, V]."""
    past, checkpoint = lengths
    bound = tuple(value[slot : slot + 1] if is_cache(name) else value for name, value in states.items())
    logits: torch.Tensor = model(
        tokens[None].int(),
        torch.tensor([past], dtype=torch.int32),
        torch.tensor([checkpoint], dtype=torch.int32),
        torch.tensor([len(tokens)], dtype=torch.int32),
        torch.tensor([slot], dtype=torch.int32),
        torch.arange(len(tokens), dtype=torch.int32)[None],
        bound,
    )[0]
    return logits[0]


def run_through(
    model: torch.nn.Module, replay: ReplayGeometry, tokens: torch.Tensor, windows: list[int], slot: int, states: States
) -> torch.Tensor:
    """Run tokens in windows of the given lengths, nothing rejected; logits of all of them."""
    past = checkpoint = 0
    outputs = []
    for window in windows:
        outputs.append(run(model, tokens[past : past + window], (past, checkpoint), slot, states))
        if window > replay.window:
            past, checkpoint = protocol.advance_prefill(past, window)
        else:
            past, checkpoint = protocol.advance(
                past, checkpoint, window, history=replay.history, max_draft_len=replay.max_draft_len
            )
    assert past == len(tokens)
    return torch.cat(outputs)


FAMILIES = {"nemotron_h": tiny_geometry, "qwen": tiny_qwen_geometry}


@pytest.mark.parametrize(
    ("make", "options", "history"),
    [
        pytest.param(make_nemotron_h, {"pattern": "M-M*-M-", "n_groups": 1, "head_dim": 64}, 8, id="groups1-dim64"),
        pytest.param(
            make_nemotron_h, {"pattern": "*M-MM", "n_groups": 8, "head_dim": 80, "d_state": 32}, 1, id="groups8-dim80"
        ),
        pytest.param(make_nemotron_h, {"pattern": "MM-*", "tied": True, "use_conv_bias": False}, 32, id="tied-no-bias"),
        pytest.param(make_qwen, {"pattern": "GG*G"}, 8, id="qwen3_5"),
        pytest.param(
            make_qwen,
            {"family": "qwen3_next", "pattern": "*GG", "n_key_heads": 3, "n_value_heads": 6, "value_dim": 24},
            1,
            id="qwen3_next-wide-values",
        ),
        pytest.param(
            make_qwen,
            {"pattern": "G*", "tied": True, "n_kv_heads": 1, "partial_rotary_factor": 1.0, "d_conv": 3},
            32,
            id="qwen3_5-tied-all-channels-rotated",
        ),
    ],
)
def test_logits_equal_those_of_transformers_in_prompt_and_decode(
    tmp_path: Path, make: Callable[..., Path], options: dict[str, object], history: int
) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = make(tmp_path / "model", seed=5, **options)
    tokens = torch.randint(3, 320, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    opened = open_model_folder(folder)
    replay = ReplayGeometry(history=history)
    with torch.device("meta"):
        model = create_model(opened.geometry, replay)
    model.load_state_dict(opened.load_weights(), assign=True)
    states = poisoned_states(opened.geometry, replay, LIMITS)
    found = run_through(model, replay, tokens, [17] + [1] * 20 + [12, 1], 1, states)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("pattern", ["M-*M", "*-", "M", "G-*-", "G"])
def test_parameters_are_the_tensors_of_a_rank_checkpoint(pattern: str) -> None:
    make = tiny_qwen_geometry if "G" in pattern else tiny_geometry
    for tied in (False, True):
        geometry = make(pattern, tie_word_embeddings=tied, dtype="bfloat16")
        with torch.device("meta"):
            model = create_model(geometry, ReplayGeometry())
        found = {name: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in model.named_parameters()}
        assert found == {spec.name: (spec.dtype, spec.shape) for spec in weight_specs(geometry)}
        assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thread_runs_a_model_while_another_exports_one(family: str) -> None:
    geometry, replay = FAMILIES[family](), ReplayGeometry(history=8, max_draft_len=3)
    model = random_model(geometry, replay)
    tokens = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(2))

    def logits() -> torch.Tensor:
        return run_through(model, replay, tokens, [17, 2, 1], 0, poisoned_states(geometry, replay, LIMITS))

    alone = logits()
    with onnx_ops.exporting(), ThreadPoolExecutor(1) as another:
        torch.testing.assert_close(another.submit(logits).result(), alone, rtol=0, atol=0)
        assert onnx_ops.is_exporting()
    assert not onnx_ops.is_exporting()


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_any_length_give_the_logits_of_one_prompt(family: str) -> None:
    geometry, replay = FAMILIES[family](), ReplayGeometry(history=8, max_draft_len=3)
    model = random_model(geometry, replay)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(2))
    whole = run_through(model, replay, tokens, [40], 0, poisoned_states(geometry, replay, LIMITS))
    for windows in ([1] * 40, [4] * 10, [7, 1, 3, 2, 20, 4, 3], [39, 1]):
        found = run_through(model, replay, tokens, windows, 2, poisoned_states(geometry, replay, LIMITS))
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("pattern", ["*", "*M*", "M*-*", "G-*-", "*G*-"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("seq_len", [4, 20], ids=["window", "prompt"])
def test_a_token_that_is_not_finite_reaches_itself_and_no_token_before_it(
    pattern: str, value: float, seq_len: int
) -> None:
    make = tiny_qwen_geometry if "G" in pattern else tiny_geometry
    geometry, replay = make(pattern), ReplayGeometry(history=8, max_draft_len=3)
    model = random_model(geometry, replay)
    tokens = torch.arange(5, 5 + 3 + seq_len)
    spoilt = 3 + seq_len // 2
    embedding = model.get_parameter("embedding.weight").data
    results = []
    for row in (embedding[tokens[spoilt]].clone(), torch.tensor(value)):
        embedding[tokens[spoilt]] = row
        states = poisoned_states(geometry, replay, LIMITS)
        results.append(run_through(model, replay, tokens, [3, seq_len], 1, states))
    clean, found = results
    assert torch.equal(found[:spoilt], clean[:spoilt])
    assert not found[spoilt].isfinite().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_conventional_decode_gives_the_same_logits(family: str) -> None:
    geometry, replay = FAMILIES[family](), ReplayGeometry(history=8, max_draft_len=3)
    tokens = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(3))
    windows = [9, 4, 1, 1, 2, 3, 4, 1, 4, 1]
    found = {
        conventional: run_through(
            random_model(geometry, replay, conventional=conventional),
            replay,
            tokens,
            windows,
            1,
            poisoned_states(geometry, replay, LIMITS, conventional=conventional),
        )
        for conventional in (False, True)
    }
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=5e-5)


def step_of_three_rows(
    geometry: ModelGeometry, model: torch.nn.Module, states: States, slot_ids: list[int], num_tokens: list[int]
) -> torch.Tensor:
    logits: torch.Tensor = model(
        torch.arange(9, dtype=torch.int32).reshape(3, 3),
        torch.tensor([0, 5, 2], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.tensor(num_tokens, dtype=torch.int32),
        torch.tensor(slot_ids, dtype=torch.int32),
        torch.tensor([[2], [7], [-1]], dtype=torch.int32),
        tuple(states.values()),
    )[0]
    assert logits.shape == (3, 1, geometry.vocab_size)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows_and_invalid_tokens_write_no_byte(family: str) -> None:
    geometry, replay = FAMILIES[family](), ReplayGeometry(history=8, max_draft_len=3)
    model = random_model(geometry, replay)
    states = {name: torch.randn_like(value) for name, value in poisoned_states(geometry, replay, LIMITS).items()}
    before = {name: value.clone() for name, value in states.items()}
    step_of_three_rows(geometry, model, states, [-1, 1, -1], [3, 2, 0])
    for name, value in states.items():
        for row in (0, 2):
            assert torch.equal(value[row], before[name][row]), f"{name}: a padding row changed slot {row}"
        if is_cache(name):
            assert torch.equal(value[1, :, 7:], before[name][1, :, 7:]), f"{name}: wrote beyond c + n"
            assert torch.equal(value[1, :, :5], before[name][1, :, :5]), f"{name}: wrote before c"
            assert not torch.equal(value[1, :, 5:7], before[name][1, :, 5:7])


def test_logit_positions_outside_the_window_are_clamped() -> None:
    geometry, replay = tiny_geometry("M-"), ReplayGeometry(history=8, max_draft_len=3)
    model = random_model(geometry, replay)
    states = poisoned_states(geometry, replay, LIMITS)
    for value in states.values():
        value.zero_()
    assert torch.isfinite(step_of_three_rows(geometry, model, states, [0, 1, 2], [3, 3, 3])).all()


def test_a_key_length_hint_changes_nothing() -> None:
    geometry, replay = tiny_geometry(), ReplayGeometry()
    model = random_model(geometry, replay)
    tokens = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    zero, three = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    indices = torch.arange(3, dtype=torch.int32)[None]
    one = LIMITS.model_copy(update={"max_batch_size": 1})
    results = [
        model(tokens, zero, zero, three, zero, indices, tuple(poisoned_states(geometry, replay, one).values()), length)
        for length in (None, 3, 10, 10_000)
    ]
    for logits, _ in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_on_cuda_give_the_logits_of_the_cpu(family: str) -> None:
    geometry, replay = FAMILIES[family](), ReplayGeometry(history=8, max_draft_len=3)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(4))
    windows = [20, 4, 1, 3, 4, 4, 4]
    model = random_model(geometry, replay)
    expected = run_through(model, replay, tokens, windows, 1, poisoned_states(geometry, replay, LIMITS))
    with torch.device("cuda"):
        states = {name: value.cuda() for name, value in poisoned_states(geometry, replay, LIMITS).items()}
        found = run_on_cuda(model.cuda(), replay, tokens.cuda(), windows, states)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=2e-3)


def run_on_cuda(
    model: torch.nn.Module, replay: ReplayGeometry, tokens: torch.Tensor, windows: list[int], states: States
) -> torch.Tensor:
    """Inside ``with torch.device("cuda")``, where ``run``'s own tensors are made on the device."""
    return run_through(model, replay, tokens, windows, 1, states)
