"""Where an output is staged, what puts it in place, and what is swept."""

import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_replayssm.builders.checkpoint.staging import staged_folder
from trtllm_replayssm.errors import ConfigError

FILES = ("manifest.json", "rank0.engine", "config.json", "a.txt")


def fill(folder: Path) -> None:
    with staged_folder(folder) as staging:
        for name in FILES:
            (staging / name).write_text(name)


def link_to(folder: Path, target: str) -> Path:
    (folder / "link").symlink_to(target)
    return folder / "link"


def make(path: Path) -> Path:
    path.mkdir()
    return path


# Each makes an output and returns it, with the name of the folder that is to be filled.
OUTPUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "new": (lambda f: f / "new", "new"),
    "empty": (lambda f: make(f / "empty"), "empty"),
    "link-to-empty": (lambda f: link_to(f, make(f / "empty").name), "empty"),
    "link-to-nothing": (lambda f: link_to(f, "absent"), "absent"),
    "left-inside": (lambda f: make(make(f / "empty") / ".empty.partial-1").parent, "empty"),
    "left-beside": (lambda f: make(f / ".new.partial-1").with_name("new"), "new"),
}


@pytest.mark.parametrize(("prepare", "name"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_every_new_or_empty_output_is_filled_and_nothing_else_is_left(
    tmp_path: Path, prepare: Callable[[Path], Path], name: str
) -> None:
    output = prepare(tmp_path)
    fill(output)
    assert sorted(path.name for path in output.iterdir()) == sorted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({name, output.name})


@pytest.mark.parametrize(("prepare", "name"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_a_failure_leaves_the_output_as_it_was(
    tmp_path: Path, prepare: Callable[[Path], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = prepare(tmp_path)
    existed = output.exists()
    with pytest.raises(ZeroDivisionError), staged_folder(output):
        raise ZeroDivisionError

    def refuse(source: Path, target: Path) -> None:
        if source.name not in ("a.txt", "rank0.engine"):
            raise OSError(28, "No space left on device")
        shutil.move(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        fill(output)
    assert (list(output.iterdir()) == []) if existed else not output.exists()


def test_an_output_that_exists_is_touched_inside_alone_and_told_by_its_last_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mount point cannot be renamed over, and the folder above it may be read-only.
    output, moved = make(tmp_path / "mount"), []
    replace = os.replace

    def watch(source: Path, target: Path) -> None:
        assert (source.parent.parent, target.parent) == (output, output)
        moved.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    fill(output)
    assert moved == ["a.txt", "rank0.engine", "config.json", "manifest.json"]


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "new"])
def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path, exists: bool) -> None:
    output = tmp_path / "output"
    if exists:
        output.mkdir()
    with pytest.raises(ConfigError, match="a folder that is not empty"), staged_folder(output) as staging:
        (staging / "config.json").write_text("ours")
        output.mkdir(exist_ok=True)
        (output / "config.json").write_text("theirs")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["output", "output/config.json"]
    assert (output / "config.json").read_text() == "theirs"


def test_a_link_to_itself_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), staged_folder(link_to(tmp_path, "link")):
        pytest.fail("the work began")


def test_what_only_looks_like_a_staging_folder_is_not_swept(tmp_path: Path) -> None:
    make(tmp_path / ".output.partial-notes")
    make(tmp_path / "kept")
    (tmp_path / ".output.partial-7").symlink_to("kept")
    (tmp_path / ".output.partial-8").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    fill(tmp_path / "output")
    assert {path.name for path in tmp_path.iterdir()} == before | {"output"}


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[Path] = []

    def sweep_first(handle: int, operation: int) -> None:
        if not swept:
            (staging,) = tmp_path.glob(".output.partial-*")
            staging.rmdir()
            swept.append(staging)
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    fill(tmp_path / "output")
    assert swept and sorted(path.name for path in (tmp_path / "output").iterdir()) == sorted(FILES)


def fill_up(staging: Path, source: Path) -> None:
    """Write more than the process may, which fails as a full disk does."""
    shutil.copyfile(source, staging / "copy")


def write_much(staging: Path, source: Path) -> None:
    """As ``fill_up``, by an error that names no file."""
    with (staging / "written").open("wb") as file:
        file.write(source.read_bytes())


@pytest.mark.parametrize("write", [fill_up, write_much])
def test_a_full_disk_is_told_of_the_output_and_not_of_what_is_copied(
    tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.write_bytes(bytes(8192))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(ConfigError, match=rf"^{output}: cannot be written"), staged_folder(output) as staging:
            write(staging, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_elsewhere_is_not_told_of_the_output(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="cache"), staged_folder(tmp_path / "output"):
        raise error
