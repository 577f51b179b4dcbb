"""No kernel spills: the main shapes for every generation, and every pair of sizes and types."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.kernels.cubin import resources
from tests.kernels.test_specializations import changed
from tests.pairwise import Case, pairwise
from trtllm_replayssm.plugins import build
from trtllm_replayssm.plugins.specializations import (
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Role,
    Specialization,
)

# n_heads x head_dim.
MAIN_SHAPES = ((128, 80), (96, 80), (64, 64), (128, 64), (256, 64))
GENERATIONS = ("sm_80", "sm_90a", "sm_100a", "sm_120")
STATES = ("float32", "bfloat16", "float16")
WINDOWS = (1, 4, 8)
PIPELINED = ("sm_90a", "sm_100a")
SIZES_AND_TYPES: dict[str, Sequence[Any]] = {
    "heads": MAIN_SHAPES,
    "d_state": (128, 64, 256),
    "n_groups": (8, 1, 2, 4),
    "state_dtype": STATES,
    "activation_dtype": ("bfloat16", "float16", "float32"),
    "window": WINDOWS,
    "history": (16, 8, 32),
    "architecture": GENERATIONS,
    "role": ("step", "prefill"),
}


class Kernel(NamedTuple):
    specialization: Specialization
    role: Role
    architecture: str


def kernel_of(
    *,
    heads: tuple[int, int],
    window: int,
    role: Role,
    architecture: str,
    activation_dtype: str = "bfloat16",
    **sizes: object,
) -> Kernel:
    """Make a case a kernel: ``heads`` is (n_heads, head_dim), dt comes in the activation type."""
    types = {"activation_dtype": activation_dtype, "dt_dtype": activation_dtype}
    shape = changed(n_heads=heads[0], head_dim=heads[1], max_draft_len=window - 1, **types, **sizes)
    return Kernel(shape, role, architecture)


def problems(kernels: Iterable[Kernel], *, stack_bytes: int = 0) -> list[str]:
    """Compile, or take from the cache, and tell what needs more than its share of an SM, or more stack than allowed."""
    found = []
    for kernel in kernels:
        used = resources(build.compile_kernel(*kernel))
        name = kernel.specialization.kernel(kernel.role, kernel.architecture)
        block = kernel.specialization.launch_shape(name).block_x
        if used.stack_bytes > stack_bytes or used.registers * block > 65536:
            found.append(f"{kernel.role} for {kernel.architecture}: {used}, {block} threads; {kernel.specialization}")
    return found


@pytest.mark.parametrize("architecture", GENERATIONS)
@pytest.mark.parametrize(("n_heads", "head_dim"), MAIN_SHAPES, ids=lambda size: str(size))
def test_main_shapes_do_not_spill(n_heads: int, head_dim: int, architecture: str) -> None:
    """Steps with every state type and window; a prefill knows the window by the length of its rings alone."""
    shapes = [
        changed(n_heads=n_heads, head_dim=head_dim, state_dtype=state, max_draft_len=window - 1)
        for state in STATES
        for window in WINDOWS
    ]
    kernels = [
        Kernel(shape, role, architecture)
        for shape in shapes
        for role in shape.roles(architecture)
        if role != "prefill" or shape.window == 1
    ]
    exceptions = [kernel for kernel in kernels if is_exception(kernel)]
    assert not (found := problems(kernel for kernel in kernels if kernel not in exceptions)), "\n".join(found)
    assert not (found := problems(exceptions, stack_bytes=8)), "\n".join(found)


def is_exception(kernel: Kernel) -> bool:
    """Say whether it is the one of the main shapes' kernels that keeps an address on the stack while its loop runs."""
    shape = kernel.specialization
    assert isinstance(shape, Mamba2Specialization)
    return (shape.n_heads, shape.state_dtype, kernel.role, kernel.architecture) == (64, "float16", "prefill", "sm_90a")


PAIRS = pairwise(SIZES_AND_TYPES)


def test_every_pair_of_sizes_and_types_is_compiled() -> None:
    for first, values in SIZES_AND_TYPES.items():
        for second, others in SIZES_AND_TYPES.items():
            if first != second:
                assert {(case[first], case[second]) for case in PAIRS} == {(a, b) for a in values for b in others}


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case.values())))
def test_no_pair_of_sizes_and_types_spills(case: Case) -> None:
    # Of the widest rows one value does not fit: with more registers there would be half the thread blocks on an SM.
    # The chunked prefill: at most one address that is used after its loop.
    stack_bytes = 8 if case["d_state"] == 256 or case["role"] == "prefill" else 0
    assert not (found := problems([kernel_of(**case)], stack_bytes=stack_bytes)), "\n".join(found)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_no_pair_of_sizes_of_the_pipelined_step_spills(state_dtype: str) -> None:
    axes = {name: SIZES_AND_TYPES[name] for name in ("heads", "n_groups")}
    axes |= {"window": range(1, 9), "history": (8, 16, 32), "architecture": PIPELINED}
    kernels = [kernel_of(role="pipelined_step", state_dtype=state_dtype, **case) for case in pairwise(axes)]
    assert not (found := problems(kernels)), "\n".join(found)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_no_step_that_convolves_spills(state_dtype: str) -> None:
    axes: dict[str, Sequence[Any]] = {
        "heads": MAIN_SHAPES,
        "window": range(1, 9),
        "history": (16, 8, 32),
        "architecture": PIPELINED,
    }
    steps = [kernel_of(role="step", state_dtype=state_dtype, **case) for case in pairwise(axes)]
    kernels = [
        Kernel(Mamba2WithConvSpecialization(step.specialization, 4), "step_with_conv", step.architecture)
        for step in steps
        if isinstance(step.specialization, Mamba2Specialization)
    ]
    assert len(kernels) == len(steps)
    assert not (found := problems(kernels)), "\n".join(found)


@pytest.mark.parametrize("architecture", GENERATIONS)
def test_a_spill_is_seen(architecture: str) -> None:
    """Of 80 values that live across a barrier, a thread with 64 registers keeps some on the stack."""
    core = build.cuda_module("core")
    source = """extern "C" __global__ void __launch_bounds__(1024) hold(float* data) {
        float values[80];
        for (int i = 0; i < 80; ++i) values[i] = data[i * 1024 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 80; ++i) data[(79 - i) * 1024 + threadIdx.x] = values[i] * values[(i + 7) % 80];
    }"""
    source = source.replace("for (", '_Pragma("unroll") for (')
    options = core.ProgramOptions(name="hold", arch=architecture, std="c++17")
    found = resources(bytes(core.Program(source, "c++", options).compile("cubin").code))
    assert found.registers <= 64 and found.stack_bytes > 0
