"""Steps whose x, B and C are raw, before the convolution: drawn, and run by the convolution and the step in turn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests import tolerances
from tests.cases import Mamba2Case
from tests.ops.driver import POISON, bits, int32, relative_error
from tests.ops.mamba2_driver import make_pools, make_weights
from trtllm_replayssm import ops
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.plugins.layouts import split_projection

TAPS = 4
POOLS = ("conv_ring", "ssm_state", "x_ring", "B_ring", "dt_ring")
_CONV_ALONE = ("xBC", "conv_weight", "conv_bias", "conv_ring")


def random_step(case: Mamba2Case, num_slots: int, num_paddings: int, seed: int, *, has_bias: bool = True) -> Any:
    """Draw the arguments of ``ops.mamba2_with_conv``, by name, on the CPU.

    Slots stand in all phases of the cursors, windows have any length, padding rows are among them; whatever is dead,
    in pools and inputs, is not finite.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    T, num_rows = case.window, num_slots + num_paddings
    conv_dim = case.n_heads * case.head_dim + 2 * case.n_groups * case.d_state
    # From the start, where there is no history, to the largest positions.
    starts = rng.choice([0, 0, 1, 2, 3, 50, 2**31 - 1000], num_slots)
    pending = (case.history - 5 * np.arange(num_slots)) % (case.history + 1)
    past = starts + pending
    flushes = [protocol.needs_flush(p, 0, history=case.history, max_draft_len=T - 1) for p in pending.tolist()]
    assert set(flushes) == {False, True}

    pools = make_pools(case, num_slots, "cpu")
    ring_rows = protocol.min_conv_ring_rows(TAPS, case.max_draft_len) + case.spare_ring_rows
    pools["conv_ring"] = torch.full((num_slots, ring_rows, conv_dim), torch.nan, dtype=case.activation_dtype)
    for name, pool in pools.items():
        for slot in range(num_slots):
            fresh = torch.randn(pool.shape[1:], generator=generator)
            fresh = fresh.abs() if name == "dt_ring" else fresh
            if name == "ssm_state":
                pool[slot] = fresh if starts[slot] > 0 else torch.nan
                continue
            first = max(past[slot] - (TAPS - 1), 0) if name == "conv_ring" else starts[slot]
            live = {int(t) % pool.shape[1] for t in range(first, past[slot])}
            for row in range(pool.shape[1]):
                pool[slot, row] = fresh[row] if row in live else POISON[row % len(POISON)]

    slots = [int(i) if i < num_slots else -1 for i in rng.permutation(num_rows)]
    num_tokens = [int(rng.integers(0, T + 1)) if rng.random() < 0.5 else T for _ in slots]
    # A projection of which xBC is a part; 8 channels before and after.
    packed = torch.randn(num_rows, T, conv_dim + 16, generator=generator).to(case.activation_dtype)
    dt = torch.randn(num_rows, T, case.n_heads, generator=generator).to(case.dt_dtype)
    for row, n in enumerate(num_tokens):
        used = n if slots[row] >= 0 else 0
        packed[row, used:] = torch.nan
        dt[row, used:] = torch.nan
    weight = torch.randn(conv_dim, TAPS, generator=generator).to(case.activation_dtype)
    bias = torch.randn(conv_dim, generator=generator).to(case.activation_dtype)
    return {
        "xBC": packed[..., 8:-8],
        "dt": dt,
        "conv_weight": weight,
        "conv_bias": bias if has_bias else None,
        **make_weights(case, seed),
        **pools,
        "past_lengths": int32([past[s] if s >= 0 else -7 for s in slots]),
        "checkpoint_lengths": int32([starts[s] if s >= 0 else 99 for s in slots]),
        "num_tokens": int32(num_tokens),
        "slot_ids": int32(slots),
        "history": case.history,
        "max_draft_len": case.max_draft_len,
    }


def with_own_pools(step: Any) -> Any:
    """Return the same step on copies of its pools."""
    return {**step, **{name: step[name].clone() for name in POOLS}}


def run_in_turn(step: Any, convolve: Callable[..., Tensor], recur: Callable[..., Tensor]) -> Tensor:
    """Run the convolution and, on views of what it made, the recurrence."""
    lengths = {name: step[name] for name in ("past_lengths", "num_tokens", "slot_ids")}
    convolved = convolve(
        x=step["xBC"],
        weight=step["conv_weight"],
        bias=step["conv_bias"],
        conv_ring=step["conv_ring"],
        activation="silu",
        **lengths,
    )
    (n_heads, head_dim), (n_groups, d_state) = step["x_ring"].shape[2:], step["B_ring"].shape[2:]
    x, B, C = split_projection(convolved, n_heads=n_heads, head_dim=head_dim, n_groups=n_groups, d_state=d_state)
    rest = {name: value for name, value in step.items() if name not in _CONV_ALONE}
    return recur(x=x, B=B, C=C, **rest)


def assert_same_bits(found: Any, y: Tensor, expected: Any, expected_y: Tensor) -> None:
    """Hold outputs and all pools of two runs of one step to each other."""
    assert y.isfinite().all()
    assert torch.equal(bits(y), bits(expected_y))
    for name in POOLS:
        assert torch.equal(bits(found[name]), bits(expected[name])), name


def live_with_conv(case: Mamba2Case, device: str, run: Callable[..., Tensor]) -> None:
    """Two slots from their first token past flushes of each, with rejections, beside the op on the CPU.

    Args:
        case: constants.
        device: of the tensors that ``run`` gets; their pools are memory as it was allocated.
        run: ``ops.mamba2_with_conv``, or what stands for it.
    """
    T, generator = case.window, torch.Generator().manual_seed(3)
    constants: dict[str, Any] = {"history": case.history, "max_draft_len": case.max_draft_len}
    conv_dim = case.n_heads * case.head_dim + 2 * case.n_groups * case.d_state
    ring = torch.full((2, protocol.min_conv_ring_rows(TAPS, case.max_draft_len), conv_dim), torch.nan)
    dead: dict[str, Any] = make_pools(case, 2, "cpu") | {"conv_ring": ring.to(case.activation_dtype)}
    fresh = {name: torch.empty_like(pool, device=device) for name, pool in dead.items()}
    weights: dict[str, Any] = make_weights(case, 3)
    taps = torch.randn(conv_dim, TAPS + 1, generator=generator).to(case.activation_dtype)
    weights |= {"conv_weight": taps[:, 1:].contiguous(), "conv_bias": taps[:, 0].contiguous()}
    slots, past, checkpoint, flushes = [1, -1, 0], [0, 0], [0, 0], 0
    for step in range(2 * case.history + 3):
        num_tokens = [T, T, 1 + step % T]
        inputs: dict[str, Any] = {
            "xBC": torch.randn(3, T, conv_dim, generator=generator).to(case.activation_dtype),
            "dt": torch.randn(3, T, case.n_heads, generator=generator).to(case.dt_dtype),
            "past_lengths": int32([past[slot] for slot in slots]),
            "checkpoint_lengths": int32([checkpoint[slot] for slot in slots]),
            "num_tokens": int32(num_tokens),
            "slot_ids": int32(slots),
        }
        expected = ops.mamba2_with_conv(**inputs, **weights, **dead, **constants)
        on_device = {name: tensor.to(device) for name, tensor in (inputs | weights).items()}
        y = run(**on_device, **fresh, **constants)
        # Convolved x, B and C are rounded in between, where sums of another order may fall the other way.
        assert relative_error(y, expected.double().numpy()) <= 3 * tolerances.HALF_ULP[case.activation]
        for slot, n in zip(slots, num_tokens, strict=True):
            if slot >= 0:
                flushes += protocol.needs_flush(past[slot], checkpoint[slot], **constants)
                kept = n - step % n
                past[slot], checkpoint[slot] = protocol.advance(past[slot], checkpoint[slot], kept, **constants)
    assert flushes >= 4
