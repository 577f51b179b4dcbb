"""An output folder that appears whole or not at all."""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
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

    An interruption counts as failure, and folders above the output that were made for it go as well. What a killed
    process left is removed by the next one with the same output.

    Args:
        folder: the output; new or empty.

    Yields:
        The staging folder.

    Raises:
        ConfigError: the output is taken, or the place cannot be written.
    """
    check_output(folder)
    target = folder.absolute()
    _sweep(target)
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        _remove_empty(created)
        raise _unwritable(folder, error) from error
    try:
        with _held(staging):
            yield staging
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(created)
        raise


def _sweep(target: Path) -> None:
    for left in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError), _held(left) as is_ours:
            if is_ours:
                shutil.rmtree(left)


@contextmanager
def _held(staging: Path) -> Iterator[bool]:
    """Lock a staging folder; yields whether it is ours now. The system unlocks those of a process that is killed.

    Where the file system has no locks the answer is no, so that nothing is swept there.
    """
    handle = os.open(staging, os.O_RDONLY)
    is_ours = False
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        yield is_ours
    finally:
        os.close(handle)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written ({error.strerror or error}). Name another place.")
