"""Kernel images: what is packed comes back, what is damaged is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from trtllm_replayssm.errors import BuildError, UnsupportedError
from trtllm_replayssm.plugins import build
from trtllm_replayssm.plugins.cache import CACHE_DIR_VARIABLE
from trtllm_replayssm.plugins.compile_image import architecture_of, kernel_image
from trtllm_replayssm.plugins.kernel_image import unpack
from trtllm_replayssm.plugins.specializations import (
    CausalConv1dSpecialization,
    Kernel,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Role,
)

CONV = CausalConv1dSpecialization(4096, 4, "float16")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def image(own_cache: None) -> bytes:
    return kernel_image(CONV, ["sm_80", "sm_90a", "sm_80"])


def test_an_image_holds_all_roles_for_every_architecture_once(image: bytes) -> None:
    constants, entries = unpack(image)
    assert constants == "causal_conv1d conv_dim=4096 d_conv=4 activation_dtype=float16"
    assert [(e.role, e.compute_capability, e.is_exact) for e in entries] == [
        ("step", 80, False),
        ("prefill", 80, False),
        ("one_token_step", 80, False),
        ("step", 90, True),
        ("prefill", 90, True),
        ("one_token_step", 90, True),
    ]
    for entry in entries:
        role: Role = entry.role  # type: ignore[assignment]
        shape = CONV.launch_shape(role)
        assert (entry.symbol, entry.grid_x, entry.block_x, entry.dynamic_shared_bytes, entry.rows_per_block) == (
            shape.symbol,
            shape.grid_x,
            shape.block_x,
            shape.dynamic_shared_bytes,
            shape.rows_per_block,
        )
        architecture = "sm_90a" if entry.compute_capability == 90 else "sm_80"
        assert entry.cubin == build.compile_kernel(CONV, role, architecture)
        assert entry.symbol.encode() in entry.cubin


def test_an_image_carries_the_pipelined_step_where_there_is_one(own_cache: None) -> None:
    mamba2 = Mamba2Specialization(8, 16, 128, 2, 4, 0, "bfloat16", "float32", "bfloat16")
    _, entries = unpack(kernel_image(mamba2, ["sm_80", "sm_90a"]))
    assert [(e.role, e.compute_capability, e.is_persistent, e.is_dependent_launch) for e in entries] == [
        ("step", 80, False, False),
        ("prefill", 80, False, False),
        ("step", 90, False, True),
        ("prefill", 90, False, True),
        ("pipelined_step", 90, True, True),
    ]
    shape = mamba2.launch_shape("pipelined_step")
    found = entries[-1]
    assert (found.symbol, found.grid_x, found.block_x) == (shape.symbol, 8, shape.block_x)
    assert found.dynamic_shared_bytes == shape.dynamic_shared_bytes and shape.symbol.encode() in found.cubin


def test_an_image_prefills_by_chunks_where_it_can(own_cache: None) -> None:
    mamba2 = Mamba2Specialization(8, 80, 128, 2, 4, 0, "bfloat16", "float32", "bfloat16")
    _, entries = unpack(kernel_image(mamba2, ["sm_80", "sm_90a"]))
    found = [entry for entry in entries if entry.role == "prefill"]
    kernels: tuple[Kernel, ...] = ("prefill", "chunked_prefill")
    for entry, kernel in zip(found, kernels, strict=True):
        shape = mamba2.launch_shape(kernel)
        assert entry.symbol == shape.symbol == f"replay_mamba2_{kernel}" and entry.symbol.encode() in entry.cubin
        assert (entry.grid_x, entry.block_x) == (shape.grid_x, shape.block_x)
        assert entry.dynamic_shared_bytes == shape.dynamic_shared_bytes


def test_an_image_of_both_has_the_kernels_of_each_and_the_one_that_does_both(own_cache: None) -> None:
    step = Mamba2Specialization(8, 16, 128, 2, 4, 1, "bfloat16", "float32", "bfloat16")
    specialization = Mamba2WithConvSpecialization(step, 4)
    constants, entries = unpack(kernel_image(specialization, ["sm_80", "sm_90a"]))
    assert constants == (
        "mamba2 n_heads=8 head_dim=16 d_state=128 n_groups=2 history=4 max_draft_len=1 "
        "activation_dtype=bfloat16 state_dtype=float32 dt_dtype=bfloat16 d_conv=4"
    )
    generic = ["conv_step", "conv_prefill", "conv_one_token_step", "step", "prefill"]
    assert [(e.role, e.compute_capability) for e in entries] == [
        *((role, 80) for role in generic),
        *((role, 90) for role in (*generic, "pipelined_step", "step_with_conv")),
    ]
    # The very kernels that the two have by themselves, and no limit of work but for the one.
    _, alone = unpack(kernel_image(specialization.convolution, ["sm_80"]))
    assert [replace(entry, role=f"conv_{entry.role}") for entry in alone] == list(entries[:3])
    assert unpack(kernel_image(step, ["sm_90a"]))[1] == entries[8:11]
    *others, both = entries
    assert {entry.most_blocks_per_multiprocessor for entry in others} == {0}
    shape = specialization.launch_shape("step_with_conv")
    assert (both.symbol, both.grid_x, both.is_persistent) == ("replay_mamba2_step_with_conv", 8, True)
    assert both.most_blocks_per_multiprocessor == shape.most_blocks_per_multiprocessor == 2 * 2


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_image_is_refused(share: float, image: bytes) -> None:
    with pytest.raises(BuildError, match="kernel image"):
        unpack(image[: int(share * len(image))])


def test_other_bytes_are_refused(image: bytes) -> None:
    with pytest.raises(BuildError, match="magic"):
        unpack(b"X" + image[1:])


@pytest.mark.parametrize(
    ("compute_capability", "architecture"),
    [(80, "sm_80"), (86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100a"), (121, "sm_120")],
)
def test_every_device_gets_the_newest_architecture_that_it_runs(compute_capability: int, architecture: str) -> None:
    assert architecture_of(compute_capability) == architecture


@pytest.mark.parametrize("compute_capability", [75, 91, 110])
def test_a_device_that_runs_none_is_refused(compute_capability: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{compute_capability / 10:.1f}"):
        architecture_of(compute_capability)
