"""The adapters of other libraries against doubles that compute what those document, and the choice of settings."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench.peer_doubles import LAUNCHED, libraries
from trtllm_replayssm.bench import kernels
from trtllm_replayssm.bench.cases import KernelCase, make_cases, make_prefill_cases
from trtllm_replayssm.bench.comparison import compare
from trtllm_replayssm.bench.peers import flashinfer, mamba_ssm, registry, vllm
from trtllm_replayssm.bench.peers.common import PeerStep, ReplayedPeerStep
from trtllm_replayssm.bench.report import Measurement, PeerFailure
from trtllm_replayssm.bench.timing import Timing
from trtllm_replayssm.bench.tuning import Choices, setting_name, tune
from trtllm_replayssm.bench.workloads import ReplayStep, Workload
from trtllm_replayssm.errors import ConfigError, NumericsError

__all__ = ["libraries"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**17)


def make_case(
    state_dtype: str = "float32", max_draft_len: int = 0, batch_size: int = 6, head_dim: int = 64
) -> KernelCase:
    (case,) = make_cases([f"4x{head_dim}x32x2"], [batch_size], [state_dtype], [max_draft_len], history=8)
    return case


def steps(case: KernelCase) -> Iterator[PeerStep]:
    for peer in registry.peers_of(case):
        step = peer(case, CPU)
        assert isinstance(step, PeerStep)
        yield step


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("max_draft_len", "batch_size"), [(0, 1), (0, 6), (3, 1), (3, 6)])
def test_peers_are_called_as_they_document(state_dtype: str, max_draft_len: int, batch_size: int) -> None:
    found = list(steps(make_case(state_dtype, max_draft_len, batch_size)))
    implementations = {step.implementation for step in found}
    if max_draft_len:
        assert implementations == {
            "vllm selective_state_update",
            "flashinfer selective_state_update",
            "vllm replayssm_spec",
            "flashinfer checkpointing_ssu",
        }
    else:
        of_all = {peer.implementation for peer in registry.STEPS["mamba2"]}
        assert implementations == of_all - {"vllm replayssm_spec"}
    for step in found:
        step.setting = step.settings[0]
        assert 0 < step.check() <= 4e-3, step.implementation
        assert isinstance(step, ReplayedPeerStep) == (step.kind == "replay") == (step.flush_fraction is not None)


@pytest.mark.usefixtures("libraries")
def test_replaying_peers_flush_as_often_as_ours_and_count_the_bytes_of_a_replay() -> None:
    case = make_case(max_draft_len=3)
    ours = ReplayStep(case, CPU)
    for step in steps(case):
        if isinstance(step, ReplayedPeerStep):
            assert (step.flush_fraction, step.mean_pending) == (ours.flush_fraction, ours.mean_pending)
            assert step.traffic == ours.traffic
        else:
            assert step.traffic.state_written == 4 * step.traffic.state_read
    (token,) = (step for step in steps(make_case()) if isinstance(step, vllm.OutputOnly))
    assert token.flush_fraction == 1 / 8 and token.mean_pending == 3.5


@pytest.mark.usefixtures("libraries")
def test_a_wrong_peer_fails_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in steps(make_case()):
        step.setting = step.settings[0]
        launch = step.launch

        def wrong(step: int, index: int, launch: object = launch) -> Tensor:
            y: Tensor = launch(step, index)  # type: ignore[operator]
            y.view(len(y), -1)[:, 3] += 0.05 * y.abs().max()
            return y

        monkeypatch.setattr(step, "launch", wrong)
        with pytest.raises(NumericsError, match=step.implementation):
            step.check()


@pytest.mark.usefixtures("libraries")
def test_settings_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_SSU_MAIN_CTA_PER_SM", raising=False)
    case = make_case()
    for peer, launched in (
        (mamba_ssm.SelectiveStateUpdate, (8, 2)),
        (vllm.SelectiveStateUpdate, ((8, 2),)),
    ):
        step = peer(case, CPU)
        step.setting = {"BLOCK_SIZE_M": 8, "num_warps": 2}
        LAUNCHED.clear()
        step.launch(0, 0)
        assert LAUNCHED == [launched]
    spec = vllm.Speculative(make_case(max_draft_len=3), CPU)
    spec.setting = {"BLOCK_SIZE_M": 64, "num_warps": 2, "DSTATE_TILE": 64, "num_stages": 2}
    LAUNCHED.clear()
    spec.launch(0, 0)
    assert LAUNCHED == [("mamba2_spec_verify", (64, 2, 64, 2)), ("mamba2_spec_flush", (64, 2, 64, 2))]
    replay = flashinfer.Checkpointing(case, CPU)
    replay.setting = {"algorithm": "two-kernel", "FLASHINFER_SSU_MAIN_CTA_PER_SM": 4}
    LAUNCHED.clear()
    replay.launch(0, 0)
    replay.setting = {}
    replay.launch(0, 0)
    assert LAUNCHED == [({"algorithm": "two-kernel"}, {"FLASHINFER_SSU_MAIN_CTA_PER_SM": "4"}), ({}, {})]
    names = [setting_name(setting) for setting in replay.settings]
    assert names[0] == "as shipped" and len(names) == len(set(names)) > 8


@pytest.mark.usefixtures("libraries")
def test_a_head_size_without_a_kernel_is_left_out() -> None:
    assert any(isinstance(step, flashinfer.Checkpointing) for step in steps(make_case()))
    assert not any(isinstance(step, flashinfer.Checkpointing) for step in steps(make_case(head_dim=80)))


@pytest.mark.usefixtures("libraries")
def test_the_fastest_setting_that_runs_is_taken_and_remembered(tmp_path: Path) -> None:
    path, case = tmp_path / "settings.json", make_case()
    seconds = {"auto": 3.0, "simple": 1.0, "vertical": 2.0}

    def time(workload: Workload) -> Timing:
        assert isinstance(workload, flashinfer.SelectiveStateUpdate)
        return Timing(seconds[str(workload.setting["algorithm"])], 0.0)

    step = flashinfer.SelectiveStateUpdate(case, CPU)
    tune(step, case, time, Choices("A card", path))
    assert step.setting == {"algorithm": "simple"} and "horizontal" in LAUNCHED
    again = flashinfer.SelectiveStateUpdate(case, CPU)
    tune(again, case, lambda workload: pytest.fail("it was searched"), Choices("A card", path))
    assert again.setting == step.setting
    assert Choices("Another card", path).get(step.implementation, case) is None
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="peer_settings: .*settings.json is no file of settings"):
        Choices("A card", path)
    for nowhere in (tmp_path, tmp_path / "none" / "settings.json"):
        with pytest.raises(ConfigError, match="needed a file, or a new one in a folder that exists"):
            Choices("A card", nowhere)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("max_draft_len", [0, 3])
def test_a_setting_of_a_file_is_launched_as_one_that_was_searched(max_draft_len: int, tmp_path: Path) -> None:
    """The file sorts the names; a library that takes values by their place would take warps for columns."""
    case, path = make_case(max_draft_len=max_draft_len), tmp_path / "settings.json"
    for step in steps(case):
        for setting in step.settings:
            Choices("A card", path).put(step.implementation, case, setting)
            tune(step, case, lambda workload: pytest.fail("it was searched"), Choices("A card", path))
            assert list(step.setting.items()) == list(setting.items())


def timed_by_bytes(workload: Workload) -> Timing:
    return Timing(workload.traffic.total / 4e12, 0.0)


def test_a_run_holds_ours_to_the_peers_and_names_those_that_fail(
    libraries: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[str] = []  # as CUDA keeps a launch that failed, and tells whoever launches next
    make_zeros = torch.zeros

    def refuse(*arguments: object, **options: object) -> None:
        pending[:] = ["no kernel image"]
        raise RuntimeError("no kernel\nfor you")

    def zeros(*arguments: Any, **options: Any) -> Tensor:
        if pending:
            raise RuntimeError(pending.pop())
        return make_zeros(*arguments, **options)

    libraries.mamba.checkpointing_ssu = refuse
    monkeypatch.setattr("torch.zeros", zeros)
    monkeypatch.setattr(kernels, "_time", timed_by_bytes)
    monkeypatch.setattr(kernels, "time_briefly", timed_by_bytes)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    jobs = [job for job in kernels.plan([make_case()]) if job.peer is not None]
    peers = list(kernels.measure(jobs, CPU, copy_bandwidth=4e12, choices=Choices("A card")))
    (failure,) = (found for found in peers if isinstance(found, PeerFailure))
    assert not pending
    assert failure.implementation == "flashinfer checkpointing_ssu" and failure.reason == "RuntimeError: no kernel"
    measured = [found for found in peers if isinstance(found, Measurement)]
    assert {found.kind for found in measured} == {"conventional", "replay"}
    assert all(found.launch_settings for found in measured)
    fastest = min(found.us for found in measured if found.kind == "conventional")
    ours = measured[0].model_copy(update={"implementation": "replay mamba2", "kind": "replay", "us": 0.5 * fastest})
    (comparison,) = compare([ours, *measured])
    assert comparison.time_over_best["conventional"] == pytest.approx(0.5)
    assert set(comparison.peers) == {found.implementation for found in measured}
    assert comparison.best["replay"].startswith("vllm replayssm")
    assert compare([ours]) == ()


@pytest.mark.usefixtures("libraries")
def test_a_run_that_a_peer_ends_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An access to foreign memory: every launch of the process fails from then on."""
    make_zeros, is_broken = torch.zeros, [False]

    def refuse(*arguments: object, **options: object) -> None:
        is_broken[0] = True
        raise RuntimeError("an illegal memory access was encountered")

    def zeros(*arguments: Any, **options: Any) -> Tensor:
        if is_broken[0]:
            raise RuntimeError("an illegal memory access was encountered")
        return make_zeros(*arguments, **options)

    monkeypatch.setattr(mamba_ssm.SelectiveStateUpdate, "launch", refuse)
    monkeypatch.setattr("torch.zeros", zeros)
    monkeypatch.setattr(kernels, "_time", timed_by_bytes)
    monkeypatch.setattr(kernels, "time_briefly", timed_by_bytes)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    jobs = kernels.plan([make_case()])
    ours, failure, rest = kernels.measure(jobs, CPU, copy_bandwidth=4e12, choices=Choices("A card"))
    assert len(jobs) > 3 and isinstance(ours, Measurement) and ours.kind == "replay"
    assert isinstance(failure, PeerFailure) and failure.implementation == "mamba_ssm selective_state_update"
    assert isinstance(rest, PeerFailure) and "since mamba_ssm selective_state_update failed" in rest.reason


@pytest.mark.usefixtures("libraries")
def test_the_gate_of_a_prefill() -> None:
    (case,) = make_prefill_cases(["4x16x32x2"], [2], ["float32"], 100, history=8)
    (peer,) = registry.peers_of(case)
    scan = peer(case, CPU)
    assert isinstance(scan, mamba_ssm.ChunkScan)
    assert 0 < scan.check() <= 4e-3
    assert scan.launch(0, 0).shape == (2, 100, 4, 16)
    right = scan.final_states
    scan.final_states = lambda index: 1.1 * right(index)  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="last state of mamba_ssm"):
        scan.check()


def test_libraries_are_named_with_their_versions(libraries: SimpleNamespace) -> None:
    assert registry.libraries("mamba2") == {
        "mamba_ssm": "1.0 of mamba_ssm",
        "vllm": "1.0 of vllm",
        "flashinfer": "1.0 of flashinfer-python",
    }


def test_peers_that_are_not_installed_are_no_jobs() -> None:
    assert set(registry.libraries("mamba2").values()) == {registry.NOT_INSTALLED}
    assert registry.peers_of(make_case()) == []
    jobs = kernels.plan([make_case(), make_case(max_draft_len=3)])
    assert len(jobs) == 2 * 4 and all(job.peer is None for job in jobs)
