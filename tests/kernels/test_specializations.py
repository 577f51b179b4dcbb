"""The table of what is supported, and the launch table."""

import itertools

import pytest

from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.plugins.specializations import (
    ROLES,
    CausalConv1dSpecialization,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
)

NANO_9B = Mamba2Specialization(
    n_heads=128,
    head_dim=80,
    d_state=128,
    n_groups=8,
    history=16,
    max_draft_len=0,
    activation_dtype="bfloat16",
    state_dtype="float32",
    dt_dtype="bfloat16",
)


def changed(**values: object) -> Mamba2Specialization:
    return Mamba2Specialization(**{**NANO_9B.__dict__, **values})


def test_every_supported_head_has_a_tile_that_fits_in_registers() -> None:
    for head_dim, d_state, state in itertools.product(
        range(16, 129, 8), (32, 64, 128, 256), ("float32", "float16", "bfloat16")
    ):
        found = changed(head_dim=head_dim, d_state=d_state, state_dtype=state)
        values_per_thread = head_dim * d_state / (32 * found.num_warps)
        assert 1 <= found.num_warps <= 16 and values_per_thread <= 64 and values_per_thread % 1 == 0
        for role in ROLES:
            assert found.launch_shape(role).block_x == 32 * found.num_warps


def test_every_pipeline_fits_in_an_sm_with_two_stages_or_more_per_consumer() -> None:
    for head_dim, state, history, heads in itertools.product(
        range(16, 129, 16), ("float32", "bfloat16"), (1, 4, 8, 16, 32), (1, 2, 6, 16)
    ):
        for window in range(1, min(history, 8) + 1):
            constants = {"head_dim": head_dim, "state_dtype": state, "history": history, "n_heads": 8 * heads}
            found = changed(**constants, max_draft_len=window - 1)
            pipeline, shape = found.pipeline, found.launch_shape("pipelined_step")
            assert pipeline is not None and shape.is_persistent
            assert "pipelined_step" in found.roles("sm_90a") and "pipelined_step" not in found.roles("sm_80")
            assert pipeline.shared_bytes == shape.dynamic_shared_bytes <= 227 * 1024
            consumers = int(pipeline.defines()["NUM_CONSUMERS"])
            assert pipeline.num_stages % consumers == 0 and pipeline.num_stages >= 2 * consumers
            assert heads % pipeline.chunk_heads == 0 and 32 % pipeline.chunk_heads == 0
            assert pipeline.block_threads == shape.block_x <= 512


@pytest.mark.parametrize(
    "values",
    [
        {"d_state": 64},
        {"head_dim": 72},
        {"history": 33},
        {"state_dtype": "float16"},
        {"activation_dtype": "float16", "dt_dtype": "float32"},
    ],
)
def test_other_shapes_have_no_pipelined_step(values: dict[str, object]) -> None:
    found = changed(**values)
    assert found.pipeline is None and found.roles("sm_90a") == ROLES
    with pytest.raises(UnsupportedError, match="no pipelined step"):
        found.launch_shape("pipelined_step")


def test_every_chunked_prefill_fits_in_its_architectures() -> None:
    for head_dim, d_state, state, heads in itertools.product(
        range(16, 129, 16), (64, 128, 256), ("float32", "float16", "bfloat16"), (8, 64, 72, 128)
    ):
        found = changed(head_dim=head_dim, d_state=d_state, state_dtype=state, n_heads=heads)
        assert found.chunks is not None
        shape = found.launch_shape("chunked_prefill")
        rows = head_dim // found.chunks.head_slices
        assert shape.grid_x == heads * found.chunks.head_slices and rows % 16 == 0
        assert shape.block_x == 32 * (rows // 16 * (d_state // 64) + 4 + 1) <= 512
        assert shape.dynamic_shared_bytes == found.chunks.shared_bytes <= 227 * 1024
        assert found.kernel("prefill", "sm_90a") == "chunked_prefill" and found.kernel("step", "sm_90a") == "step"
        fits_everywhere = shape.dynamic_shared_bytes <= 99 * 1024
        # Cubins of 8.0 also run on 8.6 and 8.9, which have less shared memory than 8.0.
        for architecture in ("sm_80", "sm_86", "sm_89", "sm_120"):
            expected = "chunked_prefill" if fits_everywhere else "prefill"
            assert found.kernel("prefill", architecture) == expected
    assert changed(head_dim=64).kernel("prefill", "sm_120") == "chunked_prefill"


@pytest.mark.parametrize(
    "values", [{"d_state": 32}, {"head_dim": 72}, {"activation_dtype": "float16"}, {"activation_dtype": "float32"}]
)
def test_other_shapes_prefill_token_by_token(values: dict[str, object]) -> None:
    found = changed(**values, dt_dtype="float32")
    assert found.chunks is None and found.kernel("prefill", "sm_90a") == "prefill"
    with pytest.raises(UnsupportedError, match="no chunked prefill"):
        found.launch_shape("chunked_prefill")


def test_a_persistent_grid_is_bounded_by_the_device_and_by_the_work() -> None:
    shape = NANO_9B.launch_shape("pipelined_step")
    assert [shape.grid(rows, 132) for rows in (1, 2, 65535)] == [(128, 1, 1), (132, 1, 1), (132, 1, 1)]
    assert NANO_9B.launch_shape("step").grid(3, 132) == (128, 3, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 12},
        {"head_dim": 136},
        {"d_state": 96},
        {"n_groups": 3},
        {"n_groups": 0},
        {"history": 65},
        {"history": 16, "max_draft_len": 8},
    ],
)
def test_other_shapes_are_refused_with_the_list_of_supported_ones(values: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="head_dim a multiple of 8 from 16 to 128, d_state 32, 64, 128 or 256"):
        changed(**values)


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"activation_dtype": "float8"}, "float32, float16, bfloat16"),
        ({"state_dtype": "int8"}, "float32, float16, bfloat16"),
        ({"dt_dtype": "float16"}, "bfloat16, float32"),
    ],
)
def test_other_types_are_refused_with_the_list_of_supported_ones(values: dict[str, str], needed: str) -> None:
    with pytest.raises(UnsupportedError, match=needed):
        changed(**values)


def test_a_history_shorter_than_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="history"):
        changed(history=2, max_draft_len=2)


@pytest.mark.parametrize(("conv_dim", "d_conv"), [(0, 4), (64, 1), (64, 9)])
def test_other_convolutions_are_refused(conv_dim: int, d_conv: int) -> None:
    with pytest.raises(UnsupportedError, match="d_conv from 2 to 8"):
        CausalConv1dSpecialization(conv_dim, d_conv, "float32")


@pytest.mark.parametrize("conv_dim", [1, 7, 12, 1024, 12288])
def test_the_blocks_of_a_convolution_cover_all_channels(conv_dim: int) -> None:
    found = CausalConv1dSpecialization(conv_dim, 4, "bfloat16")
    shape = found.launch_shape("step")
    assert conv_dim % found.channels_per_thread == 0
    assert (shape.grid_x - 1) * shape.block_x * found.channels_per_thread < conv_dim
    assert shape.grid_x * shape.block_x * found.channels_per_thread >= conv_dim


def test_a_step_that_convolves_has_the_make_up_of_the_step() -> None:
    for window, state, architecture in itertools.product((1, 4, 8), ("float32", "bfloat16"), ("sm_90a", "sm_100a")):
        step = changed(max_draft_len=window - 1, state_dtype=state)
        found = Mamba2WithConvSpecialization(step, 4)
        assert found.roles(architecture) == ("step_with_conv",) and found.roles("sm_80") == ()
        shape, alone = found.launch_shape("step_with_conv"), step.launch_shape("pipelined_step")
        assert shape.is_persistent and (shape.grid_x, shape.block_x) == (alone.grid_x, alone.block_x)
        assert 0 < shape.dynamic_shared_bytes - alone.dynamic_shared_bytes < 128
        assert set(found.defines("step_with_conv").items()) - set(step.defines("pipelined_step").items()) == {
            ("D_CONV", "4"),
            ("IS_RAW", "1"),
            ("DYNAMIC_SHARED_BYTES", str(shape.dynamic_shared_bytes)),
        }


def test_long_windows_of_many_rows_are_convolved_in_a_launch_of_their_own() -> None:
    found = (Mamba2WithConvSpecialization(changed(max_draft_len=draft), 4) for draft in (0, 3))
    one, four = (specialization.launch_shape("step_with_conv") for specialization in found)
    assert one.is_faster(512, 132) and four.is_faster(4, 132) and not four.is_faster(8, 132)
    assert four.is_faster(8, 264)


@pytest.mark.parametrize(("d_conv", "values"), [(3, {}), (4, {"d_state": 64}), (4, {"state_dtype": "float16"})])
def test_other_constants_have_no_step_that_convolves(d_conv: int, values: dict[str, object]) -> None:
    found = Mamba2WithConvSpecialization(changed(**values), d_conv)
    assert found.roles("sm_90a") == () and found.convolution.d_conv == d_conv
    with pytest.raises(UnsupportedError, match="no step that convolves"):
        found.launch_shape("step_with_conv")


def test_a_convolution_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="d_conv from 2 to 8"):
        Mamba2WithConvSpecialization(NANO_9B, 9)
