"""``trtllm-replayssm bench``: measurements on this machine's GPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from trtllm_replayssm.cli.tables import facts_table, new_table, rendered
from trtllm_replayssm.contract import defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trtllm_replayssm.bench.kernels import Job
    from trtllm_replayssm.bench.report import KernelReport, Measurement

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Measure the kernels on this machine's GPU."""


@app.command()
def kernels(
    family: Annotated[Literal["mamba2"], typer.Option("--family", help="Which recurrence.")] = "mamba2",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="<list>",
            help="nano9b, nano30b, super120b, or HEADSxHEAD_DIMxD_STATExGROUPS. By default the first three.",
        ),
    ] = None,
    batch_sizes: Annotated[
        list[int] | None,
        typer.Option("--batch_sizes", metavar="<list>", help="Rows of a step. By default 1 8 32 128 512."),
    ] = None,
    state_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--state_dtype", metavar="<list>", help="Of the states in memory. By default float32 and bfloat16."
        ),
    ] = None,
    max_draft_len: Annotated[
        list[int] | None,
        typer.Option("--max_draft_len", metavar="<list>", help="Draft tokens of a step, T - 1. By default 0 and 3."),
    ] = None,
    history: Annotated[
        int, typer.Option("--history", help="Most pending tokens before a state is written.")
    ] = defaults.HISTORY,
    device: Annotated[str, typer.Option("--device", metavar="<name>", help="cuda or cuda:<n>.")] = "cuda",
    output_dir: Annotated[
        Path | None,
        typer.Option("--output_dir", help="New or empty folder for kernels.json and the plot kernels.png."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time one step of the kernels, in whole flush cycles, beside the bytes that it must move.

    Every case is compared with the CPU first; a wrong one ends the run. Times are medians over replays of a CUDA graph
    whose launches rotate over more states than the cache holds. The limit is bytes over the bandwidth of a plain copy.
    """
    from trtllm_replayssm.bench import cases, machine, report
    from trtllm_replayssm.bench.kernels import plan
    from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder

    shapes, batches = shape or list(cases.SHAPES), batch_sizes or list(cases.BATCH_SIZES)
    states, drafts = state_dtype or list(cases.STATE_DTYPES), max_draft_len or list(cases.MAX_DRAFT_LENS)
    chosen = cases.make_cases(shapes, batches, states, drafts, history=history)
    if output_dir is not None:
        report.require_matplotlib()
        check_output(output_dir)
    cuda_device = machine.cuda_device(device)
    options: dict[str, Sequence[object]] = {
        **{"family": [family], "shape": shapes, "batch_sizes": batches, "state_dtype": states},
        **{"max_draft_len": drafts, "history": [history], "device": [device]},
    }
    words = [str(word) for name, values in options.items() for word in (f"--{name}", *values)]
    found = _measured(plan(chosen), cuda_device, shlex.join(["trtllm-replayssm", "bench", "kernels", *words]))
    if output_dir is not None:
        with staged_folder(output_dir) as folder:
            report.write(found, folder)
    print(found.model_dump_json(indent=2) if as_json else rendered(report_tables(found)))


def _measured(jobs: Sequence[Job], device: torch.device, command: str) -> KernelReport:
    from tqdm import tqdm

    from trtllm_replayssm.bench import machine, peers
    from trtllm_replayssm.bench.kernels import measure
    from trtllm_replayssm.bench.report import KernelReport
    from trtllm_replayssm.bench.timing import copy_bandwidth

    bandwidth = copy_bandwidth(device)
    measuring = measure(jobs, device, copy_bandwidth=bandwidth)
    # disable=None: drawn on a terminal alone
    measurements = tuple(tqdm(measuring, total=len(jobs), desc="measuring", disable=None))
    return KernelReport(
        command=command,
        machine=machine.describe(device),
        copy_gigabytes_per_s=bandwidth / 1e9,
        peers=peers.peers(),
        measurements=measurements,
    )


def report_tables(report: KernelReport) -> list[Table]:
    """Return what a run found as tables: the machine, then one table per implementation."""
    machine = report.machine
    smi = machine.nvidia_smi
    facts: dict[str, object] = {
        "card": f"{machine.card}, compute capability {machine.compute_capability}",
        "copy bandwidth": f"{report.copy_gigabytes_per_s:,.0f} GB/s, read + written",
        "driver": smi.get("driver_version", "not known"),
        "clocks": f"SM {smi['clocks.sm']} MHz, memory {smi['clocks.mem']} MHz" if "clocks.mem" in smi else "not known",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "peers": ", ".join(f"{name} {version}" for name, version in report.peers.items()),
        "command": report.command,
    }
    if set(report.peers.values()) == {"not installed"}:
        facts["peers"] = f"none importable ({', '.join(report.peers)} not installed)"
    by_implementation: dict[str, list[Measurement]] = {}
    for measurement in report.measurements:
        by_implementation.setdefault(measurement.implementation, []).append(measurement)
    return [facts_table("Machine", facts), *(_measured_table(*item) for item in by_implementation.items())]


def _measured_table(implementation: str, measurements: list[Measurement]) -> Table:
    numbers = ("T", "B", "us", "spread", "GB/s", "% of copy", "time/limit", "flush", "pend.")
    table = new_table(implementation, "shape", "state", *numbers, numbers=numbers)
    if any(m.flush_fraction is not None for m in measurements):
        table.caption = "  flush: rows that write their state; pend.: mean pending rows\n"
        table.caption_justify = "left"
    for m in measurements:
        table.add_row(
            *(m.shape, m.state_dtype or "-", str(m.window), str(m.batch_size)),
            *(f"{m.us:.1f}", f"{m.spread:.1%}", f"{m.gigabytes_per_s:,.0f}", f"{m.share_of_copy:.0%}"),
            f"{m.time_over_limit:.2f}",
            "-" if m.flush_fraction is None else f"{m.flush_fraction:.3f}",
            "-" if m.mean_pending is None else f"{m.mean_pending:.1f}",
        )
    return table
