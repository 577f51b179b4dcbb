"""The library is found, compiled once, and refused in words when it cannot be."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtllm_replayssm.errors import BackendError, BuildError
from trtllm_replayssm.plugins import library
from trtllm_replayssm.plugins.cache import beside, cache_dir, content_hash, write_beside

VERSION_HEADER = """
#define TRT_MAJOR_ENTERPRISE {major}
#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE
#define NV_TENSORRT_MINOR {minor}
#define NV_TENSORRT_PATCH 1
"""
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


def fake_headers(folder: Path, major: int, minor: int) -> Path:
    folder.mkdir()
    (folder / "NvInferRuntime.h").write_text("")
    (folder / "NvInferVersion.h").write_text(VERSION_HEADER.format(major=major, minor=minor))
    return folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRTLLM_REPLAYSSM_CACHE_DIR", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_a_prebuilt_library_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = tmp_path / "mine.so"
    prebuilt.touch()
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(prebuilt))
    assert library.plugin_library() == prebuilt
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "absent.so"))
    with pytest.raises(BackendError, match=r"TRTLLM_REPLAYSSM_PLUGIN_LIBRARY: found '.*absent\.so', which is no file"):
        library.plugin_library()


def test_headers_of_the_named_folder_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_headers(tmp_path / "include", 11, 2)
    monkeypatch.setenv(library.INCLUDE_VARIABLE, str(folder))
    assert library.tensorrt_include_dir() == folder
    assert library.header_version(folder) == (11, 2, 1)


def test_headers_that_are_too_old_or_absent_are_refused_with_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.INCLUDE_VARIABLE, str(fake_headers(tmp_path / "old", 10, 13)))
    with pytest.raises(
        BackendError, match=r"old: version 10\.13\.1[\s\S]*TENSORRT_INCLUDE_DIR[\s\S]*pip install --no-"
    ):
        library.tensorrt_include_dir()
    monkeypatch.setenv(library.INCLUDE_VARIABLE, str(tmp_path))
    with pytest.raises(BackendError, match=f"{tmp_path}: no NvInferRuntime.h"):
        library.tensorrt_include_dir()


def test_a_second_compilation_is_none(empty_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    first = library.compile_library("libanswer.so", [source])
    stamp = first.stat().st_mtime_ns
    assert library.compile_library("libanswer.so", [source]) == first
    assert first.stat().st_mtime_ns == stamp
    source.write_text(SOURCE.replace("42", "43"))
    assert library.compile_library("libanswer.so", [source]) != first
    assert first.parent.parent == empty_cache


def test_compilations_at_once_do_not_disturb_each_other(empty_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: library.compile_library("libanswer.so", [source]), range(4)))
    assert len(paths) == 1
    assert [path.name for path in paths.pop().parent.iterdir()] == ["libanswer.so"]


def test_a_failed_compilation_says_why_and_leaves_nothing(empty_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int broken( { return 0; }\n")
    with pytest.raises(BuildError, match=r"libbroken\.so: g\+\+ returned 1\. It said:[\s\S]*broken\.cpp:1"):
        library.compile_library("libbroken.so", [source])
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []


def test_an_absent_compiler_is_named(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"found no compiler 'no-such-compiler'; needed g\+\+ with C\+\+17"):
        library.compile_library("libanswer.so", [source])


def test_the_library_links_to_neither_tensorrt_nor_cuda() -> None:
    needed = subprocess.run(
        ["ldd", str(library.plugin_library())], capture_output=True, text=True, check=True
    ).stdout.lower()
    assert "libstdc++" in needed
    assert not any(name in needed for name in ("nvinfer", "tensorrt", "cuda"))


def test_the_command_leaves_a_copy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_replayssm.plugins.library", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    copy = tmp_path / "out" / library.LIBRARY_NAME
    assert done.stdout.strip() == str(copy)
    assert copy.read_bytes() == library.plugin_library().read_bytes()


def test_the_command_ends_with_2_for_a_users_mistake(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_replayssm.plugins.library"]
    environment = os.environ | {library.LIBRARY_VARIABLE: str(tmp_path / "absent.so")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "which is no file" in done.stderr and "Traceback" not in done.stderr


def test_the_cache_folder_follows_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_REPLAYSSM_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("TRTLLM_REPLAYSSM_CACHE_DIR")
    assert cache_dir() == tmp_path / "b" / "trtllm_replayssm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "trtllm_replayssm"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRTLLM_REPLAYSSM_CACHE_DIR", str(tmp_path / "file" / "inside"))
    with pytest.raises(BuildError, match="needed a folder that can be written. Name another one with TRTLLM_REPLAYSSM"):
        cache_dir()


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    write_beside(path, b"whole")
    with pytest.raises(RuntimeError, match="midway"), beside(path) as temporary:
        temporary.write_bytes(b"ha")
        raise RuntimeError("midway")
    assert path.read_bytes() == b"whole"
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_the_hash_tells_parts_apart() -> None:
    assert len({content_hash(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""), ())}) == 5
    assert content_hash("a") == content_hash(b"a")
