"""The kernels of Gated DeltaNet: what is supported, how they are launched, and that none spills."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.kernels.test_resources import GENERATIONS, STATES, WINDOWS, Kernel, problems
from tests.pairwise import Case, pairwise
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.plugins.compile_image import kernel_image
from trtllm_replayssm.plugins.kernel_image import unpack
from trtllm_replayssm.plugins.specialize import ROLES, constants_of
from trtllm_replayssm.plugins.specialize_gated_delta_net import GatedDeltaNetSpecialization

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


def test_an_image_carries_both_kernels_with_their_launch_table() -> None:
    constants, entries = unpack(kernel_image(QWEN, ["sm_90a"]))
    assert constants == constants_of(QWEN)
    assert [(entry.role, entry.grid_x, entry.block_x) for entry in entries] == [
        ("step", 128, 128),
        ("prefill", 128, 128),
    ]
    assert all(entry.symbol.encode() in entry.cubin for entry in entries)


@pytest.mark.parametrize("architecture", GENERATIONS)
@pytest.mark.parametrize("n_value_heads", [16, 32, 48, 64])
def test_main_shapes_do_not_spill(n_value_heads: int, architecture: str) -> None:
    kernels = [
        Kernel(changed(n_value_heads=n_value_heads, max_draft_len=window - 1), role, architecture)
        for window in WINDOWS
        for role in ROLES
        if role != "prefill" or window == 1
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
