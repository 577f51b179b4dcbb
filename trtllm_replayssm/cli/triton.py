"""``trtllm-replayssm triton``: a model folder -> a model in a Triton model repository."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_replayssm.cli.history_option import parse_history
from trtllm_replayssm.cli.kv_cache_option import (
    DeviceCacheSize,
    FreeGpuMemoryFraction,
    HostCacheSize,
    TokensPerBlock,
    TokensPerSnapshot,
)
from trtllm_replayssm.cli.model_options import CheckpointDir
from trtllm_replayssm.cli.scheduler_option import MaxPromptSteps, WarmUp
from trtllm_replayssm.cli.speculative_option import Source
from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.wishes import given


def command(
    engine_dir: Annotated[
        Path, typer.Option("--engine_dir", help="Engine folder, rank checkpoint or Hugging Face folder.")
    ],
    repository: Annotated[Path, typer.Option("--repository", help="Model repository; others in it stay.")],
    name: Annotated[str, typer.Option("--name", help="Of the model.")] = "tensorrt_llm",
    backend: Annotated[
        Literal["python", "tensorrt"],
        typer.Option(
            "--backend",
            metavar="<name>",
            help="python: this package's runtime. tensorrt: the bare engine on Triton's TensorRT backend, whose client "
            "drives the steps.",
        ),
    ] = "python",
    kind: Annotated[
        Literal["auto", "cpu", "gpu"],
        typer.Option("--kind", metavar="<kind>", help="Where instances run: cpu, gpu, or auto, as Triton decides."),
    ] = "auto",
    instances: Annotated[int, typer.Option("--instances", help="Instances, on each GPU or on the CPU.")] = 1,
    gpus: Annotated[
        list[int] | None, typer.Option("--gpus", metavar="<list>", help="GPUs, by number; by default all.")
    ] = None,
    decoupled: Annotated[
        bool,
        typer.Option(
            "--decoupled/--no_decoupled",
            help="Streaming, by generate_stream and gRPC streams; or one response, by infer as well.",
        ),
    ] = True,
    by_reference: Annotated[
        bool, typer.Option("--by_reference", help="Name the folder where it is; by default it is linked or copied.")
    ] = False,
    executor: Annotated[
        Literal["auto", "torch", "tensorrt"],
        typer.Option("--executor", metavar="<name>", help="tensorrt, torch or auto, as for run."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", ActivationDtype], typer.Option("--dtype", metavar="<type>", help="Of the activations.")
    ] = "auto",
    max_batch_size: Annotated[
        int | None, typer.Option("--max_batch_size", help="Sequences that an instance runs at a time.")
    ] = None,
    max_seq_len: Annotated[int | None, typer.Option("--max_seq_len", help="Tokens of the longest sequence.")] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option("--max_num_tokens", help="Tokens of the longest prompt piece of a step.")
    ] = None,
    max_queue_size: Annotated[
        int | None, typer.Option("--max_queue_size", help="Most sequences that wait; further ones are refused.")
    ] = None,
    max_prompt_steps: MaxPromptSteps = None,
    max_sequences: Annotated[
        int | None, typer.Option("--max_sequences", help="Most sequences that one request may ask for: 128.")
    ] = None,
    enable_block_reuse: Annotated[
        bool, typer.Option("--enable_block_reuse", help="Start prompts from the states of earlier ones.")
    ] = False,
    tokens_per_block: TokensPerBlock = None,
    tokens_per_snapshot: TokensPerSnapshot = None,
    device_cache_size: DeviceCacheSize = None,
    host_cache_size: HostCacheSize = None,
    free_gpu_memory_fraction: FreeGpuMemoryFraction = None,
    history: Annotated[str | None, typer.Option("--history", help="Most pending tokens of a slot, or auto.")] = None,
    state_dtype: Annotated[
        StateDtype | None, typer.Option("--state_dtype", metavar="<type>", help="Of the recurrent state.")
    ] = None,
    speculative: Annotated[
        Source | None,
        typer.Option("--speculative", metavar="<source>", help="Where drafts come from: ngram, mtp or draft."),
    ] = None,
    max_draft_len: Annotated[int | None, typer.Option("--max_draft_len", help="Most drafts of a step.")] = None,
    speculative_model: Annotated[
        Path | None, typer.Option("--speculative_model", help="The draft model's folder, with --speculative draft.")
    ] = None,
    checkpoint_dir: CheckpointDir = None,
    warm_up: WarmUp = True,
    cancellation_check_period_ms: Annotated[
        int | None,
        typer.Option("--cancellation_check_period_ms", help="How often cancelled requests are looked for: 100 ms."),
    ] = None,
    metrics_period_ms: Annotated[
        int | None, typer.Option("--metrics_period_ms", help="How often metrics are brought up to date: 1000 ms.")
    ] = None,
) -> None:
    """Write a Triton model: config.pbtxt, model.py and the folder it serves."""
    from trtllm_replayssm.serving.triton import engine_repository
    from trtllm_replayssm.serving.triton.repository import Instances, is_openable, write_model
    from trtllm_replayssm.serving.triton.settings import ModelSettings

    where = Instances(kind, instances, tuple(gpus or ()))
    if backend == "tensorrt":
        written = engine_repository.write_model(repository, name, engine_dir, instances=where)
        for note in written.notes:
            print(f"note: {note}")
        plugins = shlex.quote(f"--backend-config=tensorrt,plugins={written.plugin_library}")
        print(f"model: {written.folder}\ntritonserver --model-repository={shlex.quote(str(repository))} {plugins}")
        return
    wishes = given(
        engine_dir=engine_dir,
        checkpoint_dir=checkpoint_dir,
        executor=executor,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_queue_size=max_queue_size,
        max_prompt_steps=max_prompt_steps,
        max_sequences=max_sequences,
        enable_block_reuse=enable_block_reuse or None,
        tokens_per_block=tokens_per_block,
        tokens_per_snapshot=tokens_per_snapshot,
        device_cache_size=device_cache_size,
        host_cache_size=host_cache_size,
        free_gpu_memory_fraction=free_gpu_memory_fraction,
        history=None if history is None else parse_history(history),
        state_dtype=state_dtype,
        speculative=speculative,
        max_draft_len=max_draft_len,
        speculative_model=speculative_model,
        warm_up=warm_up,
        cancellation_check_period_ms=cancellation_check_period_ms,
        metrics_period_ms=metrics_period_ms,
    )
    settings = ModelSettings.of({option: str(wish) for option, wish in wishes.items()})
    folder = write_model(repository, name, settings, instances=where, is_decoupled=decoupled, by_reference=by_reference)
    if not is_openable(repository):
        print("note: Triton opens no model below a path with spaces or beyond ASCII; move the repository.")
    print(f"model: {folder}\ntritonserver --model-repository={shlex.quote(str(repository))}")
