"""``trtllm-replayssm bench``: measurements on this machine's GPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtllm_replayssm.cli.bench_e2e import e2e
from trtllm_replayssm.cli.tables import rendered
from trtllm_replayssm.contract import defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trtllm_replayssm.bench.kernels import Job
    from trtllm_replayssm.bench.report import KernelReport
    from trtllm_replayssm.bench.tuning import Choices

app = typer.Typer()
app.command(short_help="Measure whole models under load, with replay and without.")(e2e)


@app.callback()
def _group() -> None:
    """Measure kernels and whole models on this machine's GPU."""


@app.command(short_help="Time the kernels beside the bytes that they must move.")
def kernels(
    family: Annotated[
        Literal["mamba2", "gdn"], typer.Option("--family", help="Which recurrence: Mamba-2 or Gated DeltaNet.")
    ] = "mamba2",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="<list>",
            help="nano9b, nano30b, super120b, or HEADSxHEAD_DIMxD_STATExGROUPS; with --family gdn qwen9b, qwen27b, "
            "qwen122b, or KEY_HEADSxVALUE_HEADSxKEY_DIMxVALUE_DIM. By default the first three.",
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
    prefill_tokens: Annotated[
        int, typer.Option("--prefill_tokens", help="Tokens of a prompt in the prefill part; 0 leaves it out.")
    ] = defaults.PREFILL_TOKENS,
    prefill_batch_sizes: Annotated[
        list[int] | None,
        typer.Option("--prefill_batch_sizes", metavar="<list>", help="Prompts of a prefill. By default 1 8."),
    ] = None,
    phases: Annotated[
        bool,
        typer.Option("--phases/--no-phases", help="Measure steps in which no row flushes and in which all do, too."),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="Measure other libraries' kernels, too, where they can be imported."),
    ] = True,
    peer_settings: Annotated[
        Path | None,
        typer.Option(
            "--peer_settings",
            help="JSON file of the peers' launch settings: those in it are taken without a search, others added.",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="<name>", help="cuda or cuda:<n>.")] = "cuda",
    output_dir: Annotated[
        Path | None,
        typer.Option("--output_dir", help="New or empty folder for kernels.json and the plot kernels.png."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time one step of the kernels, in whole flush cycles, and a prefill, beside the bytes that they must move.

    Every case is compared with the CPU first; a wrong one ends the run. Times are medians over replays of a CUDA graph
    whose launches rotate over more states than the cache holds. The limit is bytes over the bandwidth of a plain copy.
    Peers (mamba_ssm or fla, vllm, flashinfer) run in the fastest of several launch settings, and are compared with the
    CPU, too: a wrong one, or one that raises, is left out and named.
    """
    from trtllm_replayssm.bench import cases, machine, plot
    from trtllm_replayssm.bench.kernels import plan
    from trtllm_replayssm.bench.peers.registry import libraries
    from trtllm_replayssm.bench.shapes import SHAPES
    from trtllm_replayssm.bench.tuning import Choices
    from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder

    shapes, batches = shape or list(SHAPES[family]), batch_sizes or list(cases.BATCH_SIZES)
    states, drafts = state_dtype or list(cases.STATE_DTYPES), max_draft_len or list(cases.MAX_DRAFT_LENS)
    prompts = prefill_batch_sizes or list(cases.PREFILL_BATCH_SIZES)
    chosen = cases.make_cases(shapes, batches, states, drafts, history=history, family=family)
    prefills = cases.make_prefill_cases(shapes, prompts, states, prefill_tokens, history=history, family=family)
    cuda_device = machine.cuda_device(device)
    if output_dir is not None:
        plot.require_matplotlib()
        check_output(output_dir)
    options: dict[str, Sequence[object]] = {
        **{"family": [family], "shape": shapes, "batch_sizes": batches, "state_dtype": states},
        **{"max_draft_len": drafts, "history": [history]},
        **{"prefill_tokens": [prefill_tokens], "prefill_batch_sizes": prompts, "device": [device]},
    }
    flags = [*(["--phases"] if phases else []), *([] if peers else ["--no-peers"])]
    words = [str(word) for name, values in options.items() for word in (f"--{name}", *values)]
    command = shlex.join(["trtllm-replayssm", "bench", "kernels", *words, *flags])
    choices = Choices(machine.describe(cuda_device).card, peer_settings)
    versions = libraries(family) if peers else {}
    found = _measured(
        plan(chosen, prefills, with_peers=peers, with_phases=phases), cuda_device, command, choices, versions
    )
    if output_dir is not None:
        with staged_folder(output_dir) as folder:
            plot.write(found, folder)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    from trtllm_replayssm.cli.bench_tables import report_tables

    print(rendered(report_tables(found)))


def _measured(
    jobs: Sequence[Job], device: torch.device, command: str, choices: Choices, peers: dict[str, str]
) -> KernelReport:
    from tqdm import tqdm

    from trtllm_replayssm.bench import machine
    from trtllm_replayssm.bench.comparison import compare
    from trtllm_replayssm.bench.kernels import measure
    from trtllm_replayssm.bench.report import KernelReport, Measurement, PeerFailure
    from trtllm_replayssm.bench.timing import copy_bandwidth

    bandwidth = copy_bandwidth(device)
    measuring = measure(jobs, device, copy_bandwidth=bandwidth, choices=choices)
    # disable=None: drawn on a terminal alone
    found = tuple(tqdm(measuring, total=len(jobs), desc="measuring", disable=None))
    measurements = tuple(item for item in found if isinstance(item, Measurement))
    return KernelReport(
        command=command,
        machine=machine.describe(device),
        copy_gigabytes_per_s=bandwidth / 1e9,
        peers=peers,
        measurements=measurements,
        comparisons=compare(measurements),
        failures=tuple(item for item in found if isinstance(item, PeerFailure)),
    )
