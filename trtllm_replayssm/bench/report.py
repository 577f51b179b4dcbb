"""What a run found: one JSON document, and a plot of it."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

from trtllm_replayssm.bench.machine import Machine
from trtllm_replayssm.contract.geometry import ActivationDtype, Frozen, Mamba2Geometry, StateDtype
from trtllm_replayssm.errors import BackendError

JSON_FILE = "kernels.json"
PLOT_FILE = "kernels.png"
REPLAY = "replay mamba2"
INSTALL = "pip install 'matplotlib>=3.8'"
"""The package of the ``bench`` extra, as pyproject.toml lists it."""


class Measurement(Frozen):
    """One implementation of one case.

    Attributes:
        implementation: what was launched.
        shape: name of the shape.
        geometry: the shape.
        activation_dtype: of inputs, outputs and rings.
        state_dtype: of the state in memory; None for the convolution.
        history: most pending rows; None for the convolution.
        window: tokens per row and step, T.
        batch_size: rows of a step.
        sets: disjoint sets of slots that the launches rotate over.
        launches: in the graph that was timed.
        flush_fraction: rows that wrote their checkpoint, of all rows; None without replay.
        mean_pending: pending rows that a row read; None without replay.
        bytes: of a launch, by kind.
        us: median time of a launch in microseconds.
        spread: slowest replay of the graph minus the fastest, as a share of the median.
        gigabytes_per_s: bytes over time.
        share_of_copy: the same, as a share of the copy bandwidth.
        limit_us: bytes over the copy bandwidth.
        time_over_limit: us over limit_us.
        conventional_limit_us: the same limit for a step without replay, one state written per token.
        output_error: largest error in the comparison with the CPU, relative to the token's largest output.
    """

    implementation: str
    shape: str
    geometry: Mamba2Geometry
    activation_dtype: ActivationDtype
    state_dtype: StateDtype | None
    history: int | None
    window: int
    batch_size: int
    sets: int
    launches: int
    flush_fraction: float | None
    mean_pending: float | None
    bytes: dict[str, float]
    us: float
    spread: float
    gigabytes_per_s: float
    share_of_copy: float
    limit_us: float
    time_over_limit: float
    conventional_limit_us: float | None
    output_error: float


class KernelReport(Frozen):
    """A whole run.

    Attributes:
        format: of this document.
        command: the command line, every option written out.
        machine: device, versions, clocks.
        copy_gigabytes_per_s: torch's copy within the device in this run, read plus written.
        peers: library -> version, or "not installed".
        measurements: in the order of the run.
    """

    format: Literal["trtllm-replayssm bench kernels 1"] = "trtllm-replayssm bench kernels 1"
    command: str
    machine: Machine
    copy_gigabytes_per_s: float
    peers: dict[str, str]
    measurements: tuple[Measurement, ...]


def require_matplotlib() -> None:
    """Refuse a plot that could not be drawn.

    Raises:
        BackendError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "bench kernels: found no matplotlib; needed it for the plot in output_dir. Install it with: "
            f"{INSTALL}, or leave out --output_dir; --json prints the numbers."
        )


def write(report: KernelReport, folder: Path) -> None:
    """Write the JSON document and the plot."""
    (folder / JSON_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    plot(report, folder / PLOT_FILE)


def plot(report: KernelReport, path: Path) -> None:
    """Draw time over limit against the batch size, one panel per shape.

    Raises:
        BackendError: matplotlib is not installed.
    """
    require_matplotlib()
    figures: Any = importlib.import_module("matplotlib.figure")
    lines = _lines(report)
    figure = figures.Figure(figsize=(4.2 * len(lines), 4.2), layout="constrained")
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for panel, (shape, series) in zip(panels, lines.items(), strict=True):
        for label, points in series.items():
            style = "o-" if label.startswith(REPLAY) else "x--"
            panel.plot(*zip(*sorted(points), strict=True), style, label=label.removeprefix(f"{REPLAY}, "))
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        # A small batch is far above its limit, and the differences that matter are near it.
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
        batches = sorted({batch for points in series.values() for batch, _ in points})
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set(title=shape, xlabel="batch size")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    panels[0].set_ylabel("time / (bytes / copy bandwidth)")
    figure.suptitle(f"{report.machine.card}, copy {report.copy_gigabytes_per_s:,.0f} GB/s", fontsize="medium")
    figure.savefig(path, format="png", dpi=130)


def _lines(report: KernelReport) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points (batch size, time over limit) by shape and label."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for m in report.measurements:
        state = [f"{m.state_dtype} state"] if m.state_dtype else []
        label = ", ".join([m.implementation, *state, f"T = {m.window}"])
        lines.setdefault(m.shape, {}).setdefault(label, []).append((m.batch_size, m.time_over_limit))
    return lines
