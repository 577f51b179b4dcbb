"""``bench e2e`` on the CPU with the shipped model: what it counts, what it writes, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.meta.repository import ROOT
from trtllm_replayssm.bench.e2e import measure, models, modes, plot
from trtllm_replayssm.bench.e2e.breakdown import CATEGORIES, Breakdown, KernelTime
from trtllm_replayssm.bench.e2e.forced import ForcedAcceptance, RandomDrafter
from trtllm_replayssm.bench.e2e.report import EndToEndReport, Failure, compare
from trtllm_replayssm.cli.bench_e2e_tables import report_tables
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.cli.tables import rendered
from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.errors import CapacityError, ConfigError
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.llm import LLM

CPU = torch.device("cpu")
TINY = str(ROOT / "examples" / "tiny_hybrid" / "model")
COMMAND = [
    *("bench", "e2e", "--model", TINY, "--num_layers", "9", "--device", "cpu", "--batch_sizes", "2"),
    *("--max_draft_len", "0", "3", "--context", "40", "--num_steps", "3", "--prompt_len", "20-30"),
    *("--output_len", "12-16", "--num_requests", "5"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> EndToEndReport:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("e2e") / "found"
    assert main([*COMMAND, "--arrival_rate", "500", "--output_dir", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [plot.JSON_FILE, plot.PLOT_FILE]
    assert (folder / plot.PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    return EndToEndReport.model_validate_json((folder / plot.JSON_FILE).read_text())


def test_every_case_is_there_once(report: EndToEndReport) -> None:
    cases = [(m.case.mode, m.case.window, m.case.batch_size) for m in report.steps]
    assert cases == [("replay", 1, 2), ("conventional", 1, 2), ("replay", 4, 2), ("conventional", 4, 2)]
    assert [(m.case.mode, m.case.window, m.case.batch_size) for m in report.serving] == cases
    assert not report.failures and report.weights == "random"
    assert {m.case.kernels for m in report.steps if m.case.mode == "conventional"} == {"plain torch"}
    assert "--arrival_rate 500.0" in report.command and "--prompt_len 20-30" in report.command
    ran = [*(m.case for m in report.steps), *(m.case for m in report.serving)]
    drafts = {case.window: case.drafts for case in ran}
    assert drafts == {1: "none", 4: "random, acceptance of each forced with probability 0.7"}


def test_every_token_is_counted(report: EndToEndReport) -> None:
    for m in report.serving:
        assert m.mix.num_requests == 5 and 5 * 12 <= m.output_tokens <= 5 * 16
        assert m.tokens_per_s == pytest.approx(m.output_tokens / m.seconds)
        assert m.prompt_steps == 5 and m.decode_steps >= 12 // m.case.window
        assert 1.0 <= m.tokens_per_step <= m.case.window
        for times in (m.first_token, m.inter_token):
            assert 0 < times.p50 <= times.p90 <= times.p99 < 1e3 * m.seconds
        assert (m.acceptance_rate is None) == (m.case.window == 1)
    assert len({m.output_tokens for m in report.serving}) == 1  # the same requests in every mode


def test_steps_give_what_their_time_allows(report: EndToEndReport) -> None:
    for m in report.steps:
        assert m.tokens_per_s == pytest.approx(1e3 * m.case.batch_size * m.tokens_per_step / m.mean_step_ms)
        assert m.breakdown is None and m.memory_gib is None and m.num_steps == 3
        assert (m.tokens_per_step == 1.0) == (m.case.window == 1)


def test_replay_is_held_to_the_others(report: EndToEndReport) -> None:
    assert report.comparisons == compare([*report.steps, *report.serving])
    rates = {(m.case.mode, m.case.window): m.tokens_per_s for m in report.serving}
    plain, speculative = (c for c in report.comparisons if c.level == "serving")
    assert plain.over_conventional == pytest.approx(rates["replay", 1] / rates["conventional", 1])
    assert plain.over_plain is None and plain.over_plain_conventional is None
    assert speculative.over_conventional == pytest.approx(rates["replay", 4] / rates["conventional", 4])
    assert speculative.over_plain == pytest.approx(rates["replay", 4] / rates["replay", 1])
    assert speculative.over_plain_conventional == pytest.approx(rates["replay", 4] / rates["conventional", 1])


def test_tables_hold_every_measurement(report: EndToEndReport) -> None:
    found = Breakdown(
        us=dict.fromkeys(CATEGORIES, 1500.0),
        step_us=1500.0 * len(CATEGORIES),
        launches=321.0,
        kernels=(KernelTime(name="a kernel", category="GEMM", us=1500.0, launches=2.0),),
    )
    profiled = tuple(m.model_copy(update={"breakdown": found}) for m in report.steps)
    text = rendered(report_tables(report.model_copy(update={"steps": profiled})))
    rows = [line.split() for line in text.splitlines()]
    assert len([row for row in rows if row[:1] in (["replay"], ["conventional"]) and row[1:2] == ["fp32"]]) == 3 * 4
    assert len([row for row in rows if row[:2] in (["steps", "fp32"], ["serving", "fp32"])]) == 4
    assert "321" in text and "1.50" in text and "forced with probability 0.7" in text and "plain torch" in text


def test_wide_numbers_and_captions_stay_on_their_lines(report: EndToEndReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    slow = tuple(
        m.model_copy(
            update={
                name: getattr(m, name).model_copy(update={"p50": 1e4, "p90": 2e4, "p99": 3e4})
                for name in ("first_token", "inter_token")
            }
        )
        for m in report.serving
    )
    text = rendered(report_tables(report.model_copy(update={"serving": slow})))
    assert text.count("10000/20000/30000") == 2 * len(slow)
    assert all(f"\n{words}" in text for words in ("  tok/step: tokens that a row", "  accepted: of all drafts; GiB: "))
    assert [line for line in text.splitlines() if line[:1].islower()] == []


@pytest.mark.parametrize("acceptance", [0.6, 1.0])
def test_forced_acceptance_has_its_rate(acceptance: float) -> None:
    geometry = models.model_named(TINY).model_copy(update={"dtype": "float32"})
    replay = ReplayGeometry(max_draft_len=3)
    limits = EngineLimits(max_batch_size=8, max_input_len=120, max_seq_len=120, max_num_tokens=64)
    generated = []
    for mode in modes.MODES:
        with modes.open_mode(mode, geometry, replay, limits, CPU) as opened:
            executor = ForcedAcceptance(opened.executor, acceptance, seed=5)
            with LLM.from_executor(executor, drafter=RandomDrafter(3, geometry.vocab_size)) as llm:
                params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
                outputs = llm.generate([[1 + row, 7, 9, 4, 11] for row in range(8)], params, use_tqdm=False)
                metrics = llm.metrics()
        assert all(len(output.outputs[0].token_ids) == 100 for output in outputs)
        generated.append([output.outputs[0].token_ids for output in outputs])
        # Of a window's drafts the k-th enters with probability p^k; some 300 windows of 3 drafts know it to 0.05.
        expected = sum(acceptance**k for k in (1, 2, 3)) / 3
        assert metrics["acceptance_rate"] == pytest.approx(expected, abs=0.06 if 0 < acceptance < 1 else 0.02)
    # The lots are those of slot and position: both modes accept the same drafts.
    assert generated[0] == generated[1]


def test_what_does_not_fit_is_reported_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = models.model_named(TINY)
    options = measure.Options(
        geometry=geometry,
        requests=None,
        context=10,
        num_steps=2,
        acceptance=0.5,
        drafter="forced",
        max_num_tokens=64,
        with_breakdown=False,
        device=CPU,
    )

    def refuse(*arguments: Any, conventional: bool, **options: Any) -> TorchExecutor:
        if conventional:
            raise CapacityError("states: found 1 GiB; needed 2 GiB.")
        return TorchExecutor(*arguments, conventional=conventional, **options)

    monkeypatch.setattr(modes, "TorchExecutor", refuse)
    found = list(measure.measure(measure.plan(["float32"], [0], [1, 2], history=16), options))
    assert [isinstance(item, Failure) for item in found] == [False, True, False, True]
    assert isinstance(found[1], Failure) and found[1].reason.startswith("states: found 1 GiB")


def test_a_real_drafter_is_measured_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--level", "serving", "--mode", "replay", "--drafter", "ngram", "--json"]
    assert main([*COMMAND, *options]) == 0
    _, found = EndToEndReport.model_validate_json(capsys.readouterr().out).serving
    assert found.case.drafts == "n-gram, as many as pay, acceptance as it comes" and found.case.window == 4
    assert found.acceptance_rate is None or 0.0 <= found.acceptance_rate <= 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--acceptance", "1.5"], "acceptance: found 1.5; needed a probability"),
        (["--level", "step"], "level: found 'step'; needed steps, serving"),
        (["--mode", "both"], "mode: found 'both'; needed replay, conventional"),
        (["--state_dtype", "int4"], "state_dtype: found 'int4'; needed float32"),
        (["--batch_sizes", "0"], "batch_sizes: found 0; needed 1 or more"),
        (["--num_steps", "0"], "num_steps: found 0"),
        (["--num_requests", "0"], "num_requests: found 0"),
        (["--arrival_rate", "0"], "arrival_rate: found 0.0"),
        (["--arrival_rate", "nan"], "arrival_rate: found nan"),
        (["--arrival_rate", "inf"], "arrival_rate: found inf"),
        (["--context", "-1"], "context: found -1; needed 0 or more"),
        (["--seed", "-1"], "seed: found -1; needed 0 or more"),
        (["--seed", str(2**63)], f"seed: found {2**63}; needed at most {2**63 - 1}"),
        (["--prompt_len", "9-3"], "prompt_len: found '9-3'"),
        (["--history", "2"], "history: found 2 with max_draft_len=3"),
        (["--num_layers", "99"], "num_layers: found 99"),
        (["--model", "no-model"], "model: found 'no-model'"),
        (["--breakdown"], "breakdown: found device cpu; needed a CUDA device"),
        (["--device", "cuda:99"], "found"),
        (["--device", "gpu"], "device: found 'gpu'; needed cuda, cuda:<n> or cpu."),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_runs(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_the_command_says_what_runs_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "e2e", "--model", TINY]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: bench e2e: found no CUDA device") and "--device cpu" in stderr


def test_an_executor_made_elsewhere_is_served(tmp_path: Path) -> None:
    geometry = models.model_named(TINY)
    limits = EngineLimits(max_batch_size=2, max_input_len=30, max_seq_len=40, max_num_tokens=16)
    with modes.open_mode("replay", geometry, ReplayGeometry(), limits, CPU) as opened:
        with pytest.raises(ConfigError, match="drafter: found max_draft_len 2; needed at most 0"):
            LLM.from_executor(opened.executor, drafter=RandomDrafter(2, 10))
        with LLM.from_executor(opened.executor) as llm:
            assert llm.limits == limits and llm.tokenizer is None and repr(llm).startswith("LLM(executor='torch'")
            output = llm.generate([5, 6, 7], SamplingParams(max_tokens=99, temperature=0.0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 37
