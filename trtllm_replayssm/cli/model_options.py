"""Options that the commands which open a model have in common, word for word, and what was given of any."""

from pathlib import Path
from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option("--device", metavar="<name>", help="auto, cpu, cuda or cuda:<n>.")]
CheckpointDir = Annotated[
    Path | None, typer.Option("--checkpoint_dir", help="The weights of an engine folder that has none.")
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that the others have the defaults of whatever takes them."""
    return {name: option for name, option in options.items() if option is not None}
