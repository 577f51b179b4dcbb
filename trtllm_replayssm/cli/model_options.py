"""Options that the commands which open a model have in common, word for word."""

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option("--device", metavar="<name>", help="auto, cpu, cuda or cuda:<n>.")]
CheckpointDir = Annotated[
    Path | None, typer.Option("--checkpoint_dir", help="The weights of an engine folder that has none.")
]
