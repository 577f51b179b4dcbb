"""Texts to tokens: as the file says and whole, while other threads go on."""

import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.meta.repository import ROOT
from trtllm_replayssm.runtime.tokenizer import Tokenizer

FILE = ROOT / "examples" / "tiny_hybrid" / "model" / "tokenizer.json"


@pytest.mark.parametrize("text", ["", "def main():\n", "é 日本語 \N{GRINNING FACE}\0", FILE.read_text()[:20_000]])
@pytest.mark.parametrize("adds_special", [False, True])
def test_the_tokens_are_those_of_the_library(text: str, adds_special: bool) -> None:
    expected = FastTokenizer.from_file(str(FILE)).encode(text, add_special_tokens=adds_special).ids
    assert Tokenizer(FILE).encode(text, add_special_tokens=adds_special) == expected


def test_a_file_that_cuts_and_fills_up_neither_cuts_nor_fills_up_a_prompt(tmp_path: Path) -> None:
    trained = FastTokenizer.from_file(str(FILE))
    trained.enable_truncation(2)
    trained.enable_padding(length=8)
    trained.save(str(tmp_path / "tokenizer.json"))
    for text in ("x", "def main(self, value):\n    return value"):
        assert Tokenizer(tmp_path / "tokenizer.json").encode(text) == Tokenizer(FILE).encode(text)


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer, num_turns, is_over = Tokenizer(FILE), 0, threading.Event()

    def encode() -> None:
        tokenizer.encode("x" * 4_000_000)
        is_over.set()

    worker = threading.Thread(target=encode)
    worker.start()
    while not is_over.is_set():
        time.sleep(0.005)
        num_turns += 1
    worker.join()
    assert num_turns > 10
