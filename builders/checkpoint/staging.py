"""An output folder that appears whole or not at all."""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trtllm_replayssm.contract.manifest import CONFIG_FILE, MANIFEST_FILE
from trtllm_replayssm.errors import ConfigError

# What a folder is told by: moved into place after everything else, in this order.
_MARKERS = (CONFIG_FILE, MANIFEST_FILE)

# The disk, what a user may have of it, and what a file may be.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(folder: Path) -> None:
    """Refuse an output that would overwrite something; what a killed process left in it does not count.

    Raises:
        ConfigError: the path is a file or a folder that holds something.
    """
    try:
        taken = not stat.S_ISDIR(os.stat(folder).st_mode) or _holds_something(folder.resolve())
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(folder, error) from error
    if taken:
        what = "a folder that is not empty" if folder.is_dir() else "a file"
        raise ConfigError(f"{folder}: found {what}; needed a new or empty folder. Remove it or name another.")


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write in; put it in place at the end, or remove it on any failure.

    It lies beside a new output, and is renamed to it. It lies inside an output that exists, which may be a mount point
    or in a place that cannot be written; its files are moved up, those that tell what the folder is at last.

    An interruption counts as failure, and folders above the output that were made for it go as well. What a killed
    process left is removed by the next one with the same output.

    Args:
        folder: the output; new or empty. A symbolic link stands for what it points to.

    Yields:
        The staging folder.

    Raises:
        ConfigError: the output is taken, or the place cannot be written.
    """
    check_output(folder)
    target = Path(os.path.realpath(folder))
    is_inside = target.is_dir()
    for place in (target.parent, target):
        _sweep(place, target)
    staging = (target if is_inside else target.parent) / f".{target.name}.partial-{os.getpid()}"
    created = [parent for parent in staging.parents if not parent.exists()]
    handle = None
    # From the first byte on: a signal may come between the folder and its lock.
    try:
        try:
            handle = _make_and_hold(staging)
        except OSError as error:
            raise _unwritable(folder, error) from error
        with _full_disk_named(folder, staging):
            yield staging
        check_output(folder)  # another process may have been faster
        _put_in_place(folder, staging, target, is_inside=is_inside)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(created)
        raise
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def _full_disk_named(folder: Path, staging: Path) -> Iterator[None]:
    """Say of a disk that is full which folder lies on it: the system names no file, or the one that is copied."""
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if error.errno in _FULL and (not names or any(name.startswith(f"{staging}{os.sep}") for name in names)):
            raise _unwritable(folder, error) from error
        raise


def _put_in_place(folder: Path, staging: Path, target: Path, *, is_inside: bool) -> None:
    try:
        if is_inside:
            _move_up(staging)
        else:
            os.replace(staging, target)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _move_up(staging: Path) -> None:
    names = sorted((entry.name for entry in staging.iterdir()), key=lambda name: (name in _MARKERS, name))
    try:
        for name in names:
            os.replace(staging / name, staging.parent / name)
        staging.rmdir()
    except BaseException:
        for name in names:
            (staging.parent / name).unlink(missing_ok=True)
        raise


def _is_staging_name(name: str, target: Path) -> bool:
    return re.fullmatch(rf"\.{re.escape(target.name)}\.partial-[0-9]+", name) is not None


def _holds_something(target: Path) -> bool:
    return any(not _is_staging_name(entry.name, target) for entry in target.iterdir())


def _sweep(place: Path, target: Path) -> None:
    """Remove the staging folders of an output that no process holds; where there are no locks, none."""
    with suppress(OSError):
        for left in [entry for entry in os.scandir(place) if _is_staging_name(entry.name, target)]:
            if left.is_dir(follow_symlinks=False) and left.stat().st_uid == os.geteuid():
                _remove_if_dead(left.path)


def _remove_if_dead(staging: str) -> None:
    with suppress(OSError):
        handle = os.open(staging, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(staging)
        finally:
            os.close(handle)


def _make_and_hold(staging: Path) -> int:
    """Make a staging folder and lock it until the handle is closed, which the system does for a killed process.

    Between the two another process may take the folder for a dead one's: then it is made again.
    """
    while True:
        staging.mkdir(parents=True)
        with suppress(FileNotFoundError):
            handle = os.open(staging, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if staging.exists():
                return handle
            os.close(handle)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written ({error.strerror or error}). Name another place.")
