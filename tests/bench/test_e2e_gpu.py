"""On a device: other libraries' kernels decode as plain torch does, and a few layers of true shape are measured."""

import pytest
import torch

from tests.bench.conventional_drive import SLOTS, drive, largest_error
from trtllm_replayssm.bench.e2e import conventional, models
from trtllm_replayssm.bench.e2e.report import EndToEndReport
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.contract.geometry import ReplayGeometry

pytestmark = pytest.mark.gpu

BOUND = 1.5e-2  # two roundings of a 16-bit output, and the libraries' fast exponentials


@pytest.mark.parametrize("max_draft_len", [0, 3])
@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "qwen3.5-4b"])
def test_tuned_kernels_continue_as_plain_torch_does(name: str, max_draft_len: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    geometry = models.model_named(name, 1)
    replay = ReplayGeometry(max_draft_len=max_draft_len)
    with conventional.tuned_conventional(geometry, replay, SLOTS, device) as kernels:
        # Where the library is not installed plain torch runs, and must be itself.
        found = drive(geometry, replay, device)
    assert largest_error(found, drive(geometry, replay, device)) < BOUND, kernels


@pytest.mark.parametrize("graphs", [[], ["--no-cuda_graphs"]], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "qwen3.5-4b"])
def test_a_few_layers_of_true_shape_are_measured(
    name: str, graphs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    num_layers = {"nemotron-nano-9b-v2": "15", "qwen3.5-4b": "8"}[name]
    options = ["--num_layers", num_layers, "--batch_sizes", "4", "--max_draft_len", "0", "3", "--mode", "replay"]
    lengths = ["--context", "100", "--num_steps", "4", "--prompt_len", "20", "--output_len", "12-20"]
    assert main(["bench", "e2e", "--model", name, *options, *lengths, *graphs, "--breakdown", "--json"]) == 0
    report = EndToEndReport.model_validate_json(capsys.readouterr().out)
    assert not report.failures and len(report.steps) == len(report.serving) == 2
    for m in report.steps:
        assert m.breakdown is not None
        for category in ("state", "GEMM", "sampling"):
            assert m.breakdown.us[category] > 0, category
        # A step of Mamba-2 may convolve by itself.
        assert m.breakdown.us["conv"] > 0 or name.startswith("nemotron")
        # Windows of several tokens may attend in matrix products.
        assert m.breakdown.us["attention"] > 0 or m.case.window > 1
        assert sum(m.breakdown.us.values()) == pytest.approx(m.breakdown.step_us)
        assert m.memory_gib is not None and m.memory_gib > 0
