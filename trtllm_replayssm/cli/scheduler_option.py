"""The option of how prompts and decoding take turns."""

from typing import Annotated

import typer

from trtllm_replayssm.contract import defaults

MaxPromptSteps = Annotated[
    int | None,
    typer.Option(
        "--max_prompt_steps",
        help="Most pieces of prompts between two decode steps: fewer shorten the longest time between two tokens, more "
        f"start new requests sooner. By default {defaults.MAX_PROMPT_STEPS}.",
    ),
]
