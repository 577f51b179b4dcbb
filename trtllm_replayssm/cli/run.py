"""``trtllm-replayssm run``: prompts -> generated text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from trtllm_replayssm.cli.guided_option import (
    GuidedGrammar,
    GuidedJson,
    GuidedJsonObject,
    GuidedRegex,
    guided_decoding,
)
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
from trtllm_replayssm.cli.run_output import print_growing, print_results
from trtllm_replayssm.cli.speculative_option import FixedDraftLen, Source, SpeculativeModel, speculative_config
from trtllm_replayssm.config import CudaGraphConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.wishes import given, kv_cache_config

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.prompts import Prompt

_OR_ENGINE: Final = "By default {}, or what the engine has."


def command(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder, rank checkpoint or engine folder.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text; give it several times for a batch.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input_file", help="One prompt a line; or .jsonl, each line with a key prompt or prompt_token_ids."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="Most tokens to generate.")] = 64,
    min_tokens: Annotated[int, typer.Option("--min_tokens", help="Fewest tokens to generate.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top_k", help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top_p", help="Keep the fewest tokens that reach this probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min_p", help="Keep what is at least so likely relative to the most likely token.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition_penalty", help="Above 1 makes tokens that are there less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence_penalty", help="Taken off the logits of tokens that are there.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency_penalty", help="Taken off as often as the token is there.")
    ] = 0.0,
    bad: Annotated[list[str] | None, typer.Option("--bad", help="Text not to generate; repeatable.")] = None,
    n: Annotated[int, typer.Option("--n", help="Sequences to sample from each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the random numbers; repeats a sampled run.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends a generation; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore_eos", help="Do not end at the end token.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="Log-probabilities of so many likeliest tokens at each token, with --json."),
    ] = None,
    guided_json: GuidedJson = None,
    guided_json_object: GuidedJsonObject = False,
    guided_regex: GuidedRegex = None,
    guided_grammar: GuidedGrammar = None,
    speculative: Annotated[
        Source | None,
        typer.Option(
            "--speculative",
            metavar="<source>",
            help="Where drafts come from: ngram (the text so far), mtp (the model's own head) or draft (a smaller "
            "model); by default there are none.",
        ),
    ] = None,
    max_draft_len: Annotated[
        int | None,
        typer.Option("--max_draft_len", help="Most drafts of a step, with --speculative: by default 4, with mtp 1."),
    ] = None,
    speculative_model: SpeculativeModel = None,
    fixed_draft_len: FixedDraftLen = False,
    history: Annotated[
        str | None,
        typer.Option(
            "--history",
            metavar=METAVAR,
            help="Most pending tokens before a checkpoint is written; auto takes what costs least. "
            f"{_OR_ENGINE.format(defaults.HISTORY)}",
        ),
    ] = None,
    state_dtype: Annotated[
        StateDtype | None,
        typer.Option(
            "--state_dtype",
            metavar="<type>",
            help=f"Of the recurrent state: float32, float16 or bfloat16. {_OR_ENGINE.format(defaults.STATE_DTYPE)}",
        ),
    ] = None,
    conventional: Annotated[
        bool, typer.Option("--conventional", help="Rewrite the state for every token, to compare with.")
    ] = False,
    executor: Annotated[
        Literal["auto", "torch", "tensorrt"],
        typer.Option(
            "--executor", metavar="<name>", help="tensorrt, torch or auto: the engine where it can run, else torch."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", ActivationDtype],
        typer.Option(
            "--dtype", metavar="<type>", help="Of the activations: auto (the model's), float32, float16 or bfloat16."
        ),
    ] = "auto",
    device: Device = "auto",
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max_batch_size",
            help=f"Sequences that run at a time. By default {defaults.MAX_BATCH_SIZE} on the CPU, what fits a GPU, or "
            "what the engine has.",
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max_seq_len",
            help="Tokens of the longest sequence. By default the model's context, at most "
            f"{defaults.MAX_SEQ_LEN}, or what the engine has.",
        ),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--max_num_tokens",
            help="Tokens of the longest prompt piece that runs in one step. "
            f"{_OR_ENGINE.format(defaults.MAX_NUM_TOKENS)}",
        ),
    ] = None,
    free_gpu_memory_fraction: FreeGpuMemoryFraction = None,
    enable_block_reuse: EnableBlockReuse = False,
    tokens_per_block: TokensPerBlock = None,
    tokens_per_snapshot: TokensPerSnapshot = None,
    device_cache_size: DeviceCacheSize = None,
    host_cache_size: HostCacheSize = None,
    checkpoint_dir: CheckpointDir = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Print the text of one prompt while it is generated.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="Run operation by operation on a GPU, without CUDA graphs.")
    ] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print what was counted, too.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Print what the model takes on its device, too, in bytes.")
    ] = False,
) -> None:
    """Generate text from prompts: greedily and up to 64 tokens, unless the options say otherwise."""
    prompts = read_prompts(prompt or [], input_file)
    if logprobs is not None and not as_json:
        raise ConfigError("logprobs: found without --json; needed both or neither.")
    if streaming and (as_json or n * len(prompts) > 1):
        found = "--json" if as_json else f"{len(prompts)} prompts and n={n}"
        raise ConfigError(f"streaming: found {found}; needed one prompt, one sequence of it, and no --json.")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad=tuple(bad or ()),
        n=n,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        guided_decoding=guided_decoding(guided_json, guided_regex, guided_grammar, is_json_object=guided_json_object),
    )
    drafts = speculative_config(speculative, max_draft_len, speculative_model, is_fixed=fixed_draft_len)
    replay = given(
        history=None if history is None else parse_history(history),
        state_dtype=state_dtype,
        enabled=False if conventional else None,
    )
    cache = kv_cache_config(
        free_gpu_memory_fraction=free_gpu_memory_fraction,
        enable_block_reuse=enable_block_reuse,
        tokens_per_block=tokens_per_block,
        tokens_per_snapshot=tokens_per_snapshot,
        device_cache_size=device_cache_size,
        host_cache_size=host_cache_size,
    )
    from trtllm_replayssm.runtime.llm import LLM

    llm = LLM(
        model,
        executor=executor,
        dtype=dtype,
        device=device,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        replay=ReplayConfig(**replay),
        kv_cache_config=cache,
        speculative_config=drafts,
        checkpoint_dir=checkpoint_dir,
        cuda_graph_config=None if eager else CudaGraphConfig(),
    )
    if streaming:
        print_growing(llm.generate_async(prompts[0], params, streaming=True), is_text=llm.tokenizer is not None)
        outputs = []
    else:
        outputs = llm.generate(prompts, params)
    print_results(outputs, llm, as_json=as_json, with_metrics=metrics, with_memory=memory)


def read_prompts(texts: Sequence[str], input_file: Path | None) -> "list[Prompt]":
    """Gather the prompts of a call.

    Args:
        texts: given on the command line.
        input_file: one prompt a line, blank lines skipped; or .jsonl.

    Raises:
        RequestError: there is none, or a line cannot be read as a prompt.
        OSError: the file cannot be read.
    """
    if bool(texts) == (input_file is not None):
        raise RequestError("prompts: needed --prompt or --input_file, one of the two.")
    if input_file is None:
        return list(texts)
    try:
        lines = input_file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{input_file}: found no UTF-8 text ({error}); needed one prompt a line.") from error
    is_json = input_file.suffix.lower() == ".jsonl"
    prompts = [
        _json_prompt(f"{input_file}:{number}", line) if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{input_file}: found no prompt; needed one a line.")
    return prompts


def _json_prompt(where: str, line: str) -> "Prompt":
    needed = 'needed {"prompt": "text"} or {"prompt_token_ids": [ids]}'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: found no valid JSON ({error}); {needed}.") from error
    keys = [key for key in ("prompt", "prompt_token_ids") if isinstance(record, dict) and key in record]
    if len(keys) != 1 or len(record) != 1:
        raise RequestError(f"{where}: found {line[:80]!r}; {needed}, and nothing else.")
    value: Prompt = record[keys[0]]
    if not isinstance(value, str if keys[0] == "prompt" else list):
        raise RequestError(f"{where}: found {line[:80]!r}; {needed}.")
    return value
