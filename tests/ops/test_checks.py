"""Wrong arguments are refused by name, with what was found and what is needed, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import GatedDeltaNetCase, Mamba2Case
from tests.ops.driver import bits, int32
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver
from tests.ops.mamba2_driver import make_pools
from trtllm_replayssm import ops
from trtllm_replayssm.errors import OpArgumentError

CASE = Mamba2Case("checks", 4, 8, 6, 2, 8, 3, "float32")
GATED_DELTA_NET = GatedDeltaNetCase("checks", 2, 4, 6, 8, 8, 3, "float32")
Arguments = dict[str, Any]


def mamba2_arguments() -> Arguments:
    pools = make_pools(CASE, 3, "cpu")
    return {
        "x": torch.randn(2, 4, 4, 8),
        "dt": torch.randn(2, 4, 4),
        "B": torch.randn(2, 4, 2, 6),
        "C": torch.randn(2, 4, 2, 6),
        "A": -torch.ones(4),
        "D": torch.ones(4),
        "dt_bias": torch.zeros(4),
        **pools,
        "past_lengths": int32([7, 0]),
        "checkpoint_lengths": int32([0, 0]),
        "num_tokens": int32([4, 4]),
        "slot_ids": int32([2, 0]),
        "history": 8,
        "max_draft_len": 3,
    }


def gated_delta_net_arguments() -> Arguments:
    return {
        "q": torch.randn(2, 4, 2, 6),
        "k": torch.randn(2, 4, 2, 6),
        "v": torch.randn(2, 4, 4, 8),
        "a": torch.randn(2, 4, 4),
        "b": torch.randn(2, 4, 4),
        "A_log": torch.zeros(4),
        "dt_bias": torch.zeros(4),
        **GatedDeltaNetDriver(GATED_DELTA_NET, num_slots=3).pools,
        "past_lengths": int32([7, 0]),
        "checkpoint_lengths": int32([0, 0]),
        "num_tokens": int32([4, 4]),
        "slot_ids": int32([2, 0]),
        "history": 8,
        "max_draft_len": 3,
    }


def conv_arguments() -> Arguments:
    return {
        "x": torch.randn(2, 4, 6),
        "weight": torch.randn(6, 4),
        "bias": torch.randn(6),
        "conv_ring": torch.full((3, 7, 6), torch.nan),
        "past_lengths": int32([5, 0]),
        "num_tokens": int32([4, 4]),
        "slot_ids": int32([2, 0]),
        "activation": "silu",
    }


def conventional_arguments(replayed: Arguments, *state_shape: int) -> Arguments:
    """Return the arguments of the conventional op beside those of the one that replays."""
    dropped = {"ssm_state", "checkpoint_lengths", "history", *(name for name in replayed if name.endswith("_ring"))}
    kept = {name: value for name, value in replayed.items() if name not in dropped}
    return {**kept, "ssm_snapshots": torch.full((3, 5, *state_shape), torch.nan)}


def mamba2_conventional_arguments() -> Arguments:
    return conventional_arguments(mamba2_arguments(), 4, 8, 6)


def gated_delta_net_conventional_arguments() -> Arguments:
    return conventional_arguments(gated_delta_net_arguments(), 4, 6, 8)


def advance_arguments() -> Arguments:
    return {
        "past_lengths": int32([7, 0]),
        "checkpoint_lengths": int32([0, 0]),
        "num_accepted_tokens": int32([4, 1]),
        "history": 8,
        "max_draft_len": 3,
    }


BAD_MAMBA2: list[tuple[str, Any, list[str]]] = [
    ("x", "text", ["x: found str", "needed a torch.Tensor"]),
    ("x", torch.zeros(2, 4, 4), ["x: found shape (2, 4, 4)", "[batch, S, H, P]"]),
    ("x", torch.zeros(2, 4, 4, 8, dtype=torch.float64), ["x: found torch.float64", "torch.float16"]),
    ("x", torch.zeros(2, 4, 4, 8, dtype=torch.float16), ["B: found torch.float32", "torch.float16, the type of x"]),
    ("dt", torch.zeros(2, 4, 5), ["dt: found shape (2, 4, 5)", "[batch, S, H] = (2, 4, 4)", "H = 4 comes from x"]),
    ("dt", torch.zeros(2, 4, 4, dtype=torch.bfloat16), ["dt: found torch.bfloat16", "torch.float32"]),
    ("B", torch.zeros(2, 3, 2, 6), ["B: found shape (2, 3, 2, 6)", "S = 4 comes from x"]),
    ("C", torch.zeros(2, 4, 1, 6), ["C: found shape (2, 4, 1, 6)", "G = 2 comes from B"]),
    ("A", torch.zeros(4, dtype=torch.bfloat16), ["A: found torch.bfloat16", "torch.float32"]),
    ("D", torch.zeros(1), ["D: found shape (1,)", "H = 4"]),
    ("dt_bias", torch.zeros(4, device="meta"), ["dt_bias: found device meta", "cpu, where x is"]),
    ("ssm_state", torch.zeros(3, 4, 6, 8), ["ssm_state: found shape (3, 4, 6, 8)", "P = 8 comes from x"]),
    ("ssm_state", torch.zeros(3, 4, 8, 6).int(), ["ssm_state: found torch.int32"]),
    ("ssm_state", torch.zeros(1, 4, 8, 6).expand(3, 4, 8, 6), ["ssm_state: found strides (0, 48, 6, 1)", "Expanded"]),
    ("x_ring", torch.zeros(3, 12, 4, 8).half(), ["x_ring: found torch.float16", "the type of x"]),
    ("x_ring", torch.zeros(3, 13, 4, 8), ["B_ring: found shape", "R = 13 comes from x_ring"]),
    ("B_ring", torch.zeros(2, 12, 2, 6), ["B_ring: found shape (2, 12, 2, 6)", "slots = 3 comes from ssm_state"]),
    ("dt_ring", torch.zeros(3, 12, 4).half(), ["dt_ring: found torch.float16", "torch.float32"]),
    ("past_lengths", int32([7, 0]).long(), ["past_lengths: found torch.int64", "torch.int32"]),
    ("past_lengths", int32([-1, 0]), ["past_lengths[0]: found -1"]),
    ("past_lengths", int32([2**31 - 4, 0]), ["past_lengths[0]: found 2147483644", "0 to 2147483643"]),
    ("past_lengths", int32([9, 0]), ["checkpoint_lengths[0]: found 0", "past_lengths[0] = 9", "1 to 9", "history = 8"]),
    ("checkpoint_lengths", int32([8, 0]), ["checkpoint_lengths[0]: found 8", "needed 0 to 7"]),
    ("num_tokens", int32([4, 5]), ["num_tokens[1]: found 5", "0 to 4"]),
    ("num_tokens", int32([4, -1]), ["num_tokens[1]: found -1"]),
    ("num_tokens", int32([4]), ["num_tokens: found shape (1,)", "batch = 2 comes from x"]),
    ("slot_ids", int32([3, 0]), ["slot_ids: found [3, 0]", "0 to 2"]),
    ("slot_ids", int32([-2, 0]), ["slot_ids: found [-2, 0]", "-1 in a padding row"]),
    ("slot_ids", int32([1, 1]), ["slot_ids: found [1, 1]", "at most once"]),
    ("history", 3, ["history: found 3 with max_draft_len=3", "at least 4"]),
    ("history", 9, ["rows R of x_ring, B_ring and dt_ring: found 12", "at least 13", "history=9 and max_draft_len=3"]),
    ("history", 8.0, ["history: found 8.0", "an int"]),
    ("max_draft_len", -1, ["max_draft_len: found -1"]),
    ("max_draft_len", True, ["max_draft_len: found True"]),
]

BAD_GATED_DELTA_NET: list[tuple[str, Any, list[str]]] = [
    ("q", torch.zeros(2, 4, 12), ["q: found shape (2, 4, 12)", "[batch, S, Hk, K]"]),
    ("q", torch.zeros(2, 4, 2, 6, dtype=torch.float16), ["k: found torch.float32", "torch.float16, the type of q"]),
    ("k", torch.zeros(2, 4, 2, 5), ["k: found shape (2, 4, 2, 5)", "K = 6 comes from q"]),
    ("v", torch.zeros(2, 4, 5, 8), ["a: found shape (2, 4, 4)", "Hv = 5 comes from v"]),
    ("a", torch.zeros(2, 4, 4, dtype=torch.bfloat16), ["a: found torch.bfloat16", "torch.float32"]),
    ("b", torch.zeros(2, 4, 2), ["b: found shape (2, 4, 2)", "Hv = 4 comes from v"]),
    ("A_log", torch.zeros(4, dtype=torch.bfloat16), ["A_log: found torch.bfloat16", "torch.float32"]),
    ("dt_bias", torch.zeros(1), ["dt_bias: found shape (1,)", "Hv = 4"]),
    ("ssm_state", torch.zeros(3, 4, 8, 6), ["ssm_state: found shape (3, 4, 8, 6)", "K = 6 comes from q"]),
    ("ssm_state", torch.zeros(1, 4, 6, 8).expand(3, 4, 6, 8), ["ssm_state: found strides (0, 48, 8, 1)", "Expanded"]),
    ("k_ring", torch.zeros(3, 12, 2, 6).half(), ["k_ring: found torch.float16", "the type of q"]),
    ("k_ring", torch.zeros(3, 12, 4, 6), ["k_ring: found shape (3, 12, 4, 6)", "Hk = 2 comes from q"]),
    ("u_ring", torch.zeros(3, 12, 4, 8).bfloat16(), ["u_ring: found torch.bfloat16", "torch.float32"]),
    ("u_ring", torch.zeros(3, 13, 4, 8), ["u_ring: found shape (3, 13, 4, 8)", "R = 12 comes from k_ring"]),
    ("g_ring", torch.zeros(3, 12, 4).half(), ["g_ring: found torch.float16", "torch.float32"]),
    ("past_lengths", int32([9, 0]), ["checkpoint_lengths[0]: found 0", "past_lengths[0] = 9", "history = 8"]),
    ("num_tokens", int32([4, 5]), ["num_tokens[1]: found 5", "0 to 4"]),
    ("slot_ids", int32([1, 1]), ["slot_ids: found [1, 1]", "at most once"]),
    ("slot_ids", int32([3, 0]), ["slot_ids: found [3, 0]", "0 to 2"]),
    ("history", 3, ["history: found 3 with max_draft_len=3", "at least 4"]),
    ("history", 9, ["rows R of k_ring, u_ring and g_ring: found 12", "at least 13", "history=9 and max_draft_len=3"]),
]

BAD_CONV: list[tuple[str, Any, list[str]]] = [
    ("x", torch.zeros(2, 6), ["x: found shape (2, 6)", "[batch, S, D]"]),
    ("weight", torch.zeros(6, 1, 4), ["weight: found shape (6, 1, 4)", "[D, d_conv]"]),
    ("weight", torch.zeros(6, 9), ["R_conv: found 7", "at least 9"]),
    ("weight", torch.zeros(6, 0), ["weight's taps d_conv: found 0", "at least 1"]),
    ("bias", "text", ["bias: found str", "a torch.Tensor or None"]),
    ("bias", torch.zeros(5), ["bias: found shape (5,)", "D = 6 comes from x"]),
    ("bias", torch.zeros(6).half(), ["bias: found torch.float16", "the type of x"]),
    ("conv_ring", torch.zeros(3, 6, 7), ["conv_ring: found shape (3, 6, 7)", "D = 6"]),
    ("conv_ring", torch.zeros(3, 3, 6), ["R_conv: found 3", "at least 4"]),
    ("conv_ring", torch.zeros(3, 1, 6).expand(3, 7, 6), ["conv_ring: found strides"]),
    ("slot_ids", int32([0, 0]), ["slot_ids: found [0, 0]"]),
    ("num_tokens", int32([5, 0]), ["num_tokens[0]: found 5"]),
    ("activation", "relu", ["activation: found 'relu'", "'silu' or None"]),
]

BAD_CONVENTIONAL: list[tuple[str, Any, list[str]]] = [
    ("ssm_snapshots", torch.zeros(3, 4, 4, 8, 6), ["ssm_snapshots' rows: found 4", "needed 5"]),
    ("ssm_snapshots", torch.zeros(3, 5, 4, 6, 8), ["ssm_snapshots: found shape"]),
    ("ssm_snapshots", torch.zeros(0, 5, 4, 8, 6), ["ssm_snapshots' slots: found 0", "at least 1"]),
    ("max_draft_len", -1, ["max_draft_len: found -1"]),
    ("max_draft_len", "3", ["max_draft_len: found '3'", "an int"]),
    ("max_draft_len", None, ["max_draft_len: found None", "an int"]),
    ("slot_ids", int32([0, 0]), ["slot_ids: found [0, 0]"]),
]

BAD_GATED_DELTA_NET_CONVENTIONAL: list[tuple[str, Any, list[str]]] = [
    ("ssm_snapshots", torch.zeros(3, 4, 4, 6, 8), ["ssm_snapshots' rows: found 4", "needed 5"]),
    ("ssm_snapshots", torch.zeros(3, 5, 4, 8, 6), ["ssm_snapshots: found shape"]),
    ("max_draft_len", -1, ["max_draft_len: found -1"]),
    ("slot_ids", int32([0, 0]), ["slot_ids: found [0, 0]"]),
]

OPS = (
    ("ops.mamba2", ops.mamba2, mamba2_arguments, BAD_MAMBA2),
    ("ops.causal_conv1d", ops.causal_conv1d, conv_arguments, BAD_CONV),
    ("ops.mamba2_conventional", ops.mamba2_conventional, mamba2_conventional_arguments, BAD_CONVENTIONAL),
    ("ops.gated_delta_net", ops.gated_delta_net, gated_delta_net_arguments, BAD_GATED_DELTA_NET),
    (
        "ops.gated_delta_net_conventional",
        ops.gated_delta_net_conventional,
        gated_delta_net_conventional_arguments,
        BAD_GATED_DELTA_NET_CONVENTIONAL,
    ),
)
ADVANCE = ("ops.advance", ops.advance, advance_arguments)


@pytest.mark.parametrize(
    ("name", "op", "make", "argument", "value", "said"),
    [
        pytest.param(name, op, make, argument, value, said, id=f"{name}-{said[0]}")
        for name, op, make, bad in OPS
        for argument, value, said in bad
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    name: str, op: Callable[..., Tensor], make: Callable[[], Arguments], argument: str, value: Any, said: list[str]
) -> None:
    arguments = make() | {argument: value}
    pools = {key: t for key, t in arguments.items() if isinstance(t, Tensor) and key != argument}
    before = {key: bits(t) for key, t in pools.items()}
    with pytest.raises(OpArgumentError) as caught:
        op(**arguments)
    assert str(caught.value).startswith(f"{name}: ")
    for part in said:
        assert part in str(caught.value), str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(torch.equal(bits(t), before[key]) for key, t in pools.items())


NO_DENSE_TENSOR: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("None", lambda t: None, "found NoneType; needed a torch.Tensor"),
    ("an array", lambda t: t.numpy(), "found ndarray; needed a torch.Tensor"),
    ("sparse", lambda t: t.nan_to_num().to_sparse(), "found layout torch.sparse_coo; needed a dense tensor"),
    (
        "nested",
        lambda t: torch.nested.as_nested_tensor([t.flatten()], layout=torch.jagged),
        "found a nested tensor; needed a dense tensor",
    ),
]


@pytest.mark.parametrize(("kind", "spoil", "said"), NO_DENSE_TENSOR, ids=[kind for kind, *_ in NO_DENSE_TENSOR])
@pytest.mark.parametrize(
    ("name", "op", "make", "argument"),
    [
        pytest.param(name, op, make, argument, id=f"{name}-{argument}")
        for name, op, make in (*((name, op, make) for name, op, make, _ in OPS), ADVANCE)
        for argument, value in make().items()
        if isinstance(value, Tensor)
    ],
)
def test_what_is_no_dense_tensor_is_refused_wherever_it_stands_and_nothing_is_written(
    name: str,
    op: Callable[..., Any],
    make: Callable[[], Arguments],
    argument: str,
    kind: str,
    spoil: Callable[[Tensor], Any],
    said: str,
) -> None:
    arguments = make()
    tensors = {key: t for key, t in arguments.items() if isinstance(t, Tensor)}
    before = {key: bits(t) for key, t in tensors.items()}
    if (argument, kind) == ("bias", "None"):
        assert op(**(arguments | {argument: None})).shape == arguments["x"].shape, "the one tensor that may be absent"
        return
    with pytest.raises(OpArgumentError) as caught:
        op(**(arguments | {argument: spoil(tensors[argument])}))
    assert str(caught.value).startswith(f"{name}: {argument}: {said}")
    assert all(torch.equal(bits(t), before[key]) for key, t in tensors.items())


@pytest.mark.parametrize(("op", "make"), [(op, make) for _, op, make, _ in OPS], ids=[name for name, *_ in OPS])
def test_the_arguments_that_the_bad_ones_are_made_from_are_good(
    op: Callable[..., Tensor], make: Callable[[], Arguments]
) -> None:
    arguments = make()
    assert op(**arguments).shape == arguments["x" if "x" in arguments else "v"].shape


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    arguments = mamba2_arguments()
    arguments |= {"B": torch.zeros(2, 4, 3, 6), "C": torch.zeros(2, 4, 3, 6), "B_ring": torch.zeros(3, 12, 3, 6)}
    with pytest.raises(OpArgumentError, match="heads H: found 4; needed a multiple of 3"):
        ops.mamba2(**arguments)


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (ops.gated_delta_net, gated_delta_net_arguments),
        (ops.gated_delta_net_conventional, gated_delta_net_conventional_arguments),
    ],
)
def test_key_heads_that_do_not_divide_the_value_heads_are_refused(
    op: Callable[..., Tensor], make: Callable[[], Arguments]
) -> None:
    arguments = make()
    arguments |= {"q": torch.zeros(2, 4, 3, 6), "k": torch.zeros(2, 4, 3, 6)}
    if "k_ring" in arguments:
        arguments["k_ring"] = torch.zeros(3, 12, 3, 6)
    with pytest.raises(OpArgumentError, match="heads Hv: found 4; needed a multiple of 3"):
        op(**arguments)


def test_gates_of_two_types_are_refused() -> None:
    arguments = gated_delta_net_arguments()
    arguments |= {name: arguments[name].half() for name in ("q", "k", "v", "k_ring", "b")}
    with pytest.raises(OpArgumentError, match=r"ops.gated_delta_net: b: found torch.float16; needed torch.float32"):
        ops.gated_delta_net(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "make", "names"),
    [
        ("mamba2", mamba2_arguments, ("x", "B", "ssm_state", "x_ring", "dt_ring")),
        ("gated_delta_net", gated_delta_net_arguments, ("q", "v", "ssm_state", "k_ring", "u_ring", "g_ring")),
    ],
)
def test_layouts_that_kernels_cannot_read_are_refused_on_the_device(
    op: str, make: Callable[[], Arguments], names: tuple[str, ...]
) -> None:
    arguments: Arguments = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in make().items()}
    for name in names:
        tensor = arguments[name]
        strided = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        with pytest.raises(OpArgumentError, match=rf"ops.{op}: {name}: found strides .* contiguous on CUDA"):
            getattr(ops, op)(**(arguments | {name: strided}))
