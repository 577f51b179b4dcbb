"""Other libraries' kernels in the place of the conventional op: how their states are addressed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench.conventional_drive import SLOTS, drive, largest_error
from tests.bench.peer_doubles import libraries
from tests.bench.test_report import MACHINE
from trtllm_replayssm import ops
from trtllm_replayssm.bench.e2e import conventional, models
from trtllm_replayssm.bench.recurrences import recurrence_of
from trtllm_replayssm.contract.geometry import Mamba2Geometry, ModelGeometry, ReplayGeometry
from trtllm_replayssm.ops.conventional import stand_ins

__all__ = ["libraries"]
CPU = torch.device("cpu")


@pytest.fixture
def geometry() -> ModelGeometry:
    small = Mamba2Geometry(n_heads=4, head_dim=16, d_state=32, n_groups=2, d_conv=4)
    return models.model_named("nemotron-nano-9b-v2", 1).model_copy(update={"mamba2": small})


def prefill(tensors: dict[str, Any], **options: int) -> torch.Tensor:
    """The op where the kernel is launched on a device; the rings' one slot is taken for any."""
    slots = len(tensors["ssm_state"])
    rings = {name: t.expand(slots, *t.shape[1:]).clone() for name, t in tensors.items() if name.endswith("_ring")}
    y: torch.Tensor = ops.mamba2(**{**tensors, **rings, **options})
    return y


@pytest.fixture
def tuned(
    libraries: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, geometry: ModelGeometry, request: pytest.FixtureRequest
) -> conventional.TunedSteps:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**17)
    monkeypatch.setattr(conventional, "tune", lambda *arguments: None)
    monkeypatch.setattr(conventional, "describe", lambda device: MACHINE)
    monkeypatch.setattr("trtllm_replayssm.plugins.launch.mamba2", prefill)
    return conventional.TunedSteps(geometry, ReplayGeometry(max_draft_len=request.param), SLOTS, CPU)


@pytest.mark.parametrize(("tuned", "max_draft_len"), [(0, 0), (3, 3)], indirect=["tuned"], ids=["T1", "T4"])
def test_tuned_kernels_continue_as_plain_torch_does(
    tuned: conventional.TunedSteps, geometry: ModelGeometry, max_draft_len: int
) -> None:
    replay = ReplayGeometry(max_draft_len=max_draft_len)
    with stand_ins({"mamba2": tuned.kernel}):
        found = drive(geometry, replay, CPU)
    assert largest_error(found, drive(geometry, replay, CPU)) < 4e-3
    assert tuned.implementation == "vllm selective_state_update, as shipped"


@pytest.mark.parametrize(("tuned", "window"), [(0, 1), (3, 4)], indirect=["tuned"], ids=["T1", "T4"])
def test_a_padded_prompt_gives_what_an_exact_one_does_and_touches_its_slot_alone(
    tuned: conventional.TunedSteps, geometry: ModelGeometry, window: int
) -> None:
    """As graphs need it: run once without a slot, then with more tokens in the window than the row has."""
    m = geometry.mamba2
    assert m is not None
    recurrence = recurrence_of(m)
    weights = recurrence.draw_weights(CPU)
    torch.manual_seed(1)
    count, padded = 21, 32
    snapshots = torch.randn(SLOTS, window + 1, *recurrence.state)
    convolved = torch.randn(1, padded, m.conv_dim, dtype=torch.bfloat16)
    packed = torch.randn(1, padded, m.d_in_proj, dtype=torch.bfloat16)

    def run(pool: torch.Tensor, slot: int, past: int, seq_len: int) -> torch.Tensor:
        inputs = recurrence.inputs(convolved[:, :seq_len], packed[:, :seq_len])
        numbers = {"past_lengths": past, "num_tokens": count if slot >= 0 else 0, "slot_ids": slot}
        counters = {name: torch.tensor([number], dtype=torch.int32) for name, number in numbers.items()}
        y: torch.Tensor = ops.mamba2_conventional(
            **inputs, **weights, ssm_snapshots=pool, **counters, max_draft_len=window - 1
        )
        return y[:, :count]

    pools = [snapshots.clone(), snapshots.clone()]
    with stand_ins({"mamba2": tuned.kernel}):
        for past in (0, count):
            run(pools[0], -1, 0, padded)
            found, expected = (run(pool, 3, past, tokens) for pool, tokens in zip(pools, (padded, count), strict=True))
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*pools)
    assert [torch.equal(pools[0][slot], snapshots[slot]) for slot in range(SLOTS)] == [True, True, True, False, True]


def test_without_the_libraries_plain_torch_runs_and_says_so(geometry: ModelGeometry) -> None:
    with conventional.tuned_conventional(geometry, ReplayGeometry(), SLOTS, CPU) as kernels:
        assert kernels == "plain torch"


def test_stand_ins_go_when_the_comparison_ends(geometry: ModelGeometry) -> None:
    def refuse(tensors: dict[str, torch.Tensor], max_draft_len: int) -> torch.Tensor:
        raise RuntimeError("called")

    with pytest.raises(RuntimeError, match="called"), stand_ins({"mamba2": refuse}):
        drive(geometry, ReplayGeometry(), CPU)
    drive(geometry, ReplayGeometry(), CPU)
