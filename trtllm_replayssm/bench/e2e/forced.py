"""Speculation at a given acceptance, for models of random weights, whose tokens nothing can predict.

Drafts are random tokens. Before a token is chosen, the logit of the draft at its place is raised above all others, or
lowered below them, by the lot: so the target's choice is the draft with the given probability. The lot depends on the
slot and the position alone and is the same for every mode of a model. Everything else runs as it does for real drafts.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Final

import numpy as np
import torch

from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

_OUT_OF_REACH: Final = 1e9
"""Above the logits of any model, with a softmax that stays finite."""
_DRAWN_TOKENS: Final = 1024


class ForcedAcceptance:
    """An executor whose target agrees with drafts as often as it is told to.

    Args:
        executor: what really runs.
        acceptance: probability that the target's choice is the draft, 0 to 1.
        seed: of the lots.
    """

    def __init__(self, executor: Executor, acceptance: float, seed: int = 0) -> None:
        self._executor = executor
        self.name, self.geometry, self.replay = executor.name, executor.geometry, executor.replay
        self.limits, self.device = executor.limits, executor.device
        self.is_conventional, self.memory_plan = executor.is_conventional, executor.memory_plan
        positions = self.limits.kv_capacity(self.replay.window)
        lots = np.random.default_rng(seed).random((self.limits.max_batch_size, positions))
        self._is_kept = torch.from_numpy(lots < acceptance).to(self.device)

    @property
    def states(self) -> Sequence[State]:
        """What really runs has them."""
        return self._executor.states

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run a step, and change the logits at the places of drafts."""
        outputs = self._executor.step(inputs)
        window = inputs.input_ids.shape[1]
        if outputs.logits.shape[1] == window > 1:  # a window of drafts; a prompt has the logits of one position
            self._force(inputs, outputs.logits)
        return outputs

    def _force(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        drafts = inputs.input_ids[:, 1:]
        positions = inputs.past_lengths[:, None] + torch.arange(drafts.shape[1], device=self.device)
        last = self._is_kept.shape[1] - 1  # padding rows carry any length
        is_kept = self._is_kept[inputs.slot_ids.clamp(min=0).long()[:, None], positions.clamp(max=last).long()]
        values = torch.where(is_kept, _OUT_OF_REACH, -_OUT_OF_REACH)
        logits[:, :-1].scatter_(-1, drafts.long()[..., None], values[..., None])

    def close(self) -> None:
        """Close what really runs."""
        self._executor.close()


class RandomDrafter:
    """Proposes random tokens, always as many as are of use; those of a request depend on its number alone.

    Args:
        max_draft_len: most tokens it proposes for a sequence.
        vocab_size: of the model.
        seed: of the tokens.
    """

    def __init__(self, max_draft_len: int, vocab_size: int, seed: int = 0) -> None:
        self.max_draft_len = max_draft_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._drafts: dict[int, Iterator[int]] = {}

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Draw the tokens of a sequence, enough to go round in circles unnoticed."""
        drawn = np.random.default_rng((self._seed, request_id)).integers(0, self._vocab_size, _DRAWN_TOKENS)
        self._drafts[request_id] = cycle(drawn.tolist())

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Propose the next tokens of what was drawn for each sequence."""
        return {request_id: list(islice(self._drafts[request_id], limit)) for request_id, limit in limits.items()}

    def end(self, request_id: int) -> None:
        """Forget a sequence."""
        self._drafts.pop(request_id, None)
