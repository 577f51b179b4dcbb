"""The decode loop: plan -> draft -> execute -> accept -> commit -> settle.

Rollback of rejected drafts has no code here or anywhere: their rows lie beyond the committed length and the next step
writes over them.
"""

from dataclasses import replace

from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.acceptance import judge
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.inputs import build_inputs
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.speculative.base import Drafter
from trtllm_replayssm.runtime.step import StepPlan


class DecodeLoop:
    """Runs requests to their end, many at a time.

    Args:
        executor: runs a step of the model.
        drafter: proposes draft tokens.
        limits: how many requests run at a time and the longest prompt piece; at most the executor's own limits.
        recorder: counts what happens.
    """

    def __init__(self, executor: Executor, drafter: Drafter, limits: EngineLimits, recorder: MetricsRecorder) -> None:
        self._executor = executor
        self._drafter = drafter
        self._recorder = recorder
        self._slots = Slots(limits.max_batch_size)
        self._scheduler = Scheduler(self._slots, limits.max_num_tokens)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add(request)

    def step(self) -> tuple[Request, ...]:
        """Run one step; return the requests whose tokens grew, finished ones included."""
        for request in self._scheduler.admit():
            self._drafter.begin(request.request_id, request.prompt_token_ids)
        plan = self._draft(self._scheduler.plan())
        inputs = build_inputs(plan, self._slots, self._executor.device)
        outputs = self._executor.step(inputs)
        verdicts = judge(plan, outputs.logits)
        self._recorder.count_step(plan, self._slots)
        commit(plan, verdicts, self._slots, self._executor.replay)
        appended = self._scheduler.settle(plan, verdicts)
        self._recorder.count_tokens(plan, verdicts, appended)
        for row, token_ids in zip(plan.rows, appended, strict=True):
            self._drafter.observe(row.request.request_id, token_ids)
            if row.request.is_finished:
                self._drafter.end(row.request.request_id)
        return tuple(row.request for row, token_ids in zip(plan.rows, appended, strict=True) if token_ids)

    def drop_all(self) -> None:
        """Forget every request: after an error or an interrupt the next ones start on clean slots."""
        for request in self._scheduler.drop_all():
            self._drafter.end(request.request_id)

    def _draft(self, plan: StepPlan) -> StepPlan:
        if plan.kind != "decode" or not self._drafter.max_draft_len:
            return plan
        longest = min(self._drafter.max_draft_len, self._executor.replay.max_draft_len)
        # The window's last token is never a draft, hence one less than what may still be generated.
        limits = {row.request.request_id: min(longest, row.request.num_remaining - 1) for row in plan.rows}
        drafts = self._drafter.propose(limits)
        rows = []
        for row in plan.rows:
            request_id = row.request.request_id
            found = tuple(drafts.get(request_id, ()))[: limits[request_id]]
            self._check_drafts(found)
            rows.append(row.with_drafts(found))
        return replace(plan, rows=tuple(rows))

    def _check_drafts(self, drafts: tuple[int, ...]) -> None:
        vocab_size = self._executor.geometry.vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in drafts):
            raise RequestError(f"drafts: found token ids {drafts}; needed 0 <= id < {vocab_size}. Mend the drafter.")
