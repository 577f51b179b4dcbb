"""What ``transformers`` says about a checkpoint, and a look at every logit that our executor returns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs


class Reference:
    """A folder's model in ``transformers``, on the CPU; in fp32 unless told otherwise."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after every token of a sequence: [len, V]."""
        logits: torch.Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float()

    def assert_greedy(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Fail unless each generated token is what greedy decoding takes after the tokens before it.

        By induction this is the sequence that ``transformers`` generates greedily.
        """
        logits = self.logits([*prompt, *generated])[len(prompt) - 1 : -1]
        wrong = (logits.argmax(-1) != torch.tensor(generated)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            best = logits[at].topk(2)
            raise AssertionError(
                f"token {at} of {len(generated)} is {generated[at]}; transformers takes {best.indices[0].item()}, "
                f"whose logit leads by {(best.values[0] - best.values[1]).item():.2e}"
            )


class FlushCounter:
    """Follows the tokens that an executor is given and counts the flushes that the protocol asks for.

    The folded tokens are kept here, from c, n and the window alone, and compared with those that the executor is told.
    """

    def __init__(self, executor: Executor) -> None:
        self.num_flushes = 0
        self._replay = executor.replay
        self._folded: dict[int, int] = {}
        self._step = executor.step
        executor.step = self.step  # type: ignore[method-assign]

    def step(self, inputs: StepInputs) -> StepOutputs:
        max_draft_len, history = self._replay.max_draft_len, self._replay.history
        counters = (inputs.slot_ids, inputs.past_lengths, inputs.checkpoint_lengths, inputs.num_tokens)
        for slot, c, told, n in zip(*(counter.tolist() for counter in counters), strict=True):
            if slot < 0:
                continue
            f = self._folded[slot] if c else 0
            assert told == f, f"slot {slot}: told {told} folded tokens of {c}; needed {f}"
            if protocol.is_prefill(inputs.input_ids.shape[1], max_draft_len):
                f = c + n
            elif protocol.needs_flush(c, f, history=history, max_draft_len=max_draft_len):
                f = c
                self.num_flushes += 1
            self._folded[slot] = f
        return self._step(inputs)


class LogitRecorder:
    """Keeps the logits that an executor returns for the first slot, by token position.

    A rejected draft's logits are overwritten by those of the token that takes its place, as its rows are.
    """

    def __init__(self, executor: Executor) -> None:
        self.by_position: dict[int, torch.Tensor] = {}
        self._step = executor.step
        executor.step = self.step  # type: ignore[method-assign]

    def step(self, inputs: StepInputs) -> StepOutputs:
        outputs = self._step(inputs)
        for row in (inputs.slot_ids == 0).nonzero()[:, 0].tolist():
            for j, index in enumerate(inputs.logits_indices[row].tolist()):
                self.by_position[int(inputs.past_lengths[row]) + index] = outputs.logits[row, j].float().clone()
        return outputs
