"""What documents say can be followed: paths exist, variables are listed, and the README's sample runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.repository import ROOT, tracked
from trtllm_replayssm.cli.main import COMMANDS, main
from trtllm_replayssm.contract import protocol

DOCUMENTS = tracked("*.md")
# A path with a folder in it, or a folder; "<...>", "*" and "$" are no paths.
QUOTED_PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|cu|cuh|h|cpp|toml|json|yaml))?)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
# A command with options, in a block of code or quoted; a block's line may go on behind a backslash.
COMMAND = re.compile(
    rf"(?:^trtllm-replayssm +|`(?:trtllm-replayssm )?)({'|'.join(COMMANDS)})( kernels| e2e)?( (?:\\\n|[^`\n#])*)",
    re.MULTILINE,
)
# Where a build writes; they are in no checkout.
WRITTEN = {".venv/", ".demo/"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_files_and_folders_that_exist(document: Path) -> None:
    text = document.read_text()
    bases = (ROOT, document.parent, ROOT / "trtllm_replayssm")
    missing = [
        name
        for name in QUOTED_PATH.findall(text)
        if name not in WRITTEN and not any((base / name).exists() for base in bases)
    ]
    missing += [
        link for link in LINK.findall(text) if "://" not in link and not (document.parent / link.strip()).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_options_that_documents_show(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, level, arguments in COMMAND.findall(document.read_text()):
        shown = set(re.findall(r"--\w[\w-]*", arguments))
        if shown:
            assert main([name, *level.split(), "--help"]) == 0
            assert shown - set(re.findall(r"--\w[\w-]*", capsys.readouterr().out)) == set(), (name, arguments)


def test_the_example_of_the_protocol_follows_it() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text().partition("## An example")[2]
    rows = [
        [int(number) for number in re.findall(r"\d+", row)] for row in re.findall(r"^\| (\d .*)\|$", text, re.MULTILINE)
    ]
    rules = {"history": 4, "max_draft_len": 1}
    ring_rows = protocol.min_ring_rows(**rules)
    c, f = protocol.advance_prefill(0, 5)
    for step, row in enumerate(rows, start=1):
        is_flush = protocol.needs_flush(c, f, **rules)
        expected = [step, c, f, c - f + 2, *((f, c) if is_flush else ()), c, c + 1, c % ring_rows, (c + 1) % ring_rows]
        accepted = row[len(expected)]
        c, f = protocol.advance(c, f, accepted, **rules)
        assert row == [*expected, accepted, c, f]
    assert len(rows) == 5 and c - 5 == 8


def test_every_environment_variable_is_on_its_page() -> None:
    used = set()
    for path in tracked("trtllm_replayssm/*.py", "plugins/*.py", "builders/*.py"):
        used |= variables_used(path)
    for path in tracked("plugins/*.cpp", "plugins/*.h"):
        used |= set(re.findall(r'getenv\("(\w+)"', path.read_text()))
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    assert used == documented - {"PYTHON"}  # the Makefile's own


def variables_used(path: Path) -> set[str]:
    """Return the names in ``os.environ[...]``, ``.get(...)``, ``.setdefault(...)`` and ``os.getenv(...)``."""
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    names = set()
    functions = ("os.environ.get", "os.environ.setdefault", "os.getenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            key = node.slice
        else:
            continue
        name = key.value if isinstance(key, ast.Constant) else constants[ast.unparse(key)]
        names.add(str(name))
    return names


@pytest.mark.parametrize(
    ("document", "number", "printed"), [("README.md", 3, "num_generated_tokens"), ("docs/from_tensorrt_llm.md", 1, "")]
)
def test_python_samples_run_from_the_repository_one_after_the_other(document: str, number: int, printed: str) -> None:
    samples = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    samples = [sample for sample in samples if "from openai import" not in sample]  # needs a server
    assert len(samples) == number
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(samples)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
