"""The command line's frame: exit codes, one-line errors, and commands that do not break each other."""

import importlib
import os
import pty
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.meta.repository import ROOT
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm.builders.progress import BuildProgress
from trtllm_replayssm.cli.main import COMMANDS, Command, main
from trtllm_replayssm.cli.tables import facts_table, new_table, rendered
from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.errors import ConfigError

MODEL = ROOT / "examples" / "tiny_hybrid" / "model"


def raise_(error: BaseException) -> None:
    raise error


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Give a function that runs a command whose body is the given one."""

    def run(body: Callable[[], Any], *arguments: str) -> int:
        module = types.ModuleType("stand_in_command")
        module.command = lambda: body()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "stand_in_command", module)
        monkeypatch.setitem(COMMANDS, "stand_in", Command("stand_in_command", "Test."))
        return main(["stand_in", *arguments])

    return run


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        (lambda: None, 0, ""),
        (lambda: raise_(ConfigError("history: found 0; needed 1.")), 2, "error: history: found 0; needed 1. [C001]\n"),
        (lambda: ReplayGeometry(state_dtype="int8"), 2, "error: state_dtype: found 'int8'; needed "),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_token=1), 2, "error: max_token: unknown key. Did you mean max_tokens? "),  # type: ignore[call-arg]
        (lambda: SamplingParams(min_tokens=9, max_tokens=3), 2, "error: min_tokens: found 9; needed at most max"),
        (lambda: open("/nonexistent/file"), 2, "error: /nonexistent/file: No such file or directory\n"),
        (lambda: raise_(KeyboardInterrupt()), 130, "error: interrupted\n"),
        (lambda: raise_(BrokenPipeError()), 141, ""),
    ],
    ids=["ok", "ours", "pydantic", "unknown-key", "rule", "os", "ctrl-c", "pipe"],
)
def test_each_kind_of_failure_has_its_exit_code_and_one_line(
    call: Callable[..., int],
    body: Callable[[], Any],
    code: int,
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert call(body) == code
    stderr = capfd.readouterr().err
    assert sentence in stderr
    assert stderr.count("\n") == bool(sentence)


def test_a_fault_of_our_own_is_not_hidden(call: Callable[..., int]) -> None:
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0)


@pytest.mark.parametrize(
    "arguments",
    [["dance"], ["convert"], ["convert", "--model_dir"], ["convert", "--wobble", "1"], ["--wobble"]],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_help_and_version_name_every_command_without_importing_any() -> None:
    script = (
        "import sys; from trtllm_replayssm.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    for arguments in ([], ["--help"], ["--version"]):
        result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert arguments == ["--version"] or all(name in result.stdout for name in COMMANDS)


def test_a_missing_package_stops_its_own_command_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_a_package.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "broken", Command("needs_a_package", "Test."))
    assert main(["broken"]) == 2
    assert "broken: the Python package 'a_package_that_is_absent' is missing" in capsys.readouterr().err
    assert main(["convert", "--help"]) == 0


def test_a_package_that_is_missed_while_a_command_runs_is_one_line(tmp_path: Path) -> None:
    script = "import sys; sys.modules['onnx'] = None; from trtllm_replayssm.cli.main import main; sys.exit(main())"
    options = ["build", "--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "engine")]
    done = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: build: the Python package 'onnx' is missing. Install it with pip. [T001]\n"


def test_a_module_of_our_own_that_is_missing_is_not_hidden(call: Callable[..., int]) -> None:
    with pytest.raises(ModuleNotFoundError):
        call(lambda: importlib.import_module("trtllm_replayssm.absent"))


@pytest.mark.parametrize(
    "given",
    [["8.6", "8.9", "12.0"], ["8.6", "--compute_capability", "8.9", "12.0"], ["8.6 8.9", "12.0"], ["8.6,8.9,12.0"]],
    ids=" ".join,
)
def test_an_option_takes_several_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: list[str]) -> None:
    built: list[dict[str, Any]] = []

    def build(*_: Path, **options: Any) -> Path:
        built.append(options)
        return tmp_path

    monkeypatch.setattr("trtllm_replayssm.builders.engine.build", build)
    folders = ["--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "engine")]
    assert main(["build", "--compute_capability", *given, *folders, "--history", "8"]) == 0
    (options,) = built
    assert (options["compute_capabilities"], options["history"]) == ((86, 89, 120), 8)


@pytest.mark.parametrize("capability", ["--compute_capability", "--compute-capability"])
def test_dashes_stand_for_underscores_in_names_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str
) -> None:
    built: list[tuple[Path, dict[str, Any]]] = []

    def build(checkpoint_dir: Path, _: Path, **options: Any) -> Path:
        built.append((checkpoint_dir, options))
        return tmp_path

    monkeypatch.setattr("trtllm_replayssm.builders.engine.build", build)
    arguments = ["--checkpoint-dir", "a-folder", "--output_dir", "b", "--max-batch-size=3", capability, "8.6", "8.9"]
    assert main(["build", *arguments]) == 0
    ((folder, options),) = built
    assert folder == Path("a-folder")
    assert (options["max_batch_size"], options["compute_capabilities"]) == (3, (86, 89))


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspec", "x"]) == 2
    assert capsys.readouterr().err == "error: No such command 'inspec'. Did you mean 'inspect'? Try --help.\n"


def test_a_choice_that_is_none_is_named_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--backend", "foo", "--checkpoint_dir", "a", "--output_dir", "b"]) == 2
    needed = "error: Invalid value for '--backend': 'foo' is not one of 'tensorrt', 'tensorrt_rtx'. Try --help.\n"
    assert capsys.readouterr().err == needed


@pytest.mark.parametrize("page", [(), *((command,) for command in COMMANDS), ("bench", "kernels"), ("bench", "e2e")])
def test_help_pages_of_80_columns_have_every_word_in_full(
    page: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*page, "--help"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.count("<") != line.count(">")] == []  # of a value's kind
    assert [word for word in shown.split() if word.endswith(("...", "…")) and word != "[ARGS]..."] == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["build", "--help"], ["--version"], ["inspect", str(MODEL)]], ids=str
)
def test_a_reader_that_leaves_ends_the_command_as_a_signal_would(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "trtllm_replayssm", *arguments], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_value_that_belongs_to_no_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--history", "8", "8.9", "--checkpoint_dir", "a", "--output_dir", "b"]) == 2
    assert "8.9" in capsys.readouterr().err


def test_bars_are_drawn_on_terminals_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_nemotron_h(tmp_path / "hf")
    capsys.readouterr()
    assert main(["convert", "--model_dir", str(folder), "--output_dir", str(tmp_path / "checkpoint")]) == 0
    with BuildProgress(shown=True) as progress, progress.step("parse"):
        pass
    assert capsys.readouterr().err == ""


def test_an_error_stands_alone_on_a_terminal(tmp_path: Path) -> None:
    script = """
from trtllm_replayssm.builders.progress import BuildProgress
with BuildProgress(shown=True) as progress, progress.step("parse"):
    raise SystemExit(2)
"""
    ours, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", script], stderr=terminal, env=environment, check=False)
    os.close(terminal)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 2
    before, _, after = shown.rpartition("\x1b[2K")  # the terminal's "erase this line"
    assert "parse" in before and "parse" not in after


def test_an_interruption_while_the_command_is_imported_is_one_line() -> None:
    script = """
import builtins, sys
original = builtins.__import__
def interrupted(name, *rest):
    if name == "typer":
        raise KeyboardInterrupt
    return original(name, *rest)
builtins.__import__ = interrupted
from trtllm_replayssm.cli.entry import main
assert "pydantic" not in sys.modules, "what takes time is imported inside the guard"
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_the_console_script_is_installed_under_its_name() -> None:
    script = Path(sys.executable).with_name("trtllm-replayssm")
    result = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.strip()


def test_a_title_stays_on_its_line_above_a_narrow_table() -> None:
    made = new_table("A title that is longer than its table", "a")
    made.add_row("1")
    facts = facts_table("Another title that is longer", {"a": 1})
    shown = rendered([made, facts]).splitlines()
    assert [line for line in shown if "title" in line] == [
        "A title that is longer than its table",
        "Another title that is longer",
    ]
