"""Peers of Gated DeltaNet without their libraries: bytes, cursors, memory, and what their outputs are compared with."""

from types import SimpleNamespace

import pytest
import torch

from trtllm_replayssm.bench.cases import KernelCase, make_cases, make_prefill_cases
from trtllm_replayssm.bench.peers import fla, registry
from trtllm_replayssm.bench.peers import flashinfer_gated_delta_net as flashinfer
from trtllm_replayssm.bench.peers import vllm_gated_delta_net as vllm
from trtllm_replayssm.bench.peers.common import PeerStep, ReplayedPeerStep, expected_output
from trtllm_replayssm.bench.peers.gated_delta_net import COLUMNS, GaplessInputs, with_columns
from trtllm_replayssm.bench.recurrences import recurrence_of
from trtllm_replayssm.bench.workloads import ReplayStep

CPU = torch.device("cpu")
TOKEN_STEPS = (fla.FusedRecurrent, vllm.PackedDecode, flashinfer.Decode, vllm.Replay)
WINDOW_STEPS = (vllm.SigmoidGating, flashinfer.Snapshots, vllm.Speculative, flashinfer.UCacheFlush)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**17)


def make_case(max_draft_len: int = 0, state_dtype: str = "bfloat16", shape: str = "2x4x64x32") -> KernelCase:
    (case,) = make_cases([shape], [6], [state_dtype], [max_draft_len], history=16, family="gdn")
    return case


def every_peer() -> list[tuple[type[PeerStep], int]]:
    return [(peer, 0) for peer in TOKEN_STEPS] + [(peer, 3) for peer in WINDOW_STEPS]


def test_the_registry_has_them_all() -> None:
    assert set(registry.STEPS["gdn"]) == {*TOKEN_STEPS, *WINDOW_STEPS}
    assert registry.PREFILLS["gdn"] == (fla.Chunked,)
    assert registry.peers_of(make_case()) == [], "no library is installed where this runs"


@pytest.mark.parametrize(("peer", "max_draft_len"), every_peer(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_peer_stands_on_is_what_our_op_computes_with(peer: type[PeerStep], max_draft_len: int) -> None:
    """States have another order of axes, rings another layout: the CPU op must get its own, whatever the cursors."""
    torch.manual_seed(0)
    step, recurrence = peer(make_case(max_draft_len), CPU), recurrence_of(make_case().geometry)
    for launch, index, rows in step.telling():
        chosen = torch.from_numpy(rows)
        history = step.before(launch, index, chosen).on_cpu()
        assert history.state.shape == (len(rows), 4, 64, 32)
        inputs = {name: tensor[chosen] for name, tensor in step.packed.inputs(index).items()}
        y = expected_output(recurrence, inputs, step.packed.weights, history)
        assert y.shape == (len(rows), 1 + max_draft_len, 4, 32) and y.isfinite().all() and y.abs().amax() > 0.01
        if isinstance(step, ReplayedPeerStep):
            assert history.pending.max() <= 16 and {name: t.shape[2:] for name, t in history.rings.items()} == {
                "k_ring": (2, 64),
                "u_ring": (4, 32),
                "g_ring": (4,),
            }
            lengths = history.rings["k_ring"].float().norm(dim=-1)
            assert (lengths - 1).abs().max() < 1.5e-3, "the libraries' rings hold keys of length 1"


def test_bytes_of_a_peer_that_replays_are_those_that_it_keeps() -> None:
    """Worked by hand: k and u in 16 bits and g in fp32, where ours keeps u in fp32."""
    row, state = 2 * (2 * 64 + 4 * 32) + 4 * 4, 2 * 4 * 64 * 32
    inputs, outputs = 2 * (2 * 2 * 64 + 4 * 32 + 2 * 4), 2 * 4 * 32
    token = vllm.Replay(make_case(), CPU)
    assert (token.flush_fraction, token.mean_pending) == (1 / 16, 7.5)
    assert token.traffic.total == pytest.approx(6 * (state * 17 / 16 + (7.5 + 1) * row + inputs + outputs))
    ours = ReplayStep(make_case(max_draft_len=3), CPU)
    assert ours.mean_pending is not None and ours.flush_fraction is not None
    for peer in (vllm.Speculative, flashinfer.UCacheFlush):
        step = peer(make_case(max_draft_len=3), CPU)
        assert (step.flush_fraction, step.mean_pending) == (ours.flush_fraction, ours.mean_pending)
        assert step.traffic.ring_read == pytest.approx(6 * ours.mean_pending * row)
        assert step.traffic.ring_written == 6 * 4 * row < ours.traffic.ring_written
        rest = {"ring_read": 0.0, "ring_written": 0.0}
        assert step.traffic._replace(**rest) == ours.traffic._replace(**rest)
    for conventional, window in ((vllm.PackedDecode, 1), (vllm.SigmoidGating, 4)):
        found = conventional(make_case(max_draft_len=window - 1), CPU).traffic
        assert found.total == 6 * (state * (1 + window) + window * (inputs + outputs))


def test_each_takes_the_cases_that_it_has_kernels_for() -> None:
    wide = "16x32x128x128"
    token, window = make_case(0, "float32", wide), make_case(3, "bfloat16", wide)
    assert fla.FusedRecurrent.supports(token) and not fla.FusedRecurrent.supports(make_case(0, "bfloat16", wide))
    assert vllm.PackedDecode.supports(token) and not vllm.PackedDecode.supports(window)
    assert vllm.SigmoidGating.supports(window) and not vllm.SigmoidGating.supports(token)
    assert flashinfer.UCacheFlush.supports(window)
    for other in (token, make_case(3, "float32", wide), make_case(1, "bfloat16", wide), make_case(3)):
        assert not flashinfer.UCacheFlush.supports(other)
    # These three need more of their libraries than a module to call.
    assert not any(peer.supports(token) for peer in (vllm.Replay, flashinfer.Decode, flashinfer.Snapshots))
    (prefill,) = make_prefill_cases([wide], [1], ["float32"], 64, history=16, family="gdn")
    assert fla.Chunked.supports(prefill)


def test_sums_of_a_ring_and_what_they_grow_by() -> None:
    step = flashinfer.UCacheFlush(make_case(max_draft_len=3), CPU)
    rows = torch.arange(6)
    history = step.before(0, 0, rows)
    origin = step._origin[0, 0].long()
    for row in range(6):
        order = (origin[row] + torch.arange(16)) % 32
        assert torch.allclose(history.rings["g_ring"][row].cumsum(0), step._sums[0, row][:, order].T, atol=1e-6)
    assert all(torch.equal(step._rounded[name].float(), weight) for name, weight in step.packed.weights.items())


def test_a_setting_changes_the_columns_of_a_block_and_the_blocks_of_a_head() -> None:
    launched: list[tuple[object, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *arguments, **options: launched.append((grid, arguments, options))

    kernel = Kernel()
    library = SimpleNamespace(kernel=kernel)
    for setting in ({}, COLUMNS[0]):
        with with_columns(library, "kernel", setting, axis=1):
            library.kernel[(1, 4, 7)]("q", BV=32, num_warps=4, num_stages=3)
    assert library.kernel is kernel
    assert launched == [
        ((1, 4, 7), ("q",), {"BV": 32, "num_warps": 4, "num_stages": 3}),
        ((1, 16, 7), ("q",), {"BV": 8, "num_warps": 1, "num_stages": 3}),
    ]


def test_inputs_without_gaps_hold_the_same_numbers() -> None:
    step = vllm.SigmoidGating(make_case(max_draft_len=3), CPU)
    gapless = GaplessInputs(step.packed, step.num_sets)
    for index in range(step.num_sets):
        for name, tensor in step.packed.inputs(index).items():
            assert not tensor.is_contiguous() and gapless[index][name].is_contiguous()
            assert torch.equal(gapless[index][name], tensor)
