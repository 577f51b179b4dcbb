"""``trtllm-replayssm bench e2e``: whole models under load, with replay and without."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from trtllm_replayssm.cli.tables import rendered
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import StateDtype
from trtllm_replayssm.errors import ConfigError

# torch counts in 64 bits, and numbers of tensors are added.
_LARGEST_SEED = 2**63 - 1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trtllm_replayssm.bench.e2e.measure import Job, Options
    from trtllm_replayssm.bench.e2e.report import EndToEndReport


def e2e(
    model: Annotated[
        str,
        typer.Option("--model", help="nemotron-nano-9b-v2, qwen3.5-4b, qwen3.5-9b, or a folder with a config.json."),
    ] = "nemotron-nano-9b-v2",
    num_layers: Annotated[
        int | None,
        typer.Option("--num_layers", help="Keep the first residual layers alone, for a small card; all by default."),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            metavar="<list>",
            help="steps: steady decode steps without a serving loop; serving: requests through LLM. By default both.",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="<list>", help="By default replay and conventional."),
    ] = None,
    batch_sizes: Annotated[
        list[int] | None,
        typer.Option("--batch_sizes", metavar="<list>", help="Requests that run at a time. By default 1 64 256."),
    ] = None,
    state_dtype: Annotated[
        list[str] | None,
        typer.Option("--state_dtype", metavar="<list>", help="Of the recurrent states. By default float32."),
    ] = None,
    max_draft_len: Annotated[
        list[int] | None,
        typer.Option("--max_draft_len", metavar="<list>", help="Draft tokens of a step, T - 1. By default 0."),
    ] = None,
    drafter: Annotated[
        Literal["forced", "ngram"],
        typer.Option(
            "--drafter",
            help="forced: random drafts that the target is made to accept with a given probability; ngram: prompt "
            "lookup, measured as it is (serving alone).",
        ),
    ] = "forced",
    acceptance: Annotated[
        float, typer.Option("--acceptance", help="Probability that a forced draft is kept, those before it being so.")
    ] = 0.7,
    history: Annotated[
        int, typer.Option("--history", help="Most pending tokens before a state is written.")
    ] = defaults.HISTORY,
    context: Annotated[int, typer.Option("--context", help="Committed tokens of every row of steady steps.")] = 1024,
    num_steps: Annotated[int, typer.Option("--num_steps", help="Steady steps that are timed.")] = 32,
    prompt_len: Annotated[
        str, typer.Option("--prompt_len", metavar="<n or low-high>", help="Tokens of a request's prompt.")
    ] = "512",
    output_len: Annotated[
        str, typer.Option("--output_len", metavar="<n or low-high>", help="Tokens that a request generates.")
    ] = "128",
    num_requests: Annotated[int | None, typer.Option("--num_requests", help="By default twice the batch size.")] = None,
    arrival_rate: Annotated[
        float | None,
        typer.Option(
            "--arrival_rate", help="Mean requests per second of a Poisson process. By default all come at once."
        ),
    ] = None,
    max_num_tokens: Annotated[
        int, typer.Option("--max_num_tokens", help="Tokens of the longest prompt piece that runs in one step.")
    ] = defaults.MAX_NUM_TOKENS,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda_graphs/--no-cuda_graphs", help="Replay steps as CUDA graphs.")
    ] = True,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Profile a few steady steps: where their time goes, by kernel.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of all random numbers.")] = 0,
    device: Annotated[str, typer.Option("--device", metavar="<name>", help="cuda, cuda:<n>, or cpu.")] = "cuda",
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="New or empty folder for e2e.json and the plot e2e.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure a whole model of random weights, made on the device: tokens per second, latencies, where time goes.

    Replay and the conventional decode run in the same runtime, one after the other, on the same requests. The
    conventional steps run vLLM's tuned kernels where they can be imported; else plain torch, and the tables say so.
    """
    from trtllm_replayssm.bench import machine, plot
    from trtllm_replayssm.bench.e2e import measure, models
    from trtllm_replayssm.bench.e2e import plot as e2e_plot
    from trtllm_replayssm.bench.e2e.modes import Mode
    from trtllm_replayssm.bench.e2e.report import Level
    from trtllm_replayssm.bench.e2e.requests import parse_lengths
    from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder

    levels = _chosen("level", level, get_args(Level))
    modes = _chosen("mode", mode, get_args(Mode))
    states = _chosen("state_dtype", state_dtype or ["float32"], get_args(StateDtype))
    batches, drafts = batch_sizes or [1, 64, 256], max_draft_len or [0]
    _check(batches, acceptance, num_requests, arrival_rate)
    for name, value, least in (("num_steps", num_steps, 1), ("context", context, 0), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name}: found {value}; needed {least} or more.")
    if seed > _LARGEST_SEED:
        raise ConfigError(f"seed: found {seed}; needed at most {_LARGEST_SEED}.")
    prompts, outputs = parse_lengths("prompt_len", prompt_len), parse_lengths("output_len", output_len)
    geometry = models.model_named(model, num_layers)
    jobs = measure.plan(
        cast("list[StateDtype]", states), drafts, batches, history=history, modes=cast("list[Mode]", modes)
    )
    chosen = machine.any_device(device)
    if breakdown and chosen.type != "cuda":
        raise ConfigError(f"breakdown: found device {chosen}; needed a CUDA device, whose kernels it adds up.")
    if output_dir is not None:
        plot.require_matplotlib()
        check_output(output_dir)
    options = measure.Options(
        geometry=geometry,
        requests=None if "serving" not in levels else measure.Requests(prompts, outputs, num_requests, arrival_rate),
        context=context if "steps" in levels else None,
        num_steps=num_steps,
        acceptance=acceptance,
        drafter=drafter,
        max_num_tokens=max_num_tokens,
        with_breakdown=breakdown,
        device=chosen,
        with_graphs=cuda_graphs,
        seed=seed,
    )
    words: dict[str, Sequence[object]] = {
        **{"model": [model], "level": levels, "mode": modes, "batch_sizes": batches, "state_dtype": states},
        **{"max_draft_len": drafts, "drafter": [drafter], "acceptance": [acceptance], "history": [history]},
        **{"context": [context], "num_steps": [num_steps], "prompt_len": [prompts], "output_len": [outputs]},
        **{"max_num_tokens": [max_num_tokens], "seed": [seed], "device": [device]},
        **{name: [value] for name, value in (("num_layers", num_layers), ("num_requests", num_requests)) if value},
        **({"arrival_rate": [arrival_rate]} if arrival_rate is not None else {}),
        **({"breakdown": []} if breakdown else {}),
        **({} if cuda_graphs else {"no-cuda_graphs": []}),
    }
    spoken = [str(word) for name, values in words.items() for word in (f"--{name}", *values)]
    found = _measured(jobs, options, model, shlex.join(["trtllm-replayssm", "bench", "e2e", *spoken]))
    if output_dir is not None:
        with staged_folder(output_dir) as folder:
            e2e_plot.write(found, folder)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    from trtllm_replayssm.cli.bench_e2e_tables import report_tables

    print(rendered(report_tables(found)))


def _chosen(option: str, values: list[str] | None, known: tuple[str, ...]) -> list[str]:
    """Return the values of an option, all known ones by default, each once."""
    for value in values or ():
        if value not in known:
            raise ConfigError(f"{option}: found {value!r}; needed {', '.join(known)}.")
    return list(dict.fromkeys(values or known))


def _check(batches: Sequence[int], acceptance: float, num_requests: int | None, arrival_rate: float | None) -> None:
    if min(batches) < 1:
        raise ConfigError(f"batch_sizes: found {min(batches)}; needed 1 or more.")
    if not 0.0 <= acceptance <= 1.0:
        raise ConfigError(f"acceptance: found {acceptance}; needed a probability, 0 to 1.")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"num_requests: found {num_requests}; needed 1 or more.")
    if arrival_rate is not None and not 0.0 < arrival_rate < math.inf:
        raise ConfigError(f"arrival_rate: found {arrival_rate}; needed requests per second, above 0.")


def _measured(jobs: Sequence[Job], options: Options, model: str, command: str) -> EndToEndReport:
    from tqdm import tqdm

    from trtllm_replayssm.bench import machine
    from trtllm_replayssm.bench.e2e.measure import measure
    from trtllm_replayssm.bench.e2e.report import (
        EndToEndReport,
        Failure,
        Measurement,
        ServingMeasurement,
        StepMeasurement,
        compare,
    )

    found: list[Measurement] = []
    failures: list[Failure] = []
    # disable=None: drawn on a terminal alone
    for item in tqdm(measure(jobs, options), total=len(jobs), desc="measuring", disable=None):
        if isinstance(item, Failure):
            failures.append(item)
        else:
            found += item
    steps = tuple(m for m in found if isinstance(m, StepMeasurement))
    serving = tuple(m for m in found if isinstance(m, ServingMeasurement))
    return EndToEndReport(
        command=command,
        machine=machine.describe(options.device),
        model=model,
        geometry=options.geometry,
        steps=steps,
        serving=serving,
        comparisons=compare([*steps, *serving]),
        failures=tuple(failures),
    )
