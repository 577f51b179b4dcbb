"""The files of a run: its JSON document, and a plot of it."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_replayssm.bench.report import OURS, REPLAY, KernelReport, Measurement
from trtllm_replayssm.errors import BackendError

JSON_FILE = "kernels.json"
PLOT_FILE = "kernels.png"
INSTALL = "pip install 'matplotlib>=3.8'"
"""The package of the ``bench`` extra, as pyproject.toml lists it."""

Points = list[tuple[int, float]]


def require_matplotlib() -> None:
    """Refuse a plot that could not be drawn.

    Raises:
        BackendError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "bench: found no matplotlib; needed it for the plot in output_dir. Install it with: "
            f"{INSTALL}, or leave out --output_dir; --json prints the numbers."
        )


def write(report: KernelReport, folder: Path) -> None:
    """Write the JSON document and the plot."""
    (folder / JSON_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    plot(report, folder / PLOT_FILE)


def plot(report: KernelReport, path: Path) -> None:
    """Draw times over our limit against the batch size: a column per shape, a row per state type and window.

    Raises:
        BackendError: matplotlib is not installed.
    """
    require_matplotlib()
    figures: Any = importlib.import_module("matplotlib.figure")
    lines, conventional = curves(report.measurements), conventional_limits(report.measurements)
    shapes = list(dict.fromkeys(shape for shape, _ in lines))
    works = list(dict.fromkeys(work for _, work in lines))
    implementations = list(dict.fromkeys(name for of_panel in lines.values() for name in of_panel))
    colors = {name: f"C{index}" for index, name in enumerate(implementations)}
    figure = figures.Figure(figsize=(4.6 * len(shapes), 3.4 * len(works)), layout="constrained")
    panels = figure.subplots(len(works), len(shapes), sharey="row", squeeze=False)
    for row, work in zip(panels, works, strict=True):
        for panel, shape in zip(row, shapes, strict=True):
            _draw(panel, f"{shape}, {work}", lines.get((shape, work), {}), colors)
            _draw_conventional(panel, conventional.get((shape, work), []))
        row[0].set_ylabel("time / (our bytes / copy bandwidth)")
    for panel in panels[-1]:
        panel.set_xlabel("batch size")
    figure.suptitle(f"{report.machine.card}, copy {report.copy_gigabytes_per_s:,.0f} GB/s", fontsize="medium")
    figure.savefig(path, format="png", dpi=130)


def curves(measurements: Sequence[Measurement]) -> dict[tuple[str, str], dict[str, Points]]:
    """Return the points (batch size, time over our limit) by shape and work, and by implementation.

    All curves of a panel have one denominator, ours, so that the lower of two is the faster.
    """
    own_work = ("convolution", "with convolution")
    limits = {_case(m): m.limit_us for m in measurements if m.implementation in OURS or m.kind in own_work}
    found: dict[tuple[str, str], dict[str, Points]] = {}
    for m in measurements:
        if _case(m) in limits:
            of_panel = found.setdefault((m.shape, _work(m)), {})
            of_panel.setdefault(m.implementation, []).append((m.batch_size, m.us / limits[_case(m)]))
    return found


def conventional_limits(measurements: Sequence[Measurement]) -> dict[tuple[str, str], Points]:
    """Return, over our limit, that of a step that writes a state per token: what no conventional kernel goes below."""
    found: dict[tuple[str, str], Points] = {}
    for m in measurements:
        if m.implementation in REPLAY.values() and m.conventional_limit_us is not None:
            found.setdefault((m.shape, _work(m)), []).append((m.batch_size, m.conventional_limit_us / m.limit_us))
    return found


def _case(m: Measurement) -> tuple[str, str, int]:
    return m.shape, _work(m), m.batch_size


def _work(m: Measurement) -> str:
    if m.kind == "convolution":
        return f"convolution, T = {m.window}"
    window = f"prefill of {m.window}" if m.kind == "prefill" else f"T = {m.window}"
    window += ", with convolution" if m.kind == "with convolution" else ""
    window += ", one phase" if m.kind == "one phase" else ""
    return f"{m.state_dtype} state, {window}"


def _draw(panel: Any, title: str, of_panel: dict[str, Points], colors: dict[str, str]) -> None:
    panel.set_title(title, fontsize="medium")
    if not of_panel:
        return
    for implementation, points in of_panel.items():
        is_peer = implementation not in OURS and len(of_panel) > 1
        style = {"marker": "x", "linestyle": "--", "linewidth": 1} if is_peer else {"marker": "o", "linewidth": 2}
        panel.plot(*zip(*sorted(points), strict=True), label=implementation, color=colors[implementation], **style)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    # A small batch is far above its limit, and the differences that matter are near it.
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    batches = sorted({batch for points in of_panel.values() for batch, _ in points})
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")


def _draw_conventional(panel: Any, points: Points) -> None:
    if points:
        label = "conventional: its bytes at copy bandwidth"
        panel.plot(*zip(*sorted(points), strict=True), label=label, color="gray", linestyle=":", linewidth=1.5)
        panel.legend(fontsize="x-small")
