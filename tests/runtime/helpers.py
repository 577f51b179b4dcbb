"""Requests, plans and drafters for the runtime's tests."""

from collections.abc import Mapping, Sequence

from trtllm_replayssm import SamplingParams
from trtllm_replayssm.runtime.request import Request, RequestState
from trtllm_replayssm.runtime.step import RowPlan, StepPlan

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def make_request(
    request_id: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    end_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
) -> Request:
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=params,
        seed=seed,
        end_ids=frozenset(end_ids),
        max_new_tokens=params.max_tokens if max_new_tokens is None else max_new_tokens,
    )


def decoding_request(request_id: int, slot: int, generated: Sequence[int] = (7,), **options: object) -> Request:
    request = make_request(request_id, **options)  # type: ignore[arg-type]
    request.slot = slot
    request.move_to(RequestState.PREFILL)
    request.move_to(RequestState.DECODE)
    request.token_ids.extend(generated)
    return request


def decode_plan(requests: Sequence[Request], drafts: Sequence[tuple[int, ...]] | None = None) -> StepPlan:
    rows = []
    for number, request in enumerate(requests):
        assert request.slot is not None
        row = RowPlan(request, request.slot, (request.token_ids[-1],), num_drafts=0, is_sampled=True)
        rows.append(row if drafts is None else row.with_drafts(drafts[number]))
    return StepPlan("decode", tuple(rows), first_slot=0, num_rows=rows[-1].slot + 1)


class ScriptedDrafter:
    """Knows what plain decoding generates, and proposes that, or always something else.

    Args:
        continuations: prompt -> the tokens that plain decoding appends.
        max_draft_len: drafts of a step.
        wrong_from: from which draft of a step on the proposals are wrong; None for never.
    """

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Sequence[int]],
        max_draft_len: int,
        *,
        wrong_from: int | None = None,
    ) -> None:
        self.max_draft_len = max_draft_len
        self._continuations = continuations
        self._wrong_from = max_draft_len if wrong_from is None else wrong_from
        self._script: dict[int, Sequence[int]] = {}
        self._position: dict[int, int] = {}

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        self._script[request_id] = self._continuations[tuple(prompt_token_ids)]
        self._position[request_id] = 0

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        self._position[request_id] += len(token_ids)

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        drafts = {}
        for request_id, limit in limits.items():
            at = self._position[request_id]
            true = self._script[request_id][at : at + min(limit, self.max_draft_len)]
            drafts[request_id] = [token ^ 1 if i >= self._wrong_from else token for i, token in enumerate(true)]
        return drafts

    def end(self, request_id: int) -> None:
        del self._script[request_id], self._position[request_id]
