"""Compiled chains of operations against the plain ones, and how often they are compiled."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from trtllm_replayssm.builders.layers import attention, flash_attention, fused, mlp, norm

EPS = 1e-5
Inputs = tuple[Any, ...]


def tokens(rows: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Return [rows, 1, ...] random numbers."""
    generator = torch.Generator().manual_seed(rows + sum(shape))
    return torch.randn((rows, 1, *shape), generator=generator).to(device, dtype)


def cases(rows: int, width: int = 64, **kind: Any) -> dict[str, tuple[Any, Inputs, dict[str, Any]]]:
    """Return name -> function and arguments, some of them parts of wider rows as projections give them."""
    head = width // 4
    weight, head_weight = tokens(1, width, **kind)[0, 0], tokens(1, head, **kind)[0, 0]
    gate = tokens(rows, 2 * width, **kind)[..., 5 : 5 + width]
    heads, head_gates = (torch.unflatten(x, -1, (-1, head)) for x in (tokens(rows, width, **kind), gate))
    packed = tokens(rows, 10 * head, **kind)[..., : 8 * head]
    cos, sin = tokens(rows, 4, **kind).cos(), tokens(rows, 4, **kind).sin()
    return {
        "normalise": (norm.normalise, (tokens(rows, width, **kind), weight, EPS), {}),
        "gate_and_normalise_groups": (
            norm.gate_and_normalise_groups,
            (tokens(rows, width, **kind), gate, weight, 4, EPS),
            {},
        ),
        "normalise_and_gate": (norm.normalise_and_gate, (heads, head_gates, head_weight, EPS), {}),
        "squared_relu": (mlp.squared_relu, (tokens(rows, width, **kind),), {}),
        "gated_silu": (mlp.gated_silu, (tokens(rows, width, **kind),), {}),
        "split_heads": (
            attention.split_heads,
            (packed, cos, sin, head_weight, head_weight, EPS),
            {"n_heads": (4, 2)},
        ),
        "split_heads_alone": (
            attention.split_heads,
            (packed, None, None, None, None, 0.0),
            {"n_heads": (4, 2)},
        ),
        "gate_output": (attention.gate_output, (tokens(rows, width, **kind), gate), {}),
    }


def as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", cases(2))
@torch.inference_mode()
def test_one_compilation_serves_every_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    fresh: Any = None
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for rows in (3, 2, 7, 40):
        function, arguments, options = cases(rows)[name]
        plain = function(*arguments, **options)
        fresh = fresh or fused.fused(function.__wrapped__)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "is_worthwhile", lambda first: True)
            found = fresh(*arguments, **options)
        for ours, theirs in zip(as_tuple(found), as_tuple(plain), strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases(2))
def test_compiled_kernels_round_as_plain_operations_do(name: str) -> None:
    for rows in (5, 64):
        function, arguments, options = cases(rows, width=2048, dtype=torch.bfloat16, device="cuda")[name]
        plain = as_tuple(function.__wrapped__(*arguments, **options))
        for ours, theirs in zip(as_tuple(function(*arguments, **options)), plain, strict=True):
            # Two roundings of what is near 1, for the two products of a rotation may cancel.
            torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=2**-6)


def windows(rows: int, seq_len: int, n_kv_heads: int = 2, group: int = 3, width: int = 64, **kind: Any) -> Inputs:
    """Return what ``add_window`` takes."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(n_kv_heads, group, width), (n_kv_heads, width), (n_kv_heads, width), (n_kv_heads, group, width)]
    drawn = [torch.randn((rows, seq_len, *shape), generator=generator).to(**kind) for shape in shapes]
    log_sums = torch.randn((n_kv_heads, rows, seq_len, group), generator=generator).permute(1, 2, 0, 3)
    num_past = torch.arange(rows, dtype=torch.int32) * 50
    return *drawn, log_sums.to(kind.get("device", "cpu")), num_past.to(kind.get("device", "cpu")), 0.125


@torch.inference_mode()
def test_the_sums_over_a_window_are_compiled_once_for_all_batches_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(fused, "is_worthwhile", lambda first: True)
    plain: Any = flash_attention.add_window
    fresh = fused.fused_windows(plain.__wrapped__)
    for rows, seq_len in ((3, 4), (2, 3), (7, 2)):
        arguments = windows(rows, seq_len)
        torch.testing.assert_close(fresh(*arguments), plain.__wrapped__(*arguments))
    assert counter.frame_count == 1


@pytest.mark.gpu
@torch.inference_mode()
def test_a_compiled_sum_over_a_window_is_the_plain_one() -> None:
    plain: Any = flash_attention.add_window
    for rows, seq_len in ((5, 4), (64, 2)):
        arguments = windows(rows, seq_len, 8, 5, 128, dtype=torch.bfloat16, device="cuda")
        found = flash_attention.add_window(*arguments)
        torch.testing.assert_close(found, plain.__wrapped__(*arguments), rtol=1.6e-2, atol=2**-8)


def test_where_nothing_can_be_compiled_the_operations_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("found no C compiler")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(fused, "is_worthwhile", lambda first: True)
    monkeypatch.setattr(fused, "_is_failing", False)
    x = tokens(3, 8)
    for function in (fused.fused(torch.square), fused.fused(torch.sqrt)):
        torch.testing.assert_close(function(x), function.__wrapped__(x), equal_nan=True)  # type: ignore[attr-defined]
    assert caplog.text.count("torch does not compile here") == 1 and "no C compiler" in caplog.text


def test_the_cpu_and_narrow_models_compile_nothing() -> None:
    assert not fused.is_worthwhile(torch.empty(2, 1, 4096))
