"""The kernels of Gated DeltaNet: what is supported, how they are launched, and that none spills."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kernels.cubin import resources
from tests.kernels.test_resources import GENERATIONS, PIPELINED, STATES, WINDOWS, Kernel, problems
from tests.pairwise import Case, pairwise
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.plugins import build, specializations
from trtllm_replayssm.plugins.compile_image import kernel_image
from trtllm_replayssm.plugins.kernel_image import unpack
from trtllm_replayssm.plugins.specializations import (
    ROLES,
    SHARED_BYTES,
    GatedDeltaNetSpecialization,
    constants_of,
)

QWEN = GatedDeltaNetSpecialization(
    n_key_heads=16,
    n_value_heads=32,
    key_dim=128,
    value_dim=128,
    history=16,
    max_draft_len=0,
    activation_dtype="bfloat16",
    state_dtype="float32",
    gate_dtype="bfloat16",
)


def changed(**values: object) -> GatedDeltaNetSpecialization:
    return GatedDeltaNetSpecialization(**{**QWEN.__dict__, **values})


def test_the_blocks_of_a_head_cover_its_columns() -> None:
    for key_dim in range(16, 129, 16):
        for value_dim in range(32, 257, 32):
            for state in STATES:
                found = changed(key_dim=key_dim, value_dim=value_dim, state_dtype=state)
                assert value_dim % found.slice_dim == 0 and found.slice_dim in (32, 64)
                for role in ROLES:
                    shape = found.launch_shape(role)
                    assert shape.grid_x * found.slice_dim == 32 * value_dim
                    assert shape.block_x == 32 * found.num_warps


def test_the_constants_are_one_line() -> None:
    assert constants_of(QWEN) == (
        "gated_delta_net n_key_heads=16 n_value_heads=32 key_dim=128 value_dim=128 history=16 max_draft_len=0 "
        "activation_dtype=bfloat16 state_dtype=float32 gate_dtype=bfloat16"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"n_key_heads": 3},
        {"n_key_heads": 0},
        {"key_dim": 40},
        {"key_dim": 144},
        {"value_dim": 16},
        {"value_dim": 288},
        {"history": 65},
        {"max_draft_len": 8},
    ],
)
def test_other_shapes_are_refused_with_the_list_of_supported_ones(values: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="key_dim a multiple of 16 from 16 to 128, value_dim a multiple of 32"):
        changed(**values)


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"activation_dtype": "float8"}, "float32, float16, bfloat16"),
        ({"state_dtype": "int8"}, "float32, float16, bfloat16"),
        ({"gate_dtype": "float16"}, "bfloat16, float32"),
    ],
)
def test_other_types_are_refused_with_the_list_of_supported_ones(values: dict[str, str], needed: str) -> None:
    with pytest.raises(UnsupportedError, match=needed):
        changed(**values)


def test_a_history_shorter_than_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="history"):
        changed(history=2, max_draft_len=2)


def test_an_image_carries_the_kernels_with_their_launch_table() -> None:
    cases: tuple[tuple[str, tuple[specializations.Kernel, ...]], ...] = (
        ("bfloat16", ("step", "deep_chunked_prefill", "pipelined_step")),
        ("float16", ("step", "prefill")),
    )
    for activation, kernels in cases:
        shape = changed(activation_dtype=activation, gate_dtype=activation)
        constants, entries = unpack(kernel_image(shape, ["sm_90a"]))
        assert constants == constants_of(shape)
        for entry, role, kernel in zip(entries, shape.roles("sm_90a"), kernels, strict=True):
            launch = shape.launch_shape(kernel)
            assert entry.role == role
            assert entry.symbol == launch.symbol == f"replay_gated_delta_net_{kernel}"
            assert (entry.grid_x, entry.block_x) == (launch.grid_x, launch.block_x)
            assert entry.dynamic_shared_bytes == launch.dynamic_shared_bytes
            assert entry.is_persistent == (kernel == "pipelined_step")
            assert entry.symbol.encode() in entry.cubin


def test_every_chunked_prefill_fits_in_its_architectures() -> None:
    for key_dim, value_dim, state, heads in itertools.product((64, 128), range(32, 257, 32), STATES, (16, 32, 48, 64)):
        found = changed(key_dim=key_dim, value_dim=value_dim, state_dtype=state, n_value_heads=heads)
        chunks = found.chunks_of("chunked_prefill")
        assert chunks is not None
        shape, columns = found.launch_shape("chunked_prefill"), chunks.slice_dim
        assert columns in (32, 64) and shape.grid_x * columns == heads * value_dim
        assert shape.block_x == 32 * (columns // 16 * chunks.key_splits + chunks.num_solvers) == 224
        assert shape.dynamic_shared_bytes == chunks.shared_bytes <= 99 * 1024
        deep = found.launch_shape("deep_chunked_prefill")
        assert (deep.grid_x, deep.block_x) == (shape.grid_x, 256)
        assert shape.dynamic_shared_bytes < deep.dynamic_shared_bytes <= 227 * 1024
        for architecture in GENERATIONS:
            is_deep = deep.dynamic_shared_bytes <= SHARED_BYTES[architecture]
            assert is_deep or architecture not in ("sm_90a", "sm_100a")
            assert found.kernel("prefill", architecture) == ("deep_" if is_deep else "") + "chunked_prefill"
            assert found.kernel("step", architecture) == "step"
    # One prompt of a model with 32 heads keeps a GPU of 132 multiprocessors busy, as one with 64 heads does.
    for heads in (32, 64):
        assert changed(n_value_heads=heads).launch_shape("chunked_prefill").grid_x == 128


@pytest.mark.parametrize(
    "values", [{"key_dim": 48}, {"key_dim": 112}, {"activation_dtype": "float16"}, {"activation_dtype": "float32"}]
)
def test_other_shapes_prefill_token_by_token(values: dict[str, object]) -> None:
    found = changed(**values, gate_dtype="float32")
    assert found.chunks_of("chunked_prefill") is None and found.kernel("prefill", "sm_90a") == "prefill"
    with pytest.raises(UnsupportedError, match="no chunked prefill"):
        found.launch_shape("chunked_prefill")


def test_as_many_blocks_of_the_chunked_prefill_as_it_says_have_room_on_a_multiprocessor() -> None:
    for heads, state, architecture in itertools.product((32, 64), STATES, ("sm_80", "sm_90a")):
        shape = changed(n_value_heads=heads, state_dtype=state)
        chunks = shape.chunks_of(shape.kernel("prefill", architecture))
        assert chunks is not None
        found = resources(build.compile_kernel(shape, "prefill", architecture))
        # Warps of all blocks on each quarter of a multiprocessor; registers come in eights.
        warps = -(-chunks.min_blocks * chunks.block_threads // 32 // 4)
        assert -(-found.registers // 8) * 8 * 32 * warps <= 65536 // 4
        assert chunks.min_blocks * chunks.shared_bytes <= 224 * 1024


@pytest.mark.parametrize(
    "values",
    [
        {"history": 17},
        {"key_dim": 96},
        {"value_dim": 96},
        {"value_dim": 256},
        {"state_dtype": "float16"},
        {"activation_dtype": "float16", "gate_dtype": "float16"},
    ],
)
def test_other_shapes_have_no_pipelined_step(values: dict[str, Any]) -> None:
    found = changed(**values)
    assert found.pipeline is None and "pipelined_step" not in found.roles("sm_90a")
    with pytest.raises(UnsupportedError, match="history at most 16"):
        found.launch_shape("pipelined_step")


def test_every_shape_of_the_pipelined_step_has_a_make_up() -> None:
    for heads_per_key, key_dim, value_dim in itertools.product(range(1, 7), (64, 128), (64, 128)):
        for state, history, window in itertools.product(("float32", "bfloat16"), (8, 16), range(1, 9)):
            shape = changed(
                n_value_heads=16 * heads_per_key,
                key_dim=key_dim,
                value_dim=value_dim,
                state_dtype=state,
                history=history,
                max_draft_len=window - 1,
            ).pipeline
            assert shape is not None and heads_per_key % shape.chunk_heads == 0
            heads_in_stages = shape.num_stages * 4 * shape.tile_rows / key_dim
            assert heads_in_stages >= 8 / (value_dim / 32), "a head for each group of consumers"
            assert shape.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("architecture", GENERATIONS)
@pytest.mark.parametrize("n_value_heads", [16, 32, 48, 64])
def test_main_shapes_do_not_spill(n_value_heads: int, architecture: str) -> None:
    """Steps with every state type and window; a prefill knows the window by the length of its rings alone."""
    shapes = [
        changed(n_value_heads=n_value_heads, state_dtype=state, max_draft_len=window - 1)
        for state in STATES
        for window in WINDOWS
    ]
    kernels = [
        Kernel(shape, role, architecture)
        for shape in shapes
        for role in shape.roles(architecture)
        if role != "prefill" or shape.window == 1
    ]
    assert not (found := problems(kernels)), "\n".join(found)


SIZES_AND_TYPES: dict[str, Sequence[Any]] = {
    "n_value_heads": (16, 32, 48),
    "key_dim": (128, 64, 48),
    "value_dim": (128, 64, 96),
    "state_dtype": STATES,
    "activation_dtype": ("bfloat16", "float16", "float32"),
    "window": WINDOWS,
    "history": (16, 8, 32),
    "architecture": GENERATIONS,
    "role": ROLES,
}


@pytest.mark.parametrize("case", pairwise(SIZES_AND_TYPES), ids=lambda case: "-".join(map(str, case.values())))
def test_no_pair_of_sizes_and_types_spills(case: Case) -> None:
    window, role, architecture = (case.pop(name) for name in ("window", "role", "architecture"))
    shape = changed(max_draft_len=window - 1, gate_dtype=case["activation_dtype"], **case)
    assert not (found := problems([Kernel(shape, role, architecture)])), "\n".join(found)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_no_pair_of_sizes_of_the_pipelined_step_spills(state_dtype: str) -> None:
    axes: dict[str, Sequence[Any]] = {
        "window": range(1, 9),
        "n_value_heads": (16, 32, 48, 64),
        "key_dim": (128, 64),
        "value_dim": (128, 64),
        "history": (16, 8),
        "gate_dtype": ("bfloat16", "float32"),
        "architecture": PIPELINED,
    }
    kernels = []
    for case in pairwise(axes):
        window, architecture = case.pop("window"), case.pop("architecture")
        shape = changed(max_draft_len=window - 1, state_dtype=state_dtype, **case)
        kernels.append(Kernel(shape, "pipelined_step", architecture))
    assert not (found := problems(kernels)), "\n".join(found)
