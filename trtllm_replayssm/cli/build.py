"""``trtllm-replayssm build``: rank checkpoint -> engine folder."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class BackendOption(StrEnum):
    """The two kinds of TensorRT."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"


class WeightsOption(StrEnum):
    """Where an engine's weights are."""

    EXTERNAL = "external"
    EMBEDDED = "embedded"


class StateOption(StrEnum):
    """Types of the recurrent state in memory."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def command(
    checkpoint_dir: Annotated[
        Path,
        typer.Option("--checkpoint_dir", help="Rank checkpoint; with external weights a config.json alone will do."),
    ],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Engine folder to write: new or empty.")],
    backend: Annotated[
        BackendOption | None, typer.Option("--backend", help="Which TensorRT; by default the first that is installed.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="Slots: requests decoded together.")] = 8,
    max_input_len: Annotated[int, typer.Option("--max_input_len", help="Tokens of the longest prompt.")] = 1024,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max_seq_len", help="Tokens of prompt and generation; by default max_input_len + 1024."),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option("--max_num_tokens", help="Tokens of the longest prefill window; longer prompts run in several."),
    ] = None,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="Most draft tokens of a step.")] = 0,
    history: Annotated[
        int, typer.Option("--history", help="Most pending tokens of a slot before its state is written.")
    ] = 16,
    state_dtype: Annotated[
        StateOption, typer.Option("--state_dtype", help="Type of the recurrent state in memory.")
    ] = StateOption.FLOAT32,
    weights: Annotated[
        WeightsOption, typer.Option("--weights", help="external: bound at load; embedded: inside the engine.")
    ] = WeightsOption.EXTERNAL,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option("--compute_capability", help='GPU to build for, such as 8.9; repeat, or "8.0 8.9" in one.'),
    ] = None,
) -> None:
    """Build a TensorRT engine."""
    from trtllm_replayssm.builders.engine import build
    from trtllm_replayssm.builders.progress import BuildProgress

    progress = BuildProgress(shown=True)
    path = build(
        checkpoint_dir,
        output_dir,
        backend=None if backend is None else backend.value,
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=max_draft_len,
        history=history,
        state_dtype=state_dtype.value,
        weights=weights.value,
        compute_capabilities=_capabilities(compute_capability),
        progress=progress,
    )
    print("\n".join(f"{seconds:6.1f} s  {step}" for step, seconds in progress.seconds.items()))
    print(f"engine: {path}")


def _capabilities(texts: list[str] | None) -> tuple[int, ...] | None:
    """Read "8.9" as 89."""
    if not texts:
        return None
    found: list[int] = []
    for word in " ".join(texts).replace(",", " ").split():
        major, point, minor = word.partition(".")
        if not (point and major.isdigit() and minor.isdigit() and len(minor) == 1):
            raise typer.BadParameter(f"compute_capability: found {word!r}; needed MAJOR.MINOR, such as 8.9.")
        found.append(10 * int(major) + int(minor))
    return tuple(found)
