"""A short run on a device gives sensible numbers, and the peers that are installed pass their gate."""

import json
import warnings

import pytest
import torch

from trtllm_replayssm.bench.cases import make_cases, make_prefill_cases
from trtllm_replayssm.bench.gate import OUTPUT_BOUND, ROUNDED_BOUND
from trtllm_replayssm.bench.peers.registry import peers_of
from trtllm_replayssm.bench.shapes import Family
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import NumericsError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family", "shape", "op"), [("mamba2", "16x64x128x8", "mamba2"), ("gdn", "4x8x128x128", "gated_delta_net")]
)
def test_a_short_run_gives_sensible_numbers(
    capsys: pytest.CaptureFixture[str], family: str, shape: str, op: str
) -> None:
    options = ["--family", family, "--shape", shape, "--batch_sizes", "64", "--state_dtype", "float32", "--no-peers"]
    options += ["--max_draft_len", "0", "3", "--prefill_tokens", "256", "--prefill_batch_sizes", "8"]
    assert main(["bench", "kernels", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {(m["implementation"], m["window"]): m for m in report["measurements"]}
    replay, prefill = f"replay {op}", f"prefill {op}"
    assert {(replay, 1), (replay, 4), ("causal_conv1d", 1), ("causal_conv1d", 4)} <= set(found)
    assert report["copy_gigabytes_per_s"] > 50
    assert found[prefill, 256]["output_error"] <= 1e-2
    for m in (m for m in found.values() if m["kind"] != "prefill"):
        # Wrong units, or launches that are counted wrongly, are further off. Nearer bounds, and one for the spread,
        # would be of other processes on the device: they may slow down the copy, any kernel and any run of it.
        assert 1 / 32 < m["time_over_limit"] < 500
        is_rounded = "convolution" in m["implementation"]
        assert m["spread"] >= 0 and 0 < m["output_error"] <= (ROUNDED_BOUND if is_rounded else OUTPUT_BOUND)
    assert found[replay, 1]["flush_fraction"] == 1 / 16
    assert 0.1 < found[replay, 4]["flush_fraction"] < 0.3


@pytest.mark.parametrize(("family", "shape"), [("mamba2", "16x64x128x8"), ("gdn", "4x8x128x128")])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_installed_peers_agree_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch, family: Family, shape: str, state_dtype: str
) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**22)
    cases = make_cases([shape], [1, 6], [state_dtype], [0, 3], history=16, family=family)
    cases += make_prefill_cases([shape], [2], [state_dtype], 200, history=16, family=family)
    for case in cases:
        for peer in peers_of(case):
            try:
                assert peer(case, torch.device("cuda", 0)).check() > 0
            except (NumericsError, AssertionError):
                raise
            except Exception as refusal:  # noqa: BLE001 - a library may lack the kernel, and says so in its own way
                warnings.warn(f"{case}: {peer.implementation} was not compared: {refusal}", stacklevel=1)
