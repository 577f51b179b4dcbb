"""The verdict on a window: which drafts stay, and which token follows.

The target's own token is chosen at every window position, by the request's rules, and a draft stays while it equals
that token. For greedy requests this is the greedy match. For sampled ones it is rejection sampling with one-hot draft
distributions (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1): a
draft d is kept with the target's probability p(d), and given that it is not, the token put in its place is distributed
as p restricted to tokens other than d, which is the normalised residual max(0, p - 1_d). As the random number of a
token is fixed by seed and position, speculation then leaves even sampled sequences as they are, token for token.
Penalties and bans of a position are those of the sequence with the drafts before it: the ones that hold if it counts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trtllm_replayssm.errors import RequestError, error_text
from trtllm_replayssm.runtime.logit_rules import Penalties, TokenMask, allows
from trtllm_replayssm.runtime.logprobs import top_logprobs
from trtllm_replayssm.runtime.outputs import Logprob
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import TokenRule, choose_tokens
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict
from trtllm_replayssm.runtime.transfer import to_device


def count_accepted(drafts: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Return how many window tokens stay: the newest token and the drafts that the target agrees with.

    Args:
        drafts: the draft tokens of the window, n - 1 of them.
        target_tokens: the target's token after each of the n window tokens.
    """
    assert len(target_tokens) == len(drafts) + 1, "the target has a token after each of the window's"
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == target_tokens[agreed]:
        agreed += 1
    return 1 + agreed


def judge(plan: StepPlan, logits: torch.Tensor) -> tuple[Verdict, ...]:
    """Decide about every row of a step.

    Args:
        plan: the step.
        logits: [B, J, V] fp32: J is S for a decode step, 1 for a prompt.

    Returns:
        One verdict per row of the plan; where a row's logits are not finite or its rules fail, one with the error.
    """
    try:
        return _judge_rows(plan.rows, plan.first_slot, logits)
    except torch.AcceleratorError:
        raise  # here a device's failure shows that happened in the step: it is everybody's
    except BaseException:  # noqa: BLE001 - whatever one row's rules raise, a library's panic included
        return tuple(_judge_alone(row, plan.first_slot, logits) for row in plan.rows)


def _judge_alone(row: RowPlan, first_slot: int, logits: torch.Tensor) -> Verdict:
    try:
        return _judge_rows((row,), first_slot, logits)[0]
    except torch.AcceleratorError:
        raise
    except BaseException as error:  # noqa: BLE001 - as above: the error is the request's
        what = error.message if isinstance(error, RequestError) else f"{type(error).__name__}: {error_text(error)}."
        return _refusal(RequestError(f"request {row.request.request_id}: its sampling rules failed: {what}"))


def _judge_rows(plan_rows: Sequence[RowPlan], first_slot: int, logits: torch.Tensor) -> tuple[Verdict, ...]:
    rules: list[TokenRule] = []
    positions: list[int] = []
    places: list[int] = []
    wanted: list[int | None] = []
    ends: list[int] = []
    num_positions = logits.shape[1]
    for row in plan_rows:
        request, place = row.request, (row.source_slot - first_slot) * num_positions
        position, num_logprobs = request.num_tokens, request.params.logprobs
        for j, mask in enumerate(_masks(row)):
            rules.append(_rule(row, j, mask))
            positions.append(position + j)
            places.append(place + j)
            wanted.append(num_logprobs)
        ends.append(len(rules))
    if not rules:
        return tuple(Verdict(len(row.token_ids), (), ()) for row in plan_rows)
    targets = _at(logits.flatten(0, 1), places)
    chosen, values = choose_tokens(targets, rules, positions)
    # The step has run: from here until the next one is launched the device waits for the host.
    tokens, logprobs, top = tuple(chosen), tuple(values), tuple(top_logprobs(targets, chosen, wanted))
    verdicts, start = [], 0
    for row, end in zip(plan_rows, ends, strict=True):
        verdicts.append(_verdict(row, rules[start:end], tokens[start:end], logprobs[start:end], top[start:end]))
        start = end
    return tuple(verdicts)


def _at(logits: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the logits [B * J, V] at places: [M, V]; a view where the places are the first ones."""
    wanted = np.array(places)
    if np.array_equal(wanted, np.arange(len(wanted))):
        return logits[: len(wanted)]
    return logits[to_device(wanted, logits.device)]


def _masks(row: RowPlan) -> list[TokenMask | None]:
    """Return what the request's grammar, if it has one, allows at each position that is sampled."""
    if not row.is_sampled:
        return []
    grammar = row.request.grammar
    return [None] * (1 + row.num_drafts) if grammar is None else grammar.masks(row.drafts)


def _rule(row: RowPlan, j: int, mask: TokenMask | None) -> TokenRule:
    request = row.request
    before = row.drafts[:j]  # the token at j is of use only if these are generated
    penalties, banned = _penalties(request, before), request.banned_after(before)
    if penalties is None and mask is None and not banned:
        return request.token_rule
    return replace(request.token_rule, penalties=penalties, banned=banned, mask=mask)


def _penalties(request: Request, drafts: Sequence[int]) -> Penalties | None:
    params = request.params
    factors = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if factors == (1.0, 0.0, 0.0):
        return None
    num_ignored = min(params.prompt_ignore_length, len(request.prompt_token_ids))
    return Penalties(*factors, tokens=request.sequence(drafts), num_ignored=num_ignored)


def _verdict(
    row: RowPlan,
    rules: Sequence[TokenRule],
    tokens: tuple[int, ...],
    logprobs: tuple[float, ...],
    top: tuple[dict[int, Logprob] | None, ...],
) -> Verdict:
    if not row.is_sampled:
        return Verdict(len(row.token_ids), (), ())
    kept = count_accepted(row.drafts, tokens)
    good, error = 0, None
    while good < kept and (error := _problem(row, good, rules[good], tokens[good], logprobs[good])) is None:
        good += 1
    if error is not None and not good:
        return _refusal(error)
    # A prompt piece stays whole; of a decode window the newest token and the accepted drafts stay. The tokens before
    # one that cannot be chosen are those that the request has without drafts, too, and one of them may be its end.
    num_accepted = len(row.token_ids) - row.num_drafts + good - 1
    return Verdict(
        num_accepted,
        tokens[:good],
        logprobs[:good],
        tuple(filter(None, top[:good])),  # an entry has at least the token itself
        error,
    )


def _problem(row: RowPlan, j: int, rule: TokenRule, token: int, logprob: float) -> RequestError | None:
    """Return why the token chosen at a window position is none."""
    if logprob != logprob:
        return RequestError(
            f"request {row.request.request_id}: found logits that are not finite at position "
            f"{row.request.num_tokens + j}; needed finite ones. A float16 model may overflow: try dtype 'bfloat16' or "
            f"'float32'."
        )
    if rule.mask is not None and not (allows(rule.mask, token) and token not in rule.banned):
        return RequestError(
            f"request {row.request.request_id}: found no token that guided_decoding and the other rules allow; needed "
            f"one. Bad words, bad_token_ids or min_tokens ban all that the grammar leaves."
        )
    return None


def _refusal(error: RequestError) -> Verdict:
    return Verdict(0, (), (), error=error)
