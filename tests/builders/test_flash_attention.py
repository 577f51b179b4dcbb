"""Flash attention's view of the caches, with a stand-in for the kernel; the kernel itself on a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.tiny_geometry import tiny_geometry
from tests.end_to_end.test_spoilt_drafts import SPOILT, SpoiltDrafter, spoil, tokens_of
from tests.runtime.test_step_graphs import call_again
from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm import LLM, CudaGraphConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.builders.layers import flash_attention as flash
from trtllm_replayssm.builders.models import hybrid
from trtllm_replayssm.contract.geometry import AttentionGeometry
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.executors.step_graphs import StepGraphs


def kernel_stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_queries: torch.Tensor,
    first_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as the kernel does: a sequence at a time, masked values weighed by zero instead of left out."""
    assert not debug and dropout == 0.0
    group = query.shape[1] // key.shape[1]
    out, log_sums = torch.zeros_like(query), torch.full((query.shape[1], query.shape[0]), torch.inf)
    for row, (first, end) in enumerate(zip(first_queries[:-1].tolist(), first_queries[1:].tolist(), strict=True)):
        count, start = int(seqused_k[row]), int(first_keys[row])
        assert end - first == max_queries
        if count == 0:  # the kernel's results are these, which mean nothing
            continue
        keys = key[start : start + count].repeat_interleave(group, 1)
        values = value[start : start + count].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * scale
        if is_causal:
            is_hidden = torch.arange(count) > torch.arange(count - max_queries, count)[:, None]
            scores = scores.masked_fill(is_hidden, -torch.inf)
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        log_sums[:, first:end] = scores.logsumexp(-1)
    return out, log_sums


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the modules take the flash path on the CPU; returns what notes every call's longest key length."""
    calls: list[int] = []

    def kernel(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments[6])
        return kernel_stand_in(*arguments, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    monkeypatch.setattr(hybrid, "is_flash", lambda geometry, dtype, device: True)
    # As on CUDA, where the executor sees to it: no value cache begins with what is not finite.
    allocate = pools.allocate

    def zeros(*arguments: Any) -> tuple[torch.Tensor, ...]:
        states = allocate(*arguments)
        for state in states:
            state.zero_()
        return states

    monkeypatch.setattr(pools, "allocate", zeros)
    return calls


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def expected_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: Sequence[int], scale: float
) -> torch.Tensor:
    """Attend in fp64, token by token."""
    num_rows, seq_len, n_heads, width = query.shape
    group = n_heads // keys.shape[1]
    out = torch.empty(num_rows, seq_len, n_heads, width, dtype=torch.float64)
    for row in range(num_rows):
        for s in range(seq_len):
            seen = past[row] + s + 1
            key = keys[row, :, :seen].double().repeat_interleave(group, 0)
            value = values[row, :, :seen].double().repeat_interleave(group, 0)
            weights = (torch.einsum("hd,hkd->hk", query[row, s].double(), key) * scale).softmax(-1)
            out[row, s] = torch.einsum("hk,hkd->hd", weights, value)
    return out


PAST, SLOTS = [0, 9, 3, 21], [4, 1, 5, 2]


def check(device: str, dtype: torch.dtype, width: int, seq_len: int, n_kv_heads: int, tolerance: float) -> None:
    capacity, n_heads = 30, 4
    keys, values = (random(6, n_kv_heads, capacity, width, device=device, dtype=dtype) for _ in range(2))
    query = random(4, seq_len, n_heads, width, device=device, dtype=dtype)
    past = torch.tensor(PAST, dtype=torch.int32, device=device)
    for slot, count in zip(SLOTS, PAST, strict=True):
        keys[slot, :, count + seq_len :] = torch.nan  # of a slot's last owner: finite values, whatever keys
    slot_ids = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    step = flash.flash_step(past, slot_ids, seq_len, keys, max(PAST) + seq_len, n_heads // n_kv_heads)
    expected = expected_attention(query.cpu(), keys[SLOTS].cpu(), values[SLOTS].cpu(), PAST, width**-0.5)
    own_keys, own_values = (cache[step.rows, :, step.positions].contiguous() for cache in (keys, values))
    out = flash.attend(query, own_keys, own_values, (keys, values), step, width**-0.5)
    assert out.shape == query.shape and (out.cpu().double() - expected).abs().max() < tolerance


@pytest.fixture(params=["few rows", "many rows"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts of a window: few rows for the GPU, their queries as heads; many, their heads as queries."""
    count = 10**6 if request.param == "few rows" else 0
    monkeypatch.setattr(flash, "_multiprocessors", lambda device: count)


@pytest.mark.usefixtures("on_cpu", "rows")
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [1, 4, 9])
def test_caches_are_read_where_they_are(seq_len: int, n_kv_heads: int) -> None:
    check("cpu", torch.float32, 16, seq_len, n_kv_heads, 1e-5)


@pytest.mark.usefixtures("rows")
def test_log_sums_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, then heads, they are as many: read as heads by queries they would be others' numbers."""

    def kernel(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sums = kernel_stand_in(*arguments, **options)
        return out, log_sums.T

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    with pytest.raises(AssertionError, match="heads by queries"):
        check("cpu", torch.float32, 16, 4, 2, 1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [1, 4, 9])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_the_kernel_reads_caches_where_they_are(width: int, seq_len: int, n_kv_heads: int, dtype: torch.dtype) -> None:
    check("cuda", dtype, width, seq_len, n_kv_heads, 2e-2)


def test_a_row_without_a_slot_sees_its_own_window_alone() -> None:
    past = torch.tensor([7, 900], dtype=torch.int32)
    slot_ids = torch.tensor([0, -1], dtype=torch.int32)
    step = flash.flash_step(past, slot_ids, 2, torch.empty(2, 3, 50, 8), 9, 4)
    assert step.num_queries == 8
    assert step.num_past.tolist() == [7, 0] and step.num_keys.tolist() == [9, 2] and step.longest == 9
    assert step.first_keys.tolist()[:2] == [0, 150] and step.first_queries.tolist() == [0, 8, 16]
    assert step.positions.tolist() == [[7, 8], [49, 49]] and step.rows.tolist() == [[0], [1]]


def test_a_row_has_the_cache_of_its_slot_and_writes_into_no_other() -> None:
    slot_ids, past = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, -1, 0], [2, 4, 1]))
    cache = torch.zeros(5, 2, 6, 4)
    step = flash.flash_step(past, slot_ids, 2, cache, 9, 1)
    assert step.first_keys.tolist()[:3] == [36, 12, 0] and step.rows.tolist() == [[3], [1], [0]]
    flash.write_window(cache, torch.ones(3, 2, 2, 4), step)
    written = cache[:, :, :, 0].nonzero()
    assert {(slot, position) for slot, _, position in written.tolist()} == {(3, 2), (3, 3), (1, 5), (0, 1), (0, 2)}


def test_keys_are_shared_out_where_rows_leave_multiprocessors_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_multiprocessors", lambda device: 132)

    def num_queries(num_rows: int, seq_len: int, key_length: int) -> int:
        lengths, cache = torch.zeros(num_rows, dtype=torch.int32), torch.empty(num_rows, 8, 0, 16)
        return flash.flash_step(lengths, lengths, seq_len, cache, key_length, 5).num_queries

    assert num_queries(16, 4, 4096) == 1 and num_queries(17, 4, 4096) == 4 * 5
    assert num_queries(8, 4, 4095) == 1 and num_queries(9, 4, 4095) == 4 * 5
    assert num_queries(1, 1, 99) == 1 and num_queries(1, 9, 99) == 9 and num_queries(99, 9, 4096) == 9  # no windows


@pytest.mark.parametrize("past_of_padding", [0, 3, 900])
def test_padding_writes_over_no_token_that_is_kept(past_of_padding: int) -> None:
    """Its cache may belong to a sequence that does not run in this step, and that has any length."""
    cache = torch.zeros(2, 1, 10, 4)
    past = torch.tensor([past_of_padding, 8], dtype=torch.int32)
    slot_ids = torch.tensor([-1, 1], dtype=torch.int32)
    flash.write_window(cache, torch.ones(2, 3, 1, 4), flash.flash_step(past, slot_ids, 3, cache, 10, 1))
    # One draft too many at the end of the caches goes to the last place, too.
    assert cache[:, 0, :, 0].tolist() == [[0.0] * 9 + [1.0], [0.0] * 8 + [1.0] * 2]


def test_the_kernel_runs_16_bit_types_on_cuda_alone() -> None:
    a = tiny_geometry("*-").attention
    assert a is not None
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert flash.is_flash(a, torch.bfloat16, cuda) and not flash.is_flash(a, torch.bfloat16, cpu)
    assert not flash.is_flash(a, torch.float32, cuda)
    for head_dim in (20, 264):
        other = AttentionGeometry(n_query_heads=2, n_kv_heads=1, head_dim=head_dim)
        assert not flash.is_flash(other, torch.bfloat16, cuda)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_spoils_those_who_see_it_and_no_cache(where: str, value: float) -> None:
    key, values = random(1, 2, 3, 8), random(1, 2, 3, 8)
    (key if where == "key" else values)[0, 1, 2, 5] = value
    kept_key, kept_value = flash.finite_values(key, values)
    assert kept_value.isfinite().all() and kept_key[0, 1, 2].isnan().all()
    assert torch.equal(kept_key[0, 0], key[0, 0]) and torch.equal(kept_value[0, 1, :2], values[0, 1, :2])


@pytest.mark.parametrize("speculative", [None, NGramDecodingConfig(max_draft_len=3)], ids=["plain", "ngram"])
@pytest.mark.parametrize("make", [make_nemotron_h, make_qwen], ids=["nemotron_h", "qwen3_5"])
def test_models_generate_the_same_by_either_attention(
    tmp_path: Path, make: Any, speculative: NGramDecodingConfig | None, request: pytest.FixtureRequest
) -> None:
    folder = make(tmp_path / "hf", seed=5)
    prompts = [[7], [31, 32, 33] * 5, list(range(40, 60)), [5, 6] * 10, [9]]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    def tokens(*, is_padded: bool = False) -> list[list[int]]:
        # Sequences end at the caches' end, windows beyond it.
        llm = LLM(
            folder,
            device="cpu",
            max_batch_size=2,
            max_num_tokens=9,
            max_seq_len=44,
            speculative_config=speculative,
        )
        if is_padded:
            executor: Any = llm._executor
            sizes, vocab_size = executor._sizes(CudaGraphConfig(batch_sizes=(2,))), executor.geometry.vocab_size
            executor._graphs = StepGraphs(executor._run, sizes, vocab_size, torch.device("cpu"), call_again)
        for spec, state in zip(llm._executor._specs, llm._executor._states, strict=True):  # type: ignore[attr-defined]
            state.fill_(3e4 if spec.name.startswith("value_cache") else torch.nan)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    plain = tokens()
    calls: list[int] = request.getfixturevalue("on_cpu")
    assert tokens() == plain
    assert calls and max(calls) < 48
    assert tokens(is_padded=True) == plain


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("pattern", ["**-", "*M*", "*G*"])
def test_a_draft_that_is_not_finite_spoils_no_other_token(tmp_path: Path, pattern: str, value: float) -> None:
    folder = (make_qwen if "G" in pattern else make_nemotron_h)(tmp_path / "hf", pattern=pattern)
    spoil(folder, value)
    rules = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    plain = tokens_of(folder, rules)
    assert tokens_of(folder, rules, drafter=SpoiltDrafter()) == plain
    # Nor does a prompt that is not finite pass, in whatever piece of it the token is.
    for prompt in ([SPOILT, 6], [5, SPOILT, 6], [SPOILT, *range(3, 30)]):
        with LLM(folder, device="cpu", max_num_tokens=9) as llm, pytest.raises(RequestError, match="not finite"):
            llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0))
