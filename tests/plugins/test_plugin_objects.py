"""Plugin objects through TensorRT's interfaces: what they declare, store, accept and refuse, without a GPU."""

import gc
from dataclasses import replace

import pytest

from tests.harness.plugin_harness import (
    FIELD_TYPES,
    RUNTIME,
    Field,
    Harness,
    HarnessPlugin,
    PluginRefusedError,
    shapes_of,
)
from tests.plugins.plugin_calls import INTS, right_tensors
from tests.plugins.plugin_networks import placeholder_image, random_image, specialization_of
from trtllm_replayssm.contract.plugin_io import (
    CAUSAL_CONV1D,
    GATED_DELTA_NET,
    MAMBA2,
    MAMBA2_WITH_CONV,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    PLUGINS,
    PluginIO,
)
from trtllm_replayssm.plugins.specializations import Specialization, constants_of

every_plugin = pytest.mark.parametrize("io", PLUGINS, ids=lambda io: io.op_type)
every_recurrence = pytest.mark.parametrize("io", [MAMBA2, GATED_DELTA_NET, MAMBA2_WITH_CONV], ids=lambda io: io.op_type)


def make(harness: Harness, io: PluginIO, **ints: int) -> HarnessPlugin:
    return HarnessPlugin.of(harness, io, INTS[io.op_type] | ints, placeholder_image(specialization_of(io)))


def fields_of(io: PluginIO) -> list[Field]:
    ints = [Field(name, "int32", [value]) for name, value in INTS[io.op_type].items()]
    return [*ints, Field("kernels", "int8", placeholder_image(specialization_of(io)))]


def test_creators_are_those_of_the_contract_in_order(harness: Harness) -> None:
    assert harness.creators() == {
        f"PLUGIN CREATOR_V3ONE 1/{io.op_type}/{PLUGIN_NAMESPACE}/{PLUGIN_VERSION}": [
            *((name, FIELD_TYPES["int32"]) for name in io.int_fields),
            ("kernels", FIELD_TYPES["int8"]),
        ]
        for io in PLUGINS
    }


@every_plugin
def test_outputs_and_aliases_are_those_of_the_contract(harness: Harness, io: PluginIO) -> None:
    plugin = make(harness, io)
    inputs, outputs = shapes_of(io, right_tensors(io))
    axes = [tuple((i, axis) for axis in range(len(desc.shape))) for i, desc in enumerate(inputs)]
    assert plugin.aliases() == io.aliases
    assert plugin.output_types([desc.dtype for desc in inputs]) == [desc.dtype for desc in outputs]
    expected = [io.output_shape(k, axes) for k in range(len(io.outputs))]
    assert plugin.output_axes([len(desc.shape) for desc in inputs]) == expected
    # Between its two kernels the convolved window must be somewhere: 2 rows of 4 tokens of 192 channels.
    assert plugin.workspace_bytes(inputs, outputs) == (2 * 4 * 192 * 2 if io is MAMBA2_WITH_CONV else 0)
    assert plugin.identity() == f"{io.op_type}/{PLUGIN_NAMESPACE}/{PLUGIN_VERSION}"


@every_plugin
def test_inputs_and_outputs_have_the_names_of_the_contract_in_order(harness: Harness, io: PluginIO) -> None:
    plugin, tensors = make(harness, io), right_tensors(io)
    inputs, outputs = shapes_of(io, tensors)
    for name, desc in tensors.items():
        spoilt, _ = shapes_of(io, tensors | {name: replace(desc, dtype="int8")})
        with pytest.raises(PluginRefusedError, match=rf"\b{name}: found type int8; needed"):
            plugin.output_types([desc.dtype for desc in spoilt])
    for index, name in enumerate(io.outputs):
        turned = [replace(desc, format=1) if k == index else desc for k, desc in enumerate(outputs)]
        with pytest.raises(PluginRefusedError, match=rf"\b{name}: found format 1"):
            plugin.configure(inputs, turned)


@every_plugin
def test_fields_survive_serialisation_clone_and_attachment(harness: Harness, io: PluginIO) -> None:
    image = random_image(io, 100_003)
    built = HarnessPlugin.of(harness, io, INTS[io.op_type], image)
    stored = built.serialized()
    assert stored == [*fields_of(io)[:-1], Field("kernels", "int8", image)]
    copy = built.deserialized().clone().attached()
    del built
    assert copy.serialized() == stored
    assert copy.aliases() == io.aliases


@every_plugin
def test_ints_may_arrive_with_64_bits(harness: Harness, io: PluginIO) -> None:
    wide = [replace(field, type="int64") if field.type == "int32" else field for field in fields_of(io)]
    assert HarnessPlugin(harness, io, wide).serialized() == fields_of(io)


@every_plugin
def test_equal_images_are_stored_once_in_memory(harness: Harness, io: PluginIO) -> None:
    image = random_image(io, 4 << 20)
    gc.collect()
    before = resident_bytes()
    plugins = [HarnessPlugin.of(harness, io, INTS[io.op_type], image) for _ in range(100)]
    gc.collect()
    assert resident_bytes() - before < 64 << 20
    assert plugins[-1].serialized()[-1].value == image


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@every_plugin
@pytest.mark.parametrize("missing", [0, -1], ids=["int", "kernels"])
@pytest.mark.parametrize("phase", [0, RUNTIME], ids=["build", "runtime"])
def test_a_missing_field_is_refused_by_name(harness: Harness, io: PluginIO, missing: int, phase: int) -> None:
    fields = fields_of(io)
    name = fields.pop(missing).name
    with pytest.raises(PluginRefusedError, match=f'error: .*{io.op_type} "layer": field {name}: missing; needed'):
        HarnessPlugin(harness, io, fields, phase)


@every_plugin
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: [*f, Field("window", "int32", [1])], "field window: unknown; needed .* and no other"),
        (lambda f: [*f, f[0]], "found twice; needed once"),
        (lambda f: [replace(f[0], type="float32"), *f[1:]], "found 1 x float32; needed one int32"),
        (lambda f: [replace(f[0], value=[1, 1]), *f[1:]], "found 2 x int32; needed one int32"),
        (lambda f: [replace(f[0], value=[]), *f[1:]], "found 0 x int32; needed one int32"),
        (lambda f: [replace(f[0], type="int64", value=[1 << 40]), *f[1:]], f"found {1 << 40}; needed .* 32 bits"),
        (lambda f: [*f[:-1], replace(f[-1], type="char")], "field kernels: found .* x char; needed a kernel image"),
        (lambda f: [*f[:-1], replace(f[-1], value=b"")], "field kernels: found 0 x int8; needed a kernel image"),
    ],
    ids=["extra", "repeated", "float", "two_values", "no_value", "too_wide", "kernels_as_text", "kernels_empty"],
)
def test_a_wrong_field_is_refused_with_the_reason(harness: Harness, io: PluginIO, spoil: object, reason: str) -> None:
    assert callable(spoil)
    with pytest.raises(PluginRefusedError, match=reason):
        HarnessPlugin(harness, io, spoil(fields_of(io)))


def test_an_unknown_activation_is_refused(harness: Harness) -> None:
    with pytest.raises(PluginRefusedError, match=r"field activation: found 2; needed 0 \(none\) or 1 \(silu\)"):
        make(harness, CAUSAL_CONV1D, activation=2)


@every_recurrence
@pytest.mark.parametrize(
    ("ints", "reason"),
    [
        ({"history": 3}, r"field history: found 3 with max_draft_len = 3; needed at least 4 \(1 \+ max_draft_len\)"),
        ({"history": 0, "max_draft_len": 0}, "field history: found 0"),
        ({"max_draft_len": -1}, "field max_draft_len: found -1; needed 0 or more"),
        ({"max_draft_len": 2**31 - 1}, f"field history: found 8 .* needed at least {2**31} "),
    ],
    ids=["history_below_window", "history_0", "max_draft_len", "longest_window"],
)
def test_an_impossible_value_is_refused(harness: Harness, io: PluginIO, ints: dict[str, int], reason: str) -> None:
    with pytest.raises(PluginRefusedError, match=reason):
        make(harness, io, **ints)


@every_plugin
@pytest.mark.parametrize(("batch", "seq_len"), [(-1, -1), (2, 4), (1, 100), (3, 0), (0, 4)])
def test_right_shapes_are_accepted(harness: Harness, io: PluginIO, batch: int, seq_len: int) -> None:
    inputs, outputs = shapes_of(io, right_tensors(io, batch, seq_len))
    plugin = make(harness, io)
    plugin.configure(inputs, outputs)
    if batch >= 0:
        plugin.on_shape_change(inputs, outputs)
    assert harness.messages() == ""


WRONG_SHAPES = [
    (CAUSAL_CONV1D, "x", (2, 4, 24, 1), r"x: found \[2, 4, 24, 1\]; needed \[B, S, D\]"),
    (CAUSAL_CONV1D, "weight", (23, 4), r"weight: found \[23, 4\]; needed \[D, K\] with D = 24, as x"),
    (CAUSAL_CONV1D, "bias", (25,), "bias: found .* with D = 24, as x"),
    (CAUSAL_CONV1D, "conv_ring", (3, 7, 23), r"conv_ring: found .*; needed \[slots, R_conv, D\] with D = 24"),
    (CAUSAL_CONV1D, "conv_ring", (3, 3, 24), "conv_ring: found 3 rows with d_conv = 4; needed at least 4"),
    (CAUSAL_CONV1D, "slot_ids", (3,), "slot_ids: found .* with B = 2, as x"),
    (MAMBA2_WITH_CONV, "xBC", (2, 4, 4, 48), r"xBC: found \[2, 4, 4, 48\]; needed \[B, S, D\]"),
    (MAMBA2_WITH_CONV, "dt", (2, 4, 5), "A: found .* with H = 5, as dt"),
    (MAMBA2_WITH_CONV, "conv_weight", (64, 4), "conv_weight: found .* with D = 192, as xBC"),
    (MAMBA2_WITH_CONV, "conv_bias", (4,), "conv_bias: found .* with D = 192, as xBC"),
    (MAMBA2_WITH_CONV, "conv_ring", (3, 7, 64), r"conv_ring: found .*; needed \[slots, R_conv, D\] with D = 192"),
    (MAMBA2_WITH_CONV, "conv_ring", (3, 6, 192), "conv_ring: found 6 rows with d_conv = 4; needed at least 7"),
    (MAMBA2_WITH_CONV, "conv_weight", (192, 0), "conv_weight: found no taps; needed 1 or more"),
    (MAMBA2_WITH_CONV, "D", (192,), "D: found .* with H = 4, as dt"),
    (MAMBA2_WITH_CONV, "ssm_state", (4, 4, 16, 32), "ssm_state: found .* with slots = 3, as conv_ring"),
    (MAMBA2_WITH_CONV, "B_ring", (3, 12, 1, 32), r"xBC: found 192 channels; needed 128 \(H P \+ 2 G N\)"),
    (MAMBA2_WITH_CONV, "B_ring", (3, 12, 3, 32), "B_ring: found 3 groups with 4 heads; needed heads in equal groups"),
    (MAMBA2_WITH_CONV, "dt_ring", (3, 13, 4), "dt_ring: found .* with R = 12, as x_ring"),
    (MAMBA2_WITH_CONV, "slot_ids", (3,), "slot_ids: found .* with B = 2, as xBC"),
    (MAMBA2, "dt", (2, 4, 5), r"dt: found \[2, 4, 5\]; needed \[B, S, H\] with H = 4, as x"),
    (MAMBA2, "dt", (2, 3, 4), "dt: found .* with S = 4, as x"),
    (MAMBA2, "C", (2, 4, 2, 16), "C: found .* with N = 32, as B"),
    (MAMBA2, "A", (8,), "A: found .* with H = 4, as x"),
    (MAMBA2, "ssm_state", (3, 4, 32, 16), "ssm_state: found .* with P = 16, as x"),
    (MAMBA2, "x_ring", (4, 12, 4, 16), "x_ring: found .* with slots = 3, as ssm_state"),
    (MAMBA2, "x_ring", (3, 11, 4, 16), "B_ring: found .* with R = 11, as x_ring"),
    (MAMBA2, "dt_ring", (3, 13, 4), "dt_ring: found .* with R = 12, as x_ring"),
    (MAMBA2, "checkpoint_lengths", (1,), "checkpoint_lengths: found .* with B = 2, as x"),
    (GATED_DELTA_NET, "q", (2, 4, 32), r"q: found \[2, 4, 32\]; needed \[B, S, Hk, K\]"),
    (GATED_DELTA_NET, "k", (2, 4, 3, 16), "k: found .* with Hk = 2, as q"),
    (GATED_DELTA_NET, "k", (2, 4, 2, 32), "k: found .* with K = 16, as q"),
    (GATED_DELTA_NET, "v", (2, 3, 6, 32), "v: found .* with S = 4, as q"),
    (GATED_DELTA_NET, "a", (2, 4, 2), r"a: found \[2, 4, 2\]; needed \[B, S, Hv\] with Hv = 6, as v"),
    (GATED_DELTA_NET, "b", (2, 4, 6, 1), r"b: found \[2, 4, 6, 1\]; needed \[B, S, Hv\]"),
    (GATED_DELTA_NET, "A_log", (2,), "A_log: found .* with Hv = 6, as v"),
    (GATED_DELTA_NET, "ssm_state", (3, 6, 32, 16), "ssm_state: found .* with K = 16, as q"),
    (GATED_DELTA_NET, "ssm_state", (3, 2, 16, 32), "ssm_state: found .* with Hv = 6, as v"),
    (GATED_DELTA_NET, "k_ring", (4, 12, 2, 16), "k_ring: found .* with slots = 3, as ssm_state"),
    (GATED_DELTA_NET, "u_ring", (3, 12, 2, 32), "u_ring: found .* with Hv = 6, as v"),
    (GATED_DELTA_NET, "g_ring", (3, 13, 6), "g_ring: found .* with R = 12, as k_ring"),
    (GATED_DELTA_NET, "slot_ids", (3,), "slot_ids: found .* with B = 2, as q"),
]


@pytest.mark.parametrize(("io", "name", "shape", "reason"), WRONG_SHAPES, ids=lambda value: str(value)[:24])
def test_a_wrong_shape_is_refused_at_build_and_at_run_time(
    harness: Harness, io: PluginIO, name: str, shape: tuple[int, ...], reason: str
) -> None:
    tensors = right_tensors(io)
    inputs, outputs = shapes_of(io, tensors | {name: replace(tensors[name], shape=shape)})
    plugin = make(harness, io)
    with pytest.raises(PluginRefusedError, match=reason):
        plugin.configure(inputs, outputs)
    with pytest.raises(PluginRefusedError, match=reason):
        plugin.on_shape_change(inputs, outputs)
    # Refused before the driver is looked for, let alone asked.
    with pytest.raises(PluginRefusedError, match=reason):
        plugin.enqueue(inputs, outputs, [0] * (len(inputs) + len(outputs)))


@every_recurrence
def test_too_few_ring_rows_are_refused_with_the_numbers(harness: Harness, io: PluginIO) -> None:
    tensors = right_tensors(io)
    rings = [name for name in io.inputs if name.endswith("_ring") and name != "conv_ring"]
    short = {n: replace(tensors[n], shape=(3, 11, *tensors[n].shape[2:])) for n in rings}
    reason = rf"{rings[0]}: found 11 rows with history = 8 and max_draft_len = 3; .* 12 \("
    with pytest.raises(PluginRefusedError, match=reason):
        make(harness, io).configure(*shapes_of(io, tensors | short))


@pytest.mark.parametrize("groups", [0, 3])
def test_heads_that_groups_do_not_divide_are_refused(harness: Harness, groups: int) -> None:
    tensors = right_tensors(MAMBA2)
    uneven = {n: replace(tensors[n], shape=(2, 4, groups, 32)) for n in ("B", "C")}
    uneven["B_ring"] = replace(tensors["B_ring"], shape=(3, 12, groups, 32))
    reason = f"B: found {groups} groups with 4 heads; needed heads in equal groups"
    with pytest.raises(PluginRefusedError, match=reason):
        make(harness, MAMBA2).configure(*shapes_of(MAMBA2, tensors | uneven))


@pytest.mark.parametrize("heads", [0, 4])
def test_value_heads_that_key_heads_do_not_divide_are_refused(harness: Harness, heads: int) -> None:
    tensors = right_tensors(GATED_DELTA_NET)
    uneven = {n: replace(tensors[n], shape=(2, 4, heads, 16)) for n in ("q", "k")}
    uneven["k_ring"] = replace(tensors["k_ring"], shape=(3, 12, heads, 16))
    reason = f"v: found 6 heads with {heads} heads of q and k; needed heads in equal groups"
    with pytest.raises(PluginRefusedError, match=reason):
        make(harness, GATED_DELTA_NET).configure(*shapes_of(GATED_DELTA_NET, tensors | uneven))


@every_plugin
def test_an_output_of_another_shape_or_type_is_refused(harness: Harness, io: PluginIO) -> None:
    inputs, outputs = shapes_of(io, right_tensors(io))
    plugin = make(harness, io)
    for k, output in enumerate(outputs):
        spoilt = [*outputs]
        spoilt[k] = replace(output, shape=(*output.shape[:-1], output.shape[-1] + 1))
        with pytest.raises(PluginRefusedError, match=f"{io.outputs[k]}: found "):
            plugin.configure(inputs, spoilt)
        spoilt[k] = replace(output, dtype="int32")
        with pytest.raises(PluginRefusedError, match=f"output {io.outputs[k]}: found type int32; needed"):
            plugin.configure(inputs, spoilt)


WRONG_TYPES = [
    (CAUSAL_CONV1D, "x", "int32", "x: found type int32; needed float32, float16 or bfloat16"),
    (CAUSAL_CONV1D, "weight", "float32", "weight: found type float32; needed bfloat16, as x"),
    (CAUSAL_CONV1D, "slot_ids", "int64", "slot_ids: found type int64; needed int32"),
    (MAMBA2, "dt", "float32", "dt: found type float32; needed bfloat16, as x"),
    (MAMBA2, "A", "bfloat16", "A: found type bfloat16; needed float32"),
    (MAMBA2, "ssm_state", "int8", "ssm_state: found type int8; needed float32, float16 or bfloat16"),
    (MAMBA2, "x_ring", "float16", "x_ring: found type float16; needed bfloat16, as x"),
    (MAMBA2, "dt_ring", "bfloat16", "dt_ring: found type bfloat16; needed float32"),
    (MAMBA2_WITH_CONV, "dt", "float32", "dt: found type float32; needed bfloat16, as xBC"),
    (MAMBA2_WITH_CONV, "conv_weight", "float32", "conv_weight: found type float32; needed bfloat16, as xBC"),
    (MAMBA2_WITH_CONV, "dt_bias", "bfloat16", "dt_bias: found type bfloat16; needed float32"),
    (GATED_DELTA_NET, "q", "int32", "q: found type int32; needed float32, float16 or bfloat16"),
    (GATED_DELTA_NET, "v", "float16", "v: found type float16; needed bfloat16, as q"),
    (GATED_DELTA_NET, "a", "float32", "a: found type float32; needed bfloat16, as q"),
    (GATED_DELTA_NET, "A_log", "bfloat16", "A_log: found type bfloat16; needed float32"),
    (GATED_DELTA_NET, "ssm_state", "int8", "ssm_state: found type int8; needed float32, float16 or bfloat16"),
    (GATED_DELTA_NET, "k_ring", "float32", "k_ring: found type float32; needed bfloat16, as q"),
    (GATED_DELTA_NET, "u_ring", "bfloat16", "u_ring: found type bfloat16; needed float32"),
    (GATED_DELTA_NET, "num_tokens", "int64", "num_tokens: found type int64; needed int32"),
]


@pytest.mark.parametrize(("io", "name", "dtype", "reason"), WRONG_TYPES, ids=lambda value: str(value)[:24])
def test_a_wrong_type_is_refused_with_the_reason(
    harness: Harness, io: PluginIO, name: str, dtype: str, reason: str
) -> None:
    tensors = right_tensors(io)
    inputs, outputs = shapes_of(io, tensors | {name: replace(tensors[name], dtype=dtype)})
    plugin = make(harness, io)
    with pytest.raises(PluginRefusedError, match=reason):
        plugin.output_types([desc.dtype for desc in inputs])
    with pytest.raises(PluginRefusedError, match=reason):
        plugin.on_shape_change(inputs, outputs)
    assert not all(plugin.supports(k, inputs, outputs) for k in range(len(inputs)))


@every_plugin
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_activation_type_is_supported_in_the_linear_format_alone(
    harness: Harness, io: PluginIO, dtype: str
) -> None:
    inputs, outputs = shapes_of(io, right_tensors(io, dtype=dtype))
    plugin = make(harness, io)
    assert all(plugin.supports(k, inputs, outputs) for k in range(len(inputs) + len(outputs)))
    channels_last = [replace(desc, format=1) for desc in inputs]
    assert not any(plugin.supports(k, channels_last, outputs) for k in range(len(inputs)))
    with pytest.raises(PluginRefusedError, match=f"{io.inputs[0]}: found format 1; needed the linear format"):
        plugin.configure(channels_last, outputs)


@every_recurrence
@pytest.mark.parametrize("state", ["float32", "float16", "bfloat16"])
def test_the_state_has_a_type_of_its_own(harness: Harness, io: PluginIO, state: str) -> None:
    tensors = right_tensors(io)
    inputs, outputs = shapes_of(io, tensors | {"ssm_state": replace(tensors["ssm_state"], dtype=state)})
    image = placeholder_image(specialization_of(io, state_dtype=state))
    plugin = HarnessPlugin.of(harness, io, INTS[io.op_type], image)
    assert all(plugin.supports(k, inputs, outputs) for k in range(len(inputs) + len(outputs)))
    index = io.outputs.index("ssm_state")
    assert plugin.output_types([desc.dtype for desc in inputs])[index] == state
    plugin.configure(inputs, outputs)


OTHER_CONSTANTS = [
    *(
        (CAUSAL_CONV1D, name, value)
        for name, value in (("conv_dim", 32), ("d_conv", 3), ("activation_dtype", "float16"))
    ),
    *((MAMBA2, name, value) for name, value in (("n_heads", 8), ("head_dim", 24), ("d_state", 64), ("n_groups", 1))),
    *((MAMBA2, name, value) for name, value in (("history", 9), ("max_draft_len", 2))),
    *((MAMBA2, name, value) for name, value in (("state_dtype", "bfloat16"), ("dt_dtype", "float32"))),
    (MAMBA2_WITH_CONV, "d_conv", 3),
    (MAMBA2_WITH_CONV, "step", replace(specialization_of(MAMBA2), history=9)),  # type: ignore[arg-type]
    *((GATED_DELTA_NET, name, value) for name, value in (("n_key_heads", 3), ("n_value_heads", 4))),
    *((GATED_DELTA_NET, name, value) for name, value in (("key_dim", 32), ("value_dim", 64))),
    *((GATED_DELTA_NET, name, value) for name, value in (("history", 9), ("max_draft_len", 2))),
    *((GATED_DELTA_NET, name, value) for name, value in (("state_dtype", "bfloat16"), ("gate_dtype", "float32"))),
]


@pytest.mark.parametrize(
    ("io", "name", "value"), OTHER_CONSTANTS, ids=lambda value: str(getattr(value, "op_type", value))
)
def test_kernels_compiled_for_other_constants_are_refused(
    harness: Harness, io: PluginIO, name: str, value: object
) -> None:
    right = specialization_of(io)
    other = replace(right, **{name: value})  # type: ignore[arg-type]
    require_refusal(harness, io, right, other)


@pytest.mark.parametrize(("io", "other_io"), [(MAMBA2, MAMBA2_WITH_CONV), (MAMBA2_WITH_CONV, MAMBA2)])
def test_kernels_of_the_recurrence_alone_are_not_those_of_it_with_the_convolution(
    harness: Harness, io: PluginIO, other_io: PluginIO
) -> None:
    require_refusal(harness, io, specialization_of(io), specialization_of(other_io))


def require_refusal(harness: Harness, io: PluginIO, right: Specialization, other: Specialization) -> None:
    plugin = HarnessPlugin.of(harness, io, INTS[io.op_type], placeholder_image(other))
    inputs, outputs = shapes_of(io, right_tensors(io))
    needed = f'field kernels: found kernels compiled for "{constants_of(other)}"; needed "{constants_of(right)}"'
    for check in (plugin.configure, plugin.on_shape_change):
        with pytest.raises(PluginRefusedError, match=needed):
            check(inputs, outputs)


@every_plugin
def test_a_wrong_number_of_inputs_is_refused(harness: Harness, io: PluginIO) -> None:
    inputs, outputs = shapes_of(io, right_tensors(io))
    with pytest.raises(PluginRefusedError, match=f"inputs: found {len(inputs) - 1}; needed {len(inputs)}"):
        make(harness, io).configure(inputs[:-1], outputs)
    with pytest.raises(PluginRefusedError, match=f"found {len(inputs) - 1} inputs and"):
        make(harness, io).output_types([desc.dtype for desc in inputs[:-1]])
