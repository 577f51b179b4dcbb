"""Slots and rows more than 2^31 elements apart, run on the CPU: an offset in 32 bits would lead elsewhere.

The memory between them is only reserved: nothing touches it, so it is not there.
"""

import mmap
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.kernels.emulation import Emulator
from tests.kernels.raw_steps import assert_same_bits, random_step, with_own_pools
from tests.ops.driver import Row, bits, int32
from tests.ops.drivers import replayed
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.specializations import Kernel

STRIDE = 2**31 + 1024
_MAP_NORESERVE = 0x4000  # Linux's; mmap has the name from Python 3.13 on
MAMBA2 = Mamba2Case("P64-T2", 2, 64, 128, 1, 16, 1)
DELTA = GatedDeltaNetCase("gdn-K64-V64-T2", 1, 2, 64, 64, 16, 1)


class Kernels(NamedTuple):
    step: Kernel
    prefill: Kernel


KERNELS = (Kernels("step", "prefill"), Kernels("pipelined_step", "chunked_prefill"))


def far_apart(near: Tensor) -> Tensor:
    """Copy a tensor so that what its first dimension counts stands ``STRIDE`` elements apart."""
    num_bytes = ((len(near) - 1) * STRIDE + near[0].numel()) * near.element_size()
    reserved = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    inner = near[:1].clone(memory_format=torch.contiguous_format).stride()[1:]
    return torch.frombuffer(reserved, dtype=near.dtype).as_strided(near.shape, (STRIDE, *inner)).copy_(near)


def require_near_bits(
    case: ReplayCase, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, source_dir: Path = SOURCE_DIR
) -> None:
    """Prefill two slots and step past a flush, with everything dense and with everything far apart."""
    emulator = Emulator(kernels.step, kernels.prefill, num_multiprocessors=2, source_dir=source_dir)
    monkeypatch.setattr(ops, "mamba2", emulator.mamba2)
    monkeypatch.setattr(ops, "gated_delta_net", emulator.gated_delta_net)
    near = replayed(case, num_slots=2, seed=2)
    far = replayed(case, num_slots=2, seed=2, pools={name: far_apart(pool) for name, pool in near.pools.items()})
    T = case.window
    for seq_len in (T + 20, *[T] * (case.history // T + 1)):
        window: Any = near.make_window([seq_len, seq_len], seq_len)
        far_window = type(window)(*(far_apart(part) for part in window))
        rows = [Row(1, seq_len, seq_len), Row(0, seq_len, seq_len)]
        assert torch.equal(bits(near.run(rows, seq_len, window)), bits(far.run(rows, seq_len, far_window)))
    for name, pool in near.pools.items():
        assert torch.equal(bits(pool), bits(far.pools[name])), name
    near.assert_within_bounds()
    assert near.flushes > 2


by_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.step)


@by_kernels
@pytest.mark.parametrize("case", [MAMBA2, DELTA], ids=lambda case: case.name)
def test_slots_and_rows_far_apart_give_the_same_bits(
    case: ReplayCase, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_near_bits(case, kernels, monkeypatch)


@pytest.mark.parametrize("seq_len", [1, 4, 40])
def test_a_convolution_far_apart_gives_the_same_bits(seq_len: int) -> None:
    torch.manual_seed(seq_len)
    x, ring = torch.randn(2, seq_len, 72).bfloat16(), torch.randn(2, 11, 72).bfloat16()
    weight, bias = torch.randn(72, 4).bfloat16(), torch.randn(72).bfloat16()
    results = []
    for x_, ring_ in ((x, ring.clone()), (far_apart(x), far_apart(ring))):
        lengths = {"past_lengths": int32([5, 40]), "num_tokens": int32([seq_len] * 2), "slot_ids": int32([1, 0])}
        tensors = {"x": x_, "weight": weight, "bias": bias, "conv_ring": ring_, **lengths}
        results.append((bits(Emulator().causal_conv1d(**tensors, activation="silu")), bits(ring_)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_step_that_convolves_far_apart_gives_the_same_bits() -> None:
    step = random_step(MAMBA2, num_slots=2, num_paddings=0, seed=4, has_bias=True)
    near, far = with_own_pools(step), with_own_pools(step)
    moved = {name for name in step if name.endswith(("_ring", "_state"))} | {"xBC", "dt"}
    far |= {name: far_apart(tensor) for name, tensor in far.items() if name in moved}
    emulator = Emulator(num_multiprocessors=2)
    assert_same_bits(far, emulator.mamba2_with_conv(**far), near, emulator.mamba2_with_conv(**near))


# Of each kernel one offset of a pool and one of an input, cut to 32 bits.
FAULTS = [
    (MAMBA2, KERNELS[0], "mamba2/row.cuh", "row.slot * params.ssm_state_stride_slot"),
    (MAMBA2, KERNELS[0], "mamba2/row.cuh", "row.index * params.x_stride_batch"),
    (DELTA, KERNELS[0], "gated_delta_net/row.cuh", "row.slot * params.u_ring_stride_slot"),
    (DELTA, KERNELS[0], "gated_delta_net/row.cuh", "row.index * params.k_stride_batch"),
    (MAMBA2, KERNELS[1], "mamba2/pipeline/work.cuh", "params.ssm_state_stride_slot"),
    (DELTA, KERNELS[1], "gated_delta_net/pipeline/work.cuh", "params.ssm_state_stride_slot"),
]


@pytest.mark.parametrize(("case", "kernels", "file", "offset"), FAULTS)
def test_an_offset_in_32_bits_is_found(
    case: ReplayCase, kernels: Kernels, file: str, offset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "kernels"
    shutil.copytree(SOURCE_DIR, sources)
    text = (sources / file).read_text()
    assert text.count(offset) == 1
    stride = offset.rpartition("* ")[2]
    # 1024, what is left of the stride in 32 bits: within the memory, so that the emulator itself sees nothing.
    cut = offset.replace(stride, f"({stride} & 0x7fffffff)")
    (sources / file).write_text(text.replace(offset, cut))
    with pytest.raises(AssertionError):
        require_near_bits(case, kernels, monkeypatch, sources)
