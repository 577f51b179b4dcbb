"""A drafter that asks another one for as many drafts as pay. It sees the clock; the policy does not."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from trtllm_replayssm.config import DecodingConfig
from trtllm_replayssm.runtime.speculative.base import Drafter, HiddenStateDrafter, ModelDrafter
from trtllm_replayssm.runtime.speculative.policy import SpeculationPolicy


class AcceptanceGate:
    """Watches the acceptance rate of the last steps with drafts, and closes for good where it falls too low.

    Args:
        window_size: how many steps are watched; nothing is judged before so many.
        threshold: lowest accepted share of their drafts.
    """

    def __init__(self, window_size: int, threshold: float) -> None:
        self.is_open = True
        self._threshold = threshold
        self._steps: deque[tuple[int, int]] = deque(maxlen=window_size)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count a step; one without drafts does not count."""
        if not num_drafts:
            return
        self._steps.append((num_drafts, num_accepted))
        if len(self._steps) == self._steps.maxlen:
            drafts, accepted = map(sum, zip(*self._steps, strict=True))
            self.is_open &= accepted >= self._threshold * drafts


class AdaptiveDrafter:
    """Fits the number of another drafter's drafts to what they bring.

    A step's time runs from the call of ``propose`` to the first ``observe`` after it: drafting, the target's step, and
    the choice of tokens, which waits for the device.

    Args:
        drafter: whose drafts these are.
        config: what is to be adapted, and within which bounds.
        is_free: drafts cost nothing to make, so that all are made and then as many taken as pay.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: DecodingConfig,
        *,
        is_free: bool = False,
    ) -> None:
        self.max_draft_len = drafter.max_draft_len
        self.drafter = drafter
        self._is_free = is_free
        self._policy = SpeculationPolicy(catches_up=not is_free) if config.adaptive else None
        self._max_concurrency = config.max_concurrency
        self._gate: AcceptanceGate | None = None
        if config.acceptance_rate_window_size is not None and config.acceptance_rate_threshold is not None:
            self._gate = AcceptanceGate(config.acceptance_rate_window_size, config.acceptance_rate_threshold)
        self._clock = time.perf_counter
        self._wanted: dict[int, int] = {}  # where drafts were wanted
        self._drafts: dict[int, tuple[int, ...]] = {}  # of the same sequences
        self._asked: Mapping[int, int] = {}  # the limits of the step's sequences
        self._started: float | None = None
        self._counts = (0, 0)

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Hand the sequence on."""
        self.drafter.begin(request_id, prompt_token_ids)

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Ask for as many drafts as pay."""
        if self._gate is not None:
            self._gate.add(*self._counts)
        self._counts, self._asked = (0, 0), limits
        self._started = self._clock()
        if self._is_free:
            found = self.drafter.propose(limits)
            useful = {i: min(limits[i], len(drafts)) for i, drafts in found.items()}
            lengths = self._lengths(dict.fromkeys(limits, 0) | useful if useful else {})
        else:
            lengths = self._lengths(limits)
            found = self.drafter.propose(lengths)
        self._wanted = {request_id: length for request_id, length in lengths.items() if length}
        self._drafts = {i: tuple(found.get(i, ()))[:wanted] for i, wanted in self._wanted.items()}
        return self._drafts

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Note which drafts were accepted; the first call after ``propose`` ends the step's time."""
        if self._started is not None and request_id in self._asked:
            self._record_time(self._clock() - self._started)
        if token_ids and request_id in self._drafts:
            self._record_drafts(request_id, self._drafts.pop(request_id), token_ids)
        self.drafter.observe(request_id, token_ids)

    def end(self, request_id: int) -> None:
        """Forget the sequence."""
        self._drafts.pop(request_id, None)
        if self._policy is not None:
            self._policy.forget(request_id)
        self.drafter.end(request_id)

    def close(self) -> None:
        """Release what the drafter holds."""
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.close()

    def _lengths(self, limits: Mapping[int, int]) -> dict[int, int]:
        is_crowded = self._max_concurrency is not None and len(limits) > self._max_concurrency
        if is_crowded or not (self._gate is None or self._gate.is_open):
            return dict.fromkeys(limits, 0)
        longest = {request_id: min(limit, self.max_draft_len) for request_id, limit in limits.items()}
        return longest if self._policy is None else self._policy.lengths(longest)

    def _record_time(self, seconds: float) -> None:
        self._started = None
        if self._policy is not None:
            self._policy.record_time(len(self._asked), max(self._wanted.values(), default=0), seconds)

    def _record_drafts(self, request_id: int, drafts: tuple[int, ...], token_ids: Sequence[int]) -> None:
        # The last token is the target's own; where the sequence ended within its drafts, that one was accepted as well.
        num_accepted = 0
        for draft, token_id in zip(drafts, token_ids, strict=False):
            if draft != token_id:
                break
            num_accepted += 1
        num_drafts, num_all_accepted = self._counts
        self._counts = (num_drafts + len(drafts), num_all_accepted + num_accepted)
        if self._policy is not None:
            self._policy.record_drafts(request_id, self._wanted[request_id], len(drafts), num_accepted)


def hidden_state_drafter(drafter: Drafter) -> HiddenStateDrafter | None:
    """Return the drafter that reads the model's hidden states, were it an adaptive one's; None where none does."""
    inner = drafter.drafter if isinstance(drafter, AdaptiveDrafter) else drafter
    return inner if isinstance(inner, HiddenStateDrafter) else None
