"""Holds an ``LLM``'s steps back, so that a test knows what is running."""

import threading
from typing import Any

import pytest

from trtllm_replayssm import LLM


class Gate:
    """Lets an executor's steps through while it is open.

    Attributes:
        is_open: steps wait for it.
        has_met: a step has come to the gate.
        num_met: steps that have come to it.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.has_met = threading.Event(), threading.Event()
        self.num_met = 0
        self._left = threading.Semaphore(0)
        step = llm._executor.step

        def gated(inputs: Any) -> Any:
            self.num_met += 1
            self.has_met.set()
            while not self.is_open.is_set() and not self._left.acquire(timeout=0.01):
                pass
            return step(inputs)

        monkeypatch.setattr(llm._executor, "step", gated)

    def let_through(self, count: int) -> None:
        """Let so many steps through."""
        self._left.release(count)
