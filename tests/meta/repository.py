"""The repository as git sees it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked files that match; a ``*`` also stands for slashes."""
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]
