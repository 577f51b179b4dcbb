"""What a tokenizer and a chat template consist of: copied as they are, where present."""

import shutil
from pathlib import Path

COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def copy_companions(source: Path, target: Path) -> tuple[str, ...]:
    """Copy those that a folder has into another; returns their names."""
    present = tuple(name for name in COMPANION_FILES if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present
