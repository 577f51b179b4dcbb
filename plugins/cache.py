"""The cache of compiled things: one folder, content-hashed names, every file written beside and renamed.

Compiled kernels (``plugins.build``) and the C++ library (``plugins.library``) are kept here. A file's name holds the
hash of all that went into it, so an entry is never stale and may be deleted at any time.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_replayssm.errors import BuildError

CACHE_DIR_VARIABLE = "TRTLLM_REPLAYSSM_CACHE_DIR"


def cache_dir() -> Path:
    """Return the folder of cached builds, made if absent.

    The first that is set: ``$TRTLLM_REPLAYSSM_CACHE_DIR``, ``$XDG_CACHE_HOME/trtllm_replayssm``,
    ``~/.cache/trtllm_replayssm``.

    Raises:
        BuildError: the folder cannot be made or written to.
    """
    named = os.environ.get(CACHE_DIR_VARIABLE)
    if named:
        folder = Path(named).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base else Path("~/.cache").expanduser()) / "trtllm_replayssm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cache folder {folder}: found {error.strerror or error}; needed a folder that can be written. "
            f"Name another one with {CACHE_DIR_VARIABLE}."
        ) from error
    return folder


def content_hash(*parts: bytes | str) -> str:
    """Return 32 hexadecimal digits that change with any part, and with where one part ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give the path of a temporary file next to ``path``; rename it to ``path`` when the block ends well.

    A failing block leaves nothing behind. Processes that write the same path at once do not disturb each other: each
    has its own temporary file, and the last rename wins.

    Raises:
        BuildError: the folder of ``path`` cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BuildError(
            f"{path}: found {error.strerror or error}; needed a folder that can be written. Choose another output."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private to the user; others may share what is built.
        temporary.chmod(0o755 if path.suffix == ".so" else 0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_beside(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with beside(path) as temporary:
        temporary.write_bytes(data)
