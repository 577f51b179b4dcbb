"""The JSON document, the plot, the tables, and the command's errors."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.bench.peer_doubles import libraries
from trtllm_replayssm.bench import kernels, machine, plot
from trtllm_replayssm.bench.cases import make_cases, make_prefill_cases
from trtllm_replayssm.bench.comparison import compare
from trtllm_replayssm.bench.machine import Machine
from trtllm_replayssm.bench.peers import registry
from trtllm_replayssm.bench.plot import JSON_FILE, PLOT_FILE
from trtllm_replayssm.bench.report import REPLAY, KernelReport, Measurement
from trtllm_replayssm.bench.shapes import Family, family_of
from trtllm_replayssm.bench.timing import Timing
from trtllm_replayssm.cli.bench_tables import report_tables
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.cli.tables import rendered

__all__ = ["libraries"]
COPY_BANDWIDTH = 4e12


MACHINE = Machine(
    card="A card",
    compute_capability="9.0",
    multiprocessors=132,
    memory_bytes=2**37,
    l2_bytes=60 * 2**20,
    nvidia_smi={"driver_version": "580.1", "clocks.sm": "1980", "clocks.mem": "3201"},
    versions={"torch": "2.11"},
)


SHAPE: dict[Family, str] = {"mamba2": "4x16x32x2", "gdn": "2x4x32x32"}
OP: dict[Family, str] = {"mamba2": "mamba2", "gdn": "gated_delta_net"}
every_family = pytest.mark.parametrize("family", SHAPE)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, family: Family) -> KernelReport:
    """A report of invented times over real workloads."""
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**17)
    shapes = [SHAPE[family]]
    cases = make_cases(shapes, [2, 8], ["float32", "bfloat16"], [0, 3], history=16, family=family)
    prefills = make_prefill_cases(shapes, [2], ["float32"], 80, history=16, family=family)
    return KernelReport(
        command=f"trtllm-replayssm bench kernels --shape {SHAPE[family]}",
        machine=MACHINE,
        copy_gigabytes_per_s=COPY_BANDWIDTH / 1e9,
        peers={"mamba_ssm": "not installed"},
        measurements=tuple(invented(job) for job in kernels.plan(cases, prefills)),
    )


def invented(job: kernels.Job) -> Measurement:
    assert job.make is not None
    workload = job.make(job.case, torch.device("cpu"))
    timing = Timing(1.25 * workload.traffic.total / COPY_BANDWIDTH, 0.01)
    return kernels.summarize(job.case, workload, timing, 1e-3, COPY_BANDWIDTH)


@every_family
def test_the_document_says_what_ran_and_reads_back(made: KernelReport, family: Family) -> None:
    implementations = [f"replay {OP[family]}"] * 8 + [f"prefill {OP[family]}"] + ["causal_conv1d"] * 4
    implementations += ["mamba2 with convolution", "convolution, then mamba2"] * 8 if family == "mamba2" else []
    assert [m.implementation for m in made.measurements] == implementations
    document = json.loads(made.model_dump_json())
    assert KernelReport.model_validate(document) == made
    assert document["format"] == "trtllm-replayssm bench kernels 4"
    assert {family_of(m.geometry) for m in KernelReport.model_validate(document).measurements} == {family}
    first = document["measurements"][0]
    assert {name: first[name] for name in ("shape", "state_dtype", "window", "batch_size", "history")} == {
        "shape": SHAPE[family],
        "state_dtype": "float32",
        "window": 1,
        "batch_size": 2,
        "history": 16,
    }
    assert first["flush_fraction"] == 1 / 16 and first["mean_pending"] == 8.5
    assert first["time_over_limit"] == pytest.approx(1.25)
    assert first["share_of_copy"] == pytest.approx(1 / 1.25)
    assert first["gigabytes_per_s"] == pytest.approx(sum(first["bytes"].values()) / first["us"] / 1e3)
    assert first["us"] == pytest.approx(1.25 * first["limit_us"])
    assert first["conventional_limit_us"] > first["limit_us"]
    assert first["launches"] == 16 * first["sets"]
    prefill = document["measurements"][8]
    assert (prefill["kind"], prefill["window"], prefill["history"]) == ("prefill", 80, None)


@every_family
def test_tables_hold_every_measurement(made: KernelReport, family: Family) -> None:
    text = rendered(report_tables(made))
    rows = [line.split() for line in text.splitlines() if SHAPE[family] in line and "--shape" not in line]
    assert len(rows) == len(made.measurements)
    assert "none importable (mamba_ssm not installed)" in text
    first = made.measurements[0]
    assert first.conventional_limit_us is not None
    gain = f"{first.conventional_limit_us / first.us:.2f}"
    assert rows[0][:4] == [SHAPE[family], "float32", "1", "2"] and rows[0][-4:] == ["1.25", gain, "0.062", "8.5"]
    convolution = next(row for row, m in zip(rows, made.measurements, strict=True) if m.kind == "convolution")
    assert convolution[-1] == "1.25", "a convolution has no state"


@every_family
def test_ours_stands_beside_the_peers_of_its_family(made: KernelReport, family: Family) -> None:
    """Every peer of the registry, with invented times: one table for each work, which fits a terminal."""
    ours = [m for m in made.measurements if m.kind != "convolution"]
    of_family = registry.STEPS[family]
    kinds = [(peer.implementation, peer.kind) for peer in of_family]
    peers = [
        m.model_copy(update={"implementation": name, "kind": kind, "us": m.us * (2 + index)})
        for m in ours
        if m.kind == "replay"
        for index, (name, kind) in enumerate(kinds)
    ]
    found = compare([*ours, *peers])
    assert len(found) == 8 and {c.implementation for c in found} == {REPLAY[OP[family]]}
    assert all(set(c.peers) == {name for name, _ in kinds} for c in found)
    first_replay = [kind for _, kind in kinds].index("replay")
    assert all(
        c.time_over_best == pytest.approx({"conventional": 1 / 2, "replay": 1 / (2 + first_replay)}) for c in found
    )
    tables = report_tables(made.model_copy(update={"comparisons": found}))[-2:]
    text = rendered(tables)
    for window in (1, 4):
        assert f"{REPLAY[OP[family]]} beside its peers, T = {window}" in text
    assert all(name in " ".join(text.split()) for name, _ in kinds)


@every_family
def test_the_plot_and_the_document_are_written(made: KernelReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.write(made, tmp_path)
    assert (tmp_path / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    assert KernelReport.model_validate_json((tmp_path / JSON_FILE).read_text()) == made


@every_family
def test_conventional_steps_have_a_limit_without_any_peer(made: KernelReport, family: Family) -> None:
    """One state read and one written for every token of a window, and no rings: all but 2 and 5 of ours."""
    limits = plot.conventional_limits(made.measurements)
    assert set(limits) == {
        (SHAPE[family], f"{state} state, T = {window}") for state in ("float32", "bfloat16") for window in (1, 4)
    }
    for (_, work), points in limits.items():
        assert [batch for batch, _ in points] == [2, 8]
        most = 2 if work.endswith("T = 1") else 5
        assert all(1 < ratio < most for _, ratio in points)
    assert limits[SHAPE[family], "float32 state, T = 4"] > limits[SHAPE[family], "float32 state, T = 1"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a device: everything but the times is real."""
    monkeypatch.setattr("trtllm_replayssm.bench.cases.BYTES_BETWEEN_USES", 2**17)
    monkeypatch.setattr(machine, "cuda_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(machine, "describe", lambda device: MACHINE)
    monkeypatch.setattr("trtllm_replayssm.bench.timing.copy_bandwidth", lambda device: COPY_BANDWIDTH)
    monkeypatch.setattr(kernels, "time_graph", lambda launch_all, num_launches, **runs: Timing(1e-6, 0.0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def small(family: Family = "mamba2") -> list[str]:
    command = ["bench", "kernels", "--shape", SHAPE[family], "--batch_sizes", "1", "4", "--state_dtype", "float32"]
    # mamba2 goes without saying
    return [*command, "--prefill_tokens", "0", *(["--family", family] if family != "mamba2" else [])]


@every_family
def test_the_command_prints_and_writes_what_it_measured(
    stand_in: None, family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main([*small(family), "--output_dir", str(tmp_path / "found"), "--json"]) == 0
    printed = KernelReport.model_validate_json(capsys.readouterr().out)
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == [JSON_FILE, PLOT_FILE]
    assert KernelReport.model_validate_json((tmp_path / "found" / JSON_FILE).read_text()) == printed
    assert len(printed.measurements) == 2 * 2 + 2 * 2 + (2 * 2 * 2 if family == "mamba2" else 0)
    assert printed.command == (
        f"trtllm-replayssm bench kernels --family {family} --shape {SHAPE[family]} --batch_sizes 1 4 --state_dtype "
        "float32 --max_draft_len 0 3 --history 16 --prefill_tokens 0 --prefill_batch_sizes 1 8 --device cuda"
    )
    assert main(small(family)) == 0
    text = capsys.readouterr().out
    assert "time/limit" in text and f"replay {OP[family]}" in text


@pytest.mark.usefixtures("stand_in", "libraries")
@every_family
def test_phases_are_measured_where_asked_for_and_are_nobodys_peers(
    family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for flags in ([], ["--phases"]):
        assert main([*small(family), *flags, "--json"]) == 0
        found.append(KernelReport.model_validate_json(capsys.readouterr().out))
    without, report = found
    phases = [m for m in report.measurements if m.kind == "one phase"]
    names = {f"replay {OP[family]}, {phase}" for phase in ("no row flushes", "all rows flush")}
    assert len(phases) == 2 * 2 * 2 and {m.implementation for m in phases} == names
    assert all(m.history == 16 and m.flush_fraction == float("all" in m.implementation) for m in phases)
    assert len(report.measurements) == len(without.measurements) + len(phases)
    assert report.comparisons == without.comparisons
    assert plot.curves(report.measurements) == plot.curves(without.measurements)
    assert "--phases" in report.command and "--phases" not in without.command
    text = " ".join(rendered(report_tables(report)).split())
    assert all(name in text for name in names)


@pytest.mark.usefixtures("stand_in")
def test_the_report_names_the_libraries_of_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for family in SHAPE:
        assert main([*small(family), "--json"]) == 0
        found[family] = set(KernelReport.model_validate_json(capsys.readouterr().out).peers)
    assert found == {"mamba2": {"mamba_ssm", "vllm", "flashinfer"}, "gdn": {"fla", "vllm", "flashinfer"}}


@pytest.mark.usefixtures("stand_in", "libraries")
def test_the_command_measures_peers_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    options = ["bench", "kernels", "--shape", "4x64x32x2", "--batch_sizes", "2", "8", "--state_dtype", "float32"]
    options += ["--max_draft_len", "0", "--prefill_tokens", "48", "--prefill_batch_sizes", "2"]
    settings = ["--peer_settings", str(tmp_path / "settings.json")]
    assert main([*options, *settings, "--output_dir", str(tmp_path / "found")]) == 0
    text = capsys.readouterr().out
    found = KernelReport.model_validate_json((tmp_path / "found" / JSON_FILE).read_text())
    assert {m.implementation for m in found.measurements if m.kind == "conventional"} == {
        f"{library} selective_state_update" for library in ("mamba_ssm", "vllm", "flashinfer")
    }
    assert not found.failures and len(found.comparisons) == 3
    assert found.measurements[0].implementation == REPLAY["mamba2"]
    *steps, prefill = found.comparisons
    assert all(set(step.time_over_best) == {"conventional", "replay"} and len(step.peers) == 6 for step in steps)
    assert prefill.peers.keys() == {"mamba_ssm mamba_chunk_scan_combined"} and set(prefill.best) == {"prefill"}
    panels = plot.curves(found.measurements)
    assert set(panels) == {
        ("4x64x32x2", work)
        for work in (
            "float32 state, T = 1",
            "float32 state, prefill of 48",
            "convolution, T = 1",
            "float32 state, T = 1, with convolution",
        )
    }
    assert len(panels["4x64x32x2", "float32 state, T = 1"]) == 7
    assert "replay mamba2 beside its peers, T = 1" in text and "prefill mamba2 beside its peers, T = 48" in text
    assert len(json.loads((tmp_path / "settings.json").read_text())) == 2 * 6 + 1
    assert main([*options, "--no-peers"]) == 0
    text = capsys.readouterr().out
    assert "left out" in text and "flashinfer" not in text and "--no-peers" in text.replace("\n", " ")


def test_a_wrong_output_ends_the_run_untimed(
    stand_in: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtllm_replayssm.bench.workloads.relative_error", lambda found, expected: 0.5)
    monkeypatch.setattr(kernels, "time_graph", None)
    assert main(small()) == 2
    assert capsys.readouterr().err.startswith("error: 4x16x32x2, float32 state, T = 1, batch 1: checkpoint: found an ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--device", "cpu"], "bench kernels: found device cpu; needed a CUDA device"),
        (["--device", "gpu:0"], "device: found 'gpu:0'; needed cuda or cuda:<n>."),
        (["--device", "meta"], "device: found 'meta'; needed cuda or cuda:<n>."),
        (["--shape", "nano9b", "nano10b"], "shape: found 'nano10b'; needed nano9b"),
        (
            ["--family", "gdn", "--shape", "nano9b"],
            "shape: found 'nano9b'; needed qwen9b, qwen27b, qwen122b or",
        ),
        (["--shape", "qwen9b"], "shape: found 'qwen9b'; needed nano9b"),
        (["--batch-sizes", "8", "0"], "batch_sizes: found 0"),
        (["--state_dtype", "float32", "int8"], "state_dtype: found 'int8'"),
        (["--max_draft_len", "0", "3", "--history", "3"], "history: found 3 with max_draft_len=3"),
        (["--family", "rwkv"], "'rwkv'"),
        (["8"], "8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *options]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and sentence in stderr and stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--shape", "nano9b", "--batch_sizes", "1", "8"]) == 2
    assert capsys.readouterr().err.startswith("error: bench kernels: found no CUDA device")


def test_a_plot_that_cannot_be_drawn_or_would_overwrite_is_refused_at_once(
    stand_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["bench", "kernels", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(options) == 2
    assert capsys.readouterr().err.startswith("error: bench: found no matplotlib")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "mine").touch()
    assert main(options) == 2
    assert "found a folder that is not empty" in capsys.readouterr().err


def test_the_commands_of_the_group_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "kernels" in capsys.readouterr().out
    assert main(["bench", "kernels", "--help"]) == 0
    assert "--batch_sizes" in capsys.readouterr().out
