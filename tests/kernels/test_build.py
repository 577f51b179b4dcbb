"""NVRTC compiles every shape class for every generation, without spills; the cache is used, never trusted blindly."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from tests.kernels.cubin import resources
from tests.kernels.test_specializations import NANO_9B, changed
from trtllm_replayssm.errors import BackendError, BuildError, UnsupportedError
from trtllm_replayssm.plugins import build
from trtllm_replayssm.plugins.cache import CACHE_DIR_VARIABLE
from trtllm_replayssm.plugins.specializations import CausalConv1dSpecialization, Role, Specialization

CONV = CausalConv1dSpecialization(12288, 4, "bfloat16")
# Sizes and architectures beside those of test_resources.py, in few combinations.
COMBINATIONS: list[tuple[str, Specialization, Role, str]] = [
    ("nano_9b-step", NANO_9B, "step", "sm_90a"),
    ("nano_9b-prefill", NANO_9B, "prefill", "sm_80"),
    ("P64-T4-step", changed(head_dim=64, n_heads=64, max_draft_len=3), "step", "sm_100a"),
    ("P72-prefill", changed(head_dim=72, n_heads=64), "prefill", "sm_120"),
    ("P80-state_bf16-step", changed(state_dtype="bfloat16", dt_dtype="float32"), "step", "sm_90a"),
    ("P64-state_fp16-step", changed(head_dim=64, state_dtype="float16"), "step", "sm_89"),
    ("P128-N128-step", changed(head_dim=128), "step", "sm_100a"),
    ("N256-T8-W32-step", changed(head_dim=64, d_state=256, max_draft_len=7, history=32), "step", "sm_80"),
    ("N64-fp32-prefill", changed(d_state=64, activation_dtype="float32", dt_dtype="float32"), "prefill", "sm_86"),
    ("N32-state_bf16-step", changed(head_dim=16, d_state=32, n_groups=1, state_dtype="bfloat16"), "step", "sm_103a"),
    ("conv-step", CONV, "step", "sm_90a"),
    ("conv-one_token_step", CONV, "one_token_step", "sm_90a"),
    *(
        (f"conv-K8-{role}", CausalConv1dSpecialization(10240, 8, "float16"), role, "sm_80")
        for role in ("step", "one_token_step", "prefill")
    ),
    *(
        (f"P{head_dim}-state_{state}-T2-pipelined-{arch}", shape, "pipelined_step", arch)
        for arch in ("sm_90a", "sm_100a")
        for head_dim in (80, 64)
        for state in ("float32", "bfloat16")
        for shape in [changed(head_dim=head_dim, state_dtype=state, max_draft_len=1)]
    ),
    ("P16-G1-dt_fp32-pipelined", changed(head_dim=16, n_groups=1, dt_dtype="float32"), "pipelined_step", "sm_90a"),
    ("P128-T8-pipelined", changed(head_dim=128, max_draft_len=7), "pipelined_step", "sm_103a"),
    ("P112-W8-pipelined", changed(head_dim=112, history=8, state_dtype="bfloat16"), "pipelined_step", "sm_90a"),
    *(
        (f"{heads}x{head_dim}-state_{state}-chunked-{arch}", shape, "prefill", arch)
        for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120")
        for heads, head_dim in ((128, 80), (64, 64), (128, 64))
        for state in ("float32", "bfloat16")
        if head_dim == 64 or arch in ("sm_90a", "sm_100a")
        for shape in [changed(n_heads=heads, head_dim=head_dim, state_dtype=state)]
    ),
    ("P16-N256-chunked", changed(head_dim=16, d_state=256, history=64, max_draft_len=7), "prefill", "sm_90a"),
    ("P112-state_fp16-chunked", changed(head_dim=112, state_dtype="float16"), "prefill", "sm_90a"),
    ("P128-dt_fp32-chunked", changed(head_dim=128, dt_dtype="float32"), "prefill", "sm_90a"),
    ("conv-prefill-fp32", CausalConv1dSpecialization(100, 4, "float32"), "prefill", "sm_120"),
]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("specialization", "role", "architecture"), [c[1:] for c in COMBINATIONS], ids=[c[0] for c in COMBINATIONS]
)
def test_kernels_compile_without_spills(
    specialization: Specialization, role: Role, architecture: str, own_cache: Path
) -> None:
    found = resources(build.compile_kernel(specialization, role, architecture))
    kernel = specialization.kernel(role, architecture)
    # Of the chunked prefill one address that is used after its loop may not fit.
    assert found.stack_bytes <= (8 if kernel.endswith("chunked_prefill") else 0)
    shape = specialization.launch_shape(kernel)
    assert found.registers * shape.block_x <= 65536, "a block must fit on an SM"
    if specialization is NANO_9B and kernel in ("step", "prefill"):
        assert found.registers <= 128, "three blocks of 160 threads per SM"


def test_the_chunked_prefill_leaves_room_for_a_second_block_where_it_says_so() -> None:
    shape = changed(head_dim=64)
    assert shape.chunks is not None and shape.chunks.min_blocks == 2
    found = resources(build.compile_kernel(shape, "prefill", "sm_90a"))
    assert 2 * found.registers * shape.chunks.block_threads <= 65536


def test_a_kernel_with_stack_is_seen() -> None:
    """An array indexed at run time lives on the stack: the number read from a cubin must show it."""
    core = build.cuda_module("core")
    source = """extern "C" __global__ void gather(int* data, const int* order) {
        int local[64];
        for (int i = 0; i < 64; ++i) local[order[i]] = data[i];
        for (int i = 0; i < 64; ++i) data[i] = local[order[i + 64]];
    }"""
    options = core.ProgramOptions(name="gather", arch="sm_90a", std="c++17")
    assert resources(bytes(core.Program(source, "c++", options).compile("cubin").code)).stack_bytes >= 256


def test_the_second_compilation_comes_from_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.compile_kernel(CONV, "step", "sm_80")
    (entry,) = (own_cache / "kernels").iterdir()
    monkeypatch.setattr(build.cuda_module("core"), "Program", None)  # a compilation would fail
    assert build.compile_kernel(CONV, "step", "sm_80") == first
    with pytest.raises(BuildError):
        build.compile_kernel(CONV, "prefill", "sm_80")
    assert list((own_cache / "kernels").iterdir()) == [entry], "a failed compilation leaves nothing behind"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"\0" + data[41:]]
)
def test_a_damaged_cache_entry_is_built_anew(damage: object, own_cache: Path) -> None:
    first = build.compile_kernel(CONV, "step", "sm_80")
    (entry,) = (own_cache / "kernels").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))  # type: ignore[operator]
    assert build.compile_kernel(CONV, "step", "sm_80") == first
    assert entry.read_bytes() == whole


def test_constants_sources_and_architecture_each_have_their_own_entry(own_cache: Path) -> None:
    for specialization in (CONV, dataclasses.replace(CONV, d_conv=3)):
        for architecture in ("sm_80", "sm_89"):
            build.compile_kernel(specialization, "step", architecture)
    assert len(list((own_cache / "kernels").iterdir())) == 4


def test_kernels_for_racecheck_have_entries_of_their_own(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_kernel(CONV, "step", "sm_80")
    monkeypatch.setenv(build.RACECHECK_VARIABLE, "1")
    build.compile_kernel(CONV, "step", "sm_80")
    assert len(list((own_cache / "kernels").iterdir())) == 2


def test_changed_sources_are_compiled_anew_and_their_errors_shown(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("common", "nvrtc", "causal_conv1d"):
        shutil.copytree(build.SOURCE_DIR / folder, tmp_path / "sources" / folder)
    build.compile_kernel(CONV, "step", "sm_80")
    (tmp_path / "sources" / "causal_conv1d" / "channels.cuh").write_text("not C++")
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "sources")
    with pytest.raises(BuildError, match="channels.cuh"):
        build.compile_kernel(CONV, "step", "sm_80")


def test_unknown_architectures_are_refused_with_the_list(own_cache: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'sm_75'.*sm_80, sm_86, sm_89, sm_90a"):
        build.compile_kernel(CONV, "step", "sm_75")


def test_constants_that_need_more_shared_memory_than_an_architecture_has_are_refused(own_cache: Path) -> None:
    large = changed(
        head_dim=128, d_state=256, history=64, max_draft_len=7, activation_dtype="float32", dt_dtype="float32"
    )
    with pytest.raises(UnsupportedError, match="at most 101376 on sm_89"):
        build.compile_kernel(large, "step", "sm_89")


@pytest.mark.parametrize(
    ("specialization", "architecture"), [(NANO_9B, "sm_80"), (NANO_9B, "sm_120"), (changed(d_state=64), "sm_90a")]
)
def test_a_pipelined_step_that_does_not_exist_is_refused(
    specialization: Specialization, architecture: str, own_cache: Path
) -> None:
    with pytest.raises(UnsupportedError, match="no pipelined_step kernel .* needed a role of step, prefill"):
        build.compile_kernel(specialization, "pipelined_step", architecture)


def test_missing_cuda_packages_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(BackendError, match=re.escape(build.INSTALL)):
        build.cuda_module("no_such_package")
