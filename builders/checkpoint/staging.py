"""An output folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trtllm_replayssm.errors import ConfigError


def check_output(folder: Path) -> None:
    """Refuse an output that would overwrite something.

    Raises:
        ConfigError: the path is a file or a folder that holds something.
    """
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if taken:
        what = "a folder that is not empty" if folder.is_dir() else "a file"
        raise ConfigError(f"{folder}: found {what}; needed a new or empty folder. Remove it or name another.")


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Give a folder beside the output to write in; rename it into place at the end, or remove it on any failure.

    An interruption counts as failure, and folders above the output that were made for it go as well.

    Args:
        folder: the output; new or empty.

    Yields:
        The staging folder.

    Raises:
        ConfigError: the output is taken, or the place cannot be written.
    """
    check_output(folder)
    target = folder.absolute()
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        try:
            staging.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield staging
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        raise


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written ({error.strerror or error}). Name another place.")
