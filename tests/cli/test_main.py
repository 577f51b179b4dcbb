"""The command line's frame: exit codes, one-line errors, and commands that do not break each other."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_replayssm.cli import main as main_module
from trtllm_replayssm.cli.main import COMMANDS, Command, main
from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.errors import ConfigError


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
        (lambda: SamplingParams(max_tokens=0), 2, "error: max_tokens: found 0; "),
        (lambda: SamplingParams(max_token=1), 2, "error: max_token: unknown option\n"),  # type: ignore[call-arg]
        (lambda: SamplingParams(min_tokens=9, max_tokens=3), 2, "min_tokens: found 9; needed at most max_tokens (3)"),
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


def test_the_console_script_is_installed_under_its_name() -> None:
    assert main_module.main is main
    script = Path(sys.executable).with_name("trtllm-replayssm")
    result = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.strip()
