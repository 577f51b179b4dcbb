"""``trtllm-replayssm serve``: a model behind HTTP, for OpenAI's clients."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_replayssm.cli.history_option import METAVAR, parse_history
from trtllm_replayssm.cli.kv_cache_option import (
    DeviceCacheSize,
    EnableBlockReuse,
    FreeGpuMemoryFraction,
    HostCacheSize,
    TokensPerBlock,
    TokensPerSnapshot,
)
from trtllm_replayssm.cli.model_options import CheckpointDir, Device
from trtllm_replayssm.cli.scheduler_option import MaxPromptSteps, WarmUp
from trtllm_replayssm.cli.speculative_option import FixedDraftLen, Source, SpeculativeModel, speculative_config
from trtllm_replayssm.config import CudaGraphConfig, ReplayConfig, SchedulerConfig
from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.errors import BackendError, ConfigError
from trtllm_replayssm.wishes import given, kv_cache_config

INSTALL = "pip install 'starlette>=0.46' 'uvicorn>=0.34' 'jinja2>=3.1.6' 'prometheus-client>=0.21'"


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder, rank checkpoint or engine.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 for all of IPv4.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option("--served_model_name", help="What clients call it. By default the folder's name.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat_template", help="A jinja2 file to use instead of the model's template.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api_key_file", help="Keys, one a line; clients need one of them.")
    ] = None,
    max_queue_size: Annotated[
        int, typer.Option("--max_queue_size", help="Most sequences that wait for a slot; more get status 429.")
    ] = 512,
    max_prompt_steps: MaxPromptSteps = None,
    max_concurrent_requests: Annotated[
        int, typer.Option("--max_concurrent_requests", help="Most HTTP requests at a time; more get status 503.")
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option("--max_body_bytes", help="Of one request; more get 413.")] = 2**20,
    max_sequences: Annotated[
        int, typer.Option("--max_sequences", help="Most sequences of one request: prompts times n.")
    ] = 128,
    request_timeout_s: Annotated[
        float | None, typer.Option("--request_timeout_s", help="A request that takes longer ends with status 504.")
    ] = None,
    send_timeout_s: Annotated[
        float, typer.Option("--send_timeout_s", help="A client that takes nothing for so long is cut off.")
    ] = 60.0,
    shutdown_timeout_s: Annotated[
        float, typer.Option("--shutdown_timeout_s", help="How long requests may go on after SIGTERM.")
    ] = 30.0,
    speculative: Annotated[
        Source | None,
        typer.Option("--speculative", metavar="<source>", help="Where drafts come from: ngram, mtp or draft."),
    ] = None,
    max_draft_len: Annotated[
        int | None, typer.Option("--max_draft_len", help="Most drafts of a step, with --speculative.")
    ] = None,
    speculative_model: SpeculativeModel = None,
    fixed_draft_len: FixedDraftLen = False,
    max_batch_size: Annotated[
        int | None, typer.Option("--max_batch_size", help="Slots: sequences that run at a time. By default what fits.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max_seq_len", help="Tokens of the longest sequence, prompt and generation together."),
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option("--max_num_tokens", help="Tokens of the longest prompt piece of one step.")
    ] = None,
    free_gpu_memory_fraction: FreeGpuMemoryFraction = None,
    enable_block_reuse: EnableBlockReuse = False,
    tokens_per_block: TokensPerBlock = None,
    tokens_per_snapshot: TokensPerSnapshot = None,
    device_cache_size: DeviceCacheSize = None,
    host_cache_size: HostCacheSize = None,
    history: Annotated[
        str | None, typer.Option("--history", metavar=METAVAR, help="Most pending tokens before a state is written.")
    ] = None,
    state_dtype: Annotated[
        StateDtype | None, typer.Option("--state_dtype", metavar="<type>", help="Of the recurrent state.")
    ] = None,
    executor: Annotated[
        Literal["auto", "torch", "tensorrt"], typer.Option("--executor", metavar="<name>", help="As of run.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", ActivationDtype], typer.Option("--dtype", metavar="<type>", help="Of the activations.")
    ] = "auto",
    device: Device = "auto",
    checkpoint_dir: CheckpointDir = None,
    warm_up: WarmUp = True,
    eager: Annotated[bool, typer.Option("--eager", help="Run without CUDA graphs.")] = False,
) -> None:
    """Serve a model over HTTP: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics."""
    try:
        from trtllm_replayssm.serving.openai import server
    except ModuleNotFoundError as error:
        raise BackendError(
            f"serve: found no Python package {error.name!r}; needed those of the extra serve. Install them with: "
            f"{INSTALL}"
        ) from error
    from trtllm_replayssm.runtime.llm import LLM
    from trtllm_replayssm.serving.openai.chat_template import ChatTemplate
    from trtllm_replayssm.serving.openai.service import Service
    from trtllm_replayssm.serving.openai.settings import ServerSettings

    settings = ServerSettings(
        model_name=served_model_name or folder.resolve().name,
        api_keys=_read_keys(api_key_file),
        max_body_bytes=max_body_bytes,
        max_concurrent_requests=max_concurrent_requests,
        max_sequences=max_sequences,
        request_timeout_s=request_timeout_s,
        send_timeout_s=send_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    replay = given(history=None if history is None else parse_history(history), state_dtype=state_dtype)
    cache = kv_cache_config(
        free_gpu_memory_fraction=free_gpu_memory_fraction,
        enable_block_reuse=enable_block_reuse,
        tokens_per_block=tokens_per_block,
        tokens_per_snapshot=tokens_per_snapshot,
        device_cache_size=device_cache_size,
        host_cache_size=host_cache_size,
    )
    scheduler = SchedulerConfig(max_queue_size=max_queue_size, **given(max_prompt_steps=max_prompt_steps))
    template = ChatTemplate.from_folder(folder, chat_template)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Taken before the model is read: an address that cannot be had is known at once.
    with server.listen(host, port) as listener:
        logging.getLogger(__name__).info("%s: reading the model", folder)
        llm = LLM(
            folder,
            executor=executor,
            dtype=dtype,
            device=device,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            replay=ReplayConfig(**replay),
            scheduler_config=scheduler,
            kv_cache_config=cache,
            speculative_config=speculative_config(
                speculative, max_draft_len, speculative_model, is_fixed=fixed_draft_len
            ),
            checkpoint_dir=checkpoint_dir,
            cuda_graph_config=None if eager else CudaGraphConfig(warm_up=warm_up),
        )
        with llm:
            server.serve(Service(llm, settings, template), listener)


def _read_keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: found no UTF-8 text; needed API keys, one a line.") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{file}: found no key; needed one a line, or no --api_key_file.")
    return keys
