"""``trtllm-replayssm build``: rank checkpoint -> engine folder."""

from pathlib import Path
from typing import Annotated

import typer

from trtllm_replayssm.cli.history_option import METAVAR, parse_history
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.geometry import StateDtype
from trtllm_replayssm.contract.manifest import BackendName, SpeculativeDecodingMode, WeightsMode


def command(
    checkpoint_dir: Annotated[
        Path,
        typer.Option("--checkpoint_dir", help="Rank checkpoint; with external weights a config.json alone will do."),
    ],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Engine folder to write: new or empty.")],
    backend: Annotated[
        BackendName | None,
        typer.Option(
            "--backend", metavar="<name>", help="tensorrt or tensorrt_rtx; by default the first that is installed."
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max_batch_size", help="Slots: requests decoded together.")
    ] = defaults.MAX_BATCH_SIZE,
    max_input_len: Annotated[
        int, typer.Option("--max_input_len", help="Tokens of the longest prompt.")
    ] = defaults.MAX_INPUT_LEN,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max_seq_len",
            help=f"Tokens of prompt and generation; by default max_input_len + {defaults.MAX_NEW_TOKENS}.",
        ),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--max_num_tokens",
            help="Tokens of the longest prefill window; longer prompts run in several. By default max_input_len, at "
            f"most {defaults.MAX_NUM_TOKENS}.",
        ),
    ] = None,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="Most draft tokens of a step.")] = 0,
    history: Annotated[
        str,
        typer.Option(
            "--history",
            metavar=METAVAR,
            help="Most pending tokens of a slot before its state is written; auto takes what costs least for the model "
            "and the GPUs.",
        ),
    ] = str(defaults.HISTORY),
    state_dtype: Annotated[
        StateDtype,
        typer.Option(
            "--state_dtype", metavar="<type>", help="Of the recurrent state in memory: float32, float16 or bfloat16."
        ),
    ] = defaults.STATE_DTYPE,
    weights: Annotated[
        WeightsMode,
        typer.Option("--weights", metavar="<where>", help="external: bound at load; embedded: inside the engine."),
    ] = "external",
    speculative_decoding_mode: Annotated[
        SpeculativeDecodingMode | None,
        typer.Option(
            "--speculative_decoding_mode",
            metavar="<mode>",
            help="mtp: also an engine of the model's multi-token prediction head, for run --speculative mtp. Other "
            "drafts need --max_draft_len alone.",
        ),
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            "--compute_capability",
            metavar="<list>",
            help="GPUs to build for, such as 8.6 8.9. By default this machine's GPU with tensorrt, "
            f"{capability_text(*defaults.RTX_CAPABILITIES)} with tensorrt_rtx.",
        ),
    ] = None,
) -> None:
    """Build a TensorRT engine."""
    from trtllm_replayssm.builders.engine import build
    from trtllm_replayssm.builders.progress import BuildProgress

    progress = BuildProgress(shown=True)
    path = build(
        checkpoint_dir,
        output_dir,
        backend=backend,
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=max_draft_len,
        history=parse_history(history),
        state_dtype=state_dtype,
        weights=weights,
        speculative_decoding_mode=speculative_decoding_mode,
        compute_capabilities=_capabilities(compute_capability),
        progress=progress,
    )
    times = {**progress.seconds, "total": sum(progress.seconds.values())}
    print("\n".join(f"{seconds:6.1f} s  {step}" for step, seconds in times.items()))
    print(f"engine: {path}")


def _capabilities(texts: list[str] | None) -> tuple[int, ...] | None:
    """Read "8.9" as 89."""
    if not texts:
        return None
    found: list[int] = []
    for word in " ".join(texts).replace(",", " ").split():
        major, point, minor = word.partition(".")
        if not (word.isascii() and point and major.isdigit() and minor.isdigit() and len(minor) == 1):
            raise typer.BadParameter(f"compute_capability: found {word!r}; needed MAJOR.MINOR, such as 8.9.")
        found.append(10 * int(major) + int(minor))
    return tuple(found)
