"""The decode loop: plan -> draft -> execute -> accept -> commit -> settle.

Rollback of rejected drafts has no code here or anywhere: their rows lie beyond the committed length and the next step
writes over them. One thread at a time uses a loop.
"""

import operator
import reprlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from trtllm_replayssm.config import KvCacheConfig
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.errors import ReplaySSMError, RequestError
from trtllm_replayssm.runtime.acceptance import judge
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.inputs import build_inputs
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.outputs import FinishReason
from trtllm_replayssm.runtime.prefix_cache.reuse import PrefixReuse
from trtllm_replayssm.runtime.prefix_cache.slot_states import SlotStates
from trtllm_replayssm.runtime.prompt_sharing import PromptSharing
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.request_heap import RequestHeap
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.speculative.adaptive import hidden_state_drafter
from trtllm_replayssm.runtime.speculative.base import Drafter, ModelDrafter
from trtllm_replayssm.runtime.step import StepPlan


class DecodeLoop:
    """Runs requests to their end, many at a time.

    Args:
        executor: runs a step of the model.
        drafter: proposes draft tokens.
        limits: how many requests run at a time and the longest prompt piece; at most the executor's own limits.
        recorder: counts what happens.
        max_prompt_steps: most prompt pieces between two decode steps.
        priority_aging_s: seconds of waiting that count as one more of priority; None for strict priorities.
        max_tokens: most tokens of all running sequences together; None for what the slots hold.
        cache_config: whether prompts that begin alike share what was computed.

    Attributes:
        reuse: the prefix cache, or None.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        limits: EngineLimits,
        recorder: MetricsRecorder,
        *,
        max_prompt_steps: int = defaults.MAX_PROMPT_STEPS,
        priority_aging_s: float | None = None,
        max_tokens: int | None = None,
        cache_config: KvCacheConfig | None = None,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._hidden_state_drafter = hidden_state_drafter(drafter)
        self._recorder = recorder
        self._slots = Slots(limits.max_batch_size)
        head = () if self._hidden_state_drafter is None else self._hidden_state_drafter.states
        self._states = SlotStates(executor.geometry, (*executor.states, *head))
        self._sharing = PromptSharing(self._states, self._slots)
        self.reuse: PrefixReuse | None = None
        if cache_config is not None and cache_config.enable_block_reuse:
            self.reuse = PrefixReuse(executor, self._states, self._slots, cache_config, limits)
        self._scheduler = Scheduler(
            self._slots,
            limits.max_num_tokens,
            max_prompt_steps=max_prompt_steps,
            priority_aging_s=priority_aging_s,
            max_tokens=max_tokens,
            max_draft_len=min(drafter.max_draft_len, executor.replay.max_draft_len),
            block_size=None if self.reuse is None else self.reuse.block_size,
        )
        self._deadlines = RequestHeap(_deadline)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return self._scheduler.num_running

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add(request)
        if request.deadline_s is not None:
            self._deadlines.add(request)

    def step(self) -> tuple[Request, ...]:
        """Run one step; return the requests whose tokens grew or that ended.

        Raises:
            Exception: what the executor or the drafter raised; the loop is then good for ``end`` and ``close`` alone.
        """
        self._turn_over()
        if not self._scheduler.num_running:
            return ()
        plan = self._scheduler.plan()
        refused: tuple[Request, ...] = ()
        if plan.kind == "decode" and self._drafter.max_draft_len:
            plan, refused = self._draft(plan)
        if not plan.rows:
            return refused
        inputs = build_inputs(plan, self._slots, self._executor.device)
        outputs = self._executor.step(inputs)
        # A device still runs the step: what needs no result is done before one is waited for.
        self._recorder.count_step(plan, self._slots)
        plan = self._share_prompt(plan)
        verdicts = judge(plan, outputs.logits)
        if self._hidden_state_drafter is not None:
            self._hidden_state_drafter.follow(plan, inputs, outputs, verdicts, self._slots)
        self._sharing.copy_states(plan)
        commit(plan, verdicts, self._slots, self._executor.replay)
        if self.reuse is not None:
            self.reuse.after_commit(plan, verdicts)
        appended = self._scheduler.settle(plan, verdicts)
        self._recorder.count_tokens(plan, verdicts, appended)
        changed = list(refused)
        for row, token_ids in zip(plan.rows, appended, strict=True):
            request = row.request
            self._drafter.observe(request.request_id, token_ids)
            is_finished = request.is_finished
            if is_finished:
                if self.reuse is not None:
                    self.reuse.keep(request, row.slot)
                self._forget(request)
            if token_ids or is_finished:
                changed.append(request)
        return tuple(changed)

    def end(self, request: Request, reason: FinishReason, error: ReplaySSMError | None = None) -> bool:
        """End a request before its time, wherever it stands; return whether it had not ended before."""
        if request.is_finished:
            return False
        has_begun = request.slot is not None
        self._scheduler.end(request, reason, error)
        self._forget(request, has_begun=has_begun)
        return True

    def end_overdue(self) -> tuple[Request, ...]:
        """End the requests whose time is over, with finish_reason "timeout"; return them."""
        overdue = []
        now = time.perf_counter()
        while (request := self._deadlines.first()) is not None and _deadline(request)[0] <= now:
            self.end(request, "timeout")
            overdue.append(request)
        return tuple(overdue)

    def close(self) -> None:
        """Release what the drafter and the prefix cache hold, and the executor's pools; the loop is not used again."""
        with ExitStack() as all_of_them:  # the others, too, where one fails
            all_of_them.callback(self._states.close)
            if self.reuse is not None:
                all_of_them.callback(self.reuse.close)
            if isinstance(self._drafter, ModelDrafter):
                all_of_them.callback(self._drafter.close)

    def _turn_over(self) -> None:
        preempted, admitted = self._scheduler.admit()
        for request in preempted:
            self._drafter.end(request.request_id)
            if self.reuse is not None:
                self.reuse.end(request)
        for request in admitted:
            self._drafter.begin(request.request_id, request.tokens(0, request.num_tokens))
            # One that will take over another's states needs none of its own.
            if self.reuse is not None and not any(r.index < request.index for r in self._scheduler.siblings(request)):
                self.reuse.begin(request)
        self._recorder.count_preemptions(len(preempted))

    def _share_prompt(self, plan: StepPlan) -> StepPlan:
        """Let the other sequences of a prompt that has run to its end go on from there."""
        if plan.kind != "prompt" or not plan.rows[0].is_sampled:
            return plan
        followers = self._scheduler.siblings(plan.rows[0].request)
        if self.reuse is not None:
            self.reuse.follow(followers)
        return self._sharing.share(plan, followers) if followers else plan

    def _draft(self, plan: StepPlan) -> tuple[StepPlan, tuple[Request, ...]]:
        """Add drafts to a plan; return it without the requests that ended because theirs are no tokens, and those."""
        longest = min(self._drafter.max_draft_len, self._executor.replay.max_draft_len)
        # The window's last token is never a draft, hence one less than what may still be generated.
        limits = {row.request.request_id: min(longest, row.request.num_remaining - 1) for row in plan.rows}
        drafts = self._drafter.propose(limits)
        if len(drafts) == 0:
            return plan, ()
        rows, refused = [], []
        for row in plan.rows:
            request_id = row.request.request_id
            if request_id not in drafts:
                rows.append(row)
                continue
            try:
                found = self._token_ids(drafts[request_id], limits[request_id])
            except RequestError as error:
                self.end(row.request, "error", error)
                refused.append(row.request)
            else:
                rows.append(row.with_drafts(found))
        num_rows = rows[-1].slot + 1 if rows else 0
        return replace(plan, rows=tuple(rows), num_rows=num_rows), tuple(refused)

    def _token_ids(self, drafts: Sequence[int], limit: int) -> tuple[int, ...]:
        vocab_size = self._executor.geometry.vocab_size
        try:
            found = tuple(map(operator.index, drafts))[:limit]
        except TypeError:
            found = (-1,)  # no ids at all
        if all(0 <= token_id < vocab_size for token_id in found):
            return found
        raise RequestError(
            f"drafts: found {reprlib.repr(drafts)}; needed token ids, 0 <= id < {vocab_size}. Mend the drafter."
        )

    def _forget(self, request: Request, *, has_begun: bool = True) -> None:
        self._deadlines.remove(request)
        self._recorder.count_end(request)
        if has_begun:
            if self.reuse is not None:
                self.reuse.end(request)
            self._drafter.end(request.request_id)


def _deadline(request: Request) -> tuple[float, int]:
    assert request.deadline_s is not None, "a request without a deadline has no clock"
    return (request.deadline_s, request.request_id)
