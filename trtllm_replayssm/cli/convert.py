"""``trtllm-replayssm convert``: Hugging Face folder -> rank checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_replayssm.contract.geometry import ActivationDtype


def command(
    model_dir: Annotated[Path, typer.Option("--model_dir", help="Hugging Face folder with safetensors weights.")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Rank checkpoint to write: a new or empty folder.")],
    dtype: Annotated[
        Literal["auto", ActivationDtype],
        typer.Option(
            "--dtype", metavar="<type>", help="Of the weights: auto (the config's), float32, float16 or bfloat16."
        ),
    ] = "auto",
    tp_size: Annotated[int, typer.Option("--tp_size", help="Ranks to split the model over; 1 in this version.")] = 1,
) -> None:
    """Convert a Hugging Face folder to a rank checkpoint, tensor by tensor."""
    from trtllm_replayssm.builders.checkpoint.convert import BalanceSheet, convert

    def report(sheet: BalanceSheet) -> None:
        print("\n".join(sheet.lines()))

    path = convert(model_dir, output_dir, dtype, tp_size, progress=True, report=report)
    print(f"rank checkpoint: {path}")
