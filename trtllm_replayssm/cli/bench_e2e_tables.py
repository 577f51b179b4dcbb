"""What a benchmark of whole models found, as tables."""

from collections.abc import Iterable

from rich.table import Table

from trtllm_replayssm.bench.e2e.breakdown import CATEGORIES, COPIES, OTHER
from trtllm_replayssm.bench.e2e.latency import Percentiles
from trtllm_replayssm.bench.e2e.report import (
    Case,
    Comparison,
    EndToEndReport,
    Failure,
    ServingMeasurement,
    StepMeasurement,
)
from trtllm_replayssm.cli.tables import facts_table, new_table
from trtllm_replayssm.contract.geometry import LAYER_LETTERS, ModelGeometry

_SHORT = {"attention": "attn", "sampling": "choice"}
_ABBREVIATED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def report_tables(report: EndToEndReport) -> list[Table]:
    """Return what a run found as tables: the machine, each level, where a step's time goes, and the ratios."""
    machine = report.machine
    smi = machine.nvidia_smi
    cases = [*(m.case for m in report.steps), *(m.case for m in report.serving)]
    facts: dict[str, object] = {
        "card": f"{machine.card}, compute capability {machine.compute_capability}",
        "driver": smi.get("driver_version", "not known"),
        "clocks": f"SM {smi['clocks.sm']} MHz, memory {smi['clocks.mem']} MHz" if "clocks.mem" in smi else "not known",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "model": f"{report.model}, {report.weights} weights: {_layers(report.geometry)}",
        **_kernels(cases),
        **_drafts(cases),
        "command": report.command,
    }
    made = [facts_table("Machine", facts)]
    if report.steps:
        made.append(_steps_table(report.steps))
    if report.serving:
        made.append(_serving_table(report.serving))
    if any(m.breakdown is not None for m in report.steps):
        made.append(_breakdown_table(report.steps))
    if any(c.over_conventional is not None or c.over_plain is not None for c in report.comparisons):
        made.append(_compared_table(report.comparisons))
    if report.failures:
        made.append(_failures_table(report.failures))
    return made


def _layers(geometry: ModelGeometry) -> str:
    letters = "".join(LAYER_LETTERS[kind] for kind in geometry.layer_types)
    return f"{len(letters)} residual layers {letters}, {geometry.dtype}"


def _kernels(cases: Iterable[Case]) -> dict[str, object]:
    named = dict.fromkeys(f"T = {c.window}, B = {c.batch_size}: {c.kernels}" for c in cases if c.mode == "conventional")
    return {"conventional steps": "\n".join(named)} if named else {}


def _drafts(cases: Iterable[Case]) -> dict[str, object]:
    named = dict.fromkeys(c.drafts for c in cases if c.window > 1)
    return {"drafts": ", ".join(named)} if named else {}


def _case_cells(case: Case) -> tuple[str, ...]:
    return case.mode, _ABBREVIATED[case.state_dtype], str(case.window), str(case.batch_size)


def _steps_table(steps: tuple[StepMeasurement, ...]) -> Table:
    numbers = ("T", "B", "ms", "mean", "p90", "host", "tok/step", "tok/s", "GiB")
    table = new_table("Steady steps", "mode", "state", *numbers, numbers=numbers)
    table.caption = (
        f"  {steps[0].context} tokens of context; ms: median of {steps[0].num_steps} steps, greedy choice included;\n"
        "  host: ms to queue one, the device's own where its queue is full;\n"
        "  tok/step: tokens that a row keeps; GiB: most device memory in use\n"
    )
    table.caption_justify = "left"
    for m in steps:
        times = (f"{value:.2f}" for value in (m.step_ms, m.mean_step_ms, m.p90_step_ms, m.host_ms))
        table.add_row(
            *_case_cells(m.case), *times, f"{m.tokens_per_step:.2f}", f"{m.tokens_per_s:,.0f}", _gib(m.memory_gib)
        )
    return table


def _serving_table(serving: tuple[ServingMeasurement, ...]) -> Table:
    numbers = ("T", "B", "tok/s", "first token", "between", "tok/step", "accepted", "GiB")
    table = new_table("Requests through LLM", "mode", "state", *numbers, numbers=numbers)
    table.padding = (0, 1, 0, 0)  # three percentiles in a cell fill 100 columns
    mix = serving[0].mix
    arrival = "all at once" if mix.arrival_rate is None else f"{mix.arrival_rate:g} a second"
    counts = dict.fromkeys(str(m.mix.num_requests) for m in serving)
    table.caption = (
        f"  {', '.join(counts)} requests, {arrival}; prompts of {mix.prompt_len} tokens, outputs of {mix.output_len};\n"
        "  first token, between tokens: ms, p50/p90/p99; tok/step: tokens that a row keeps;\n"
        "  accepted: of all drafts; GiB: most device memory in use\n"
    )
    table.caption_justify = "left"
    for m in serving:
        table.add_row(
            *_case_cells(m.case),
            f"{m.tokens_per_s:,.0f}",
            _percentiles(m.first_token),
            _percentiles(m.inter_token),
            f"{m.tokens_per_step:.2f}",
            "-" if m.acceptance_rate is None else f"{m.acceptance_rate:.0%}",
            _gib(m.memory_gib),
        )
    return table


def _breakdown_table(steps: tuple[StepMeasurement, ...]) -> Table:
    shown = [name for name in CATEGORIES if name != COPIES]
    numbers = ("T", "B", *(_SHORT.get(name, name) for name in shown), "sum", "kernels")
    table = new_table("Where a step's time goes, ms", "mode", "state", *numbers, numbers=numbers)
    table.padding = (0, 1, 0, 0)
    table.caption = "  other: norms, activations, copies; gaps: no kernel runs; kernels: launched in a step\n"
    table.caption_justify = "left"
    for m in steps:
        if m.breakdown is not None:
            us = {**m.breakdown.us, OTHER: m.breakdown.us[OTHER] + m.breakdown.us[COPIES]}
            parts = (f"{us[name] / 1e3:.2f}" for name in shown)
            total, launches = f"{m.breakdown.step_us / 1e3:.2f}", f"{m.breakdown.launches:.0f}"
            table.add_row(*_case_cells(m.case), *parts, total, launches)
    return table


def _compared_table(comparisons: tuple[Comparison, ...]) -> Table:
    numbers = ("T", "B", "tok/s", "/conventional", "/plain", "/plain conventional")
    table = new_table("Replay beside the other ways to decode", "level", "state", *numbers, numbers=numbers)
    table.caption = (
        "  tok/s over those of the conventional decode\n  with the same window, of replay without drafts,\n  of the "
        "conventional decode without drafts\n"
    )
    table.caption_justify = "left"
    for c in comparisons:
        ratios = (c.over_conventional, c.over_plain, c.over_plain_conventional)
        table.add_row(
            *(c.level, _ABBREVIATED[c.state_dtype], str(c.window), str(c.batch_size), f"{c.tokens_per_s:,.0f}"),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return table


def _failures_table(failures: tuple[Failure, ...]) -> Table:
    table = new_table("Not measured", "mode", "state", "T", "B", "reason", numbers=("T", "B"))
    for f in failures:
        table.add_row(f.mode, _ABBREVIATED[f.state_dtype], str(f.window), str(f.batch_size), f.reason)
    return table


def _percentiles(p: Percentiles) -> str:
    return "/".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in (p.p50, p.p90, p.p99))


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
