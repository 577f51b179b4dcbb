"""The files of a run: its JSON document, and a plot of it."""

import importlib
from pathlib import Path
from typing import Any

from trtllm_replayssm.bench.e2e.report import EndToEndReport, Level, Measurement
from trtllm_replayssm.bench.plot import Points, require_matplotlib

JSON_FILE = "e2e.json"
PLOT_FILE = "e2e.png"

Panels = dict[tuple[Level, str], dict[str, Points]]


def write(report: EndToEndReport, folder: Path) -> None:
    """Write the JSON document and the plot."""
    (folder / JSON_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    plot(report, folder / PLOT_FILE)


def plot(report: EndToEndReport, path: Path) -> None:
    """Draw output tokens per second against the batch size: a column per level, a row per state type.

    Raises:
        BackendError: matplotlib is not installed.
    """
    require_matplotlib()
    figures: Any = importlib.import_module("matplotlib.figure")
    panels = curves(report)
    levels = list(dict.fromkeys(level for level, _ in panels)) or ["steps"]
    states = list(dict.fromkeys(state for _, state in panels)) or ["float32"]
    figure = figures.Figure(figsize=(5.0 * len(levels), 3.8 * len(states)), layout="constrained")
    axes = figure.subplots(len(states), len(levels), squeeze=False)
    for row, state in zip(axes, states, strict=True):
        for panel, level in zip(row, levels, strict=True):
            _draw(panel, f"{_TITLES[level]}, {state} state", panels.get((level, state), {}))
        row[0].set_ylabel("output tokens/s")
    for panel in axes[-1]:
        panel.set_xlabel("batch size")
    figure.suptitle(f"{report.model}, random weights, {report.machine.card}", fontsize="medium")
    figure.savefig(path, format="png", dpi=130)


_TITLES: dict[Level, str] = {"steps": "steady steps", "serving": "requests through LLM"}


def curves(report: EndToEndReport) -> Panels:
    """Return the points (batch size, tokens per second) by level and state type, and by mode and window."""
    found: Panels = {}
    measurements: tuple[tuple[Level, tuple[Measurement, ...]], ...] = (
        ("steps", report.steps),
        ("serving", report.serving),
    )
    for level, of_level in measurements:
        for m in of_level:
            of_panel = found.setdefault((level, m.case.state_dtype), {})
            of_panel.setdefault(f"{m.case.mode}, T = {m.case.window}", []).append((m.case.batch_size, m.tokens_per_s))
    return found


def _draw(panel: Any, title: str, of_panel: dict[str, Points]) -> None:
    panel.set_title(title, fontsize="medium")
    if not of_panel:
        return
    for name, points in of_panel.items():
        style = {"marker": "x", "linestyle": "--"} if name.startswith("conventional") else {"marker": "o"}
        panel.plot(*zip(*sorted(points), strict=True), label=name, **style)
    batches = sorted({batch for points in of_panel.values() for batch, _ in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
