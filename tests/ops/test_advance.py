"""``ops.advance``: pure, and exactly the rule of the protocol."""

import pytest
import torch

from tests.ops.driver import int32
from trtllm_replayssm import ops
from trtllm_replayssm.errors import OpArgumentError

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("history", "max_draft_len"), [(1, 0), (2, 1), (8, 3), (16, 7)])
def test_advance_follows_the_rule_for_every_reachable_pair(history: int, max_draft_len: int, device: str) -> None:
    T = 1 + max_draft_len
    cases = [(c, f, a) for c in range(2 * history) for f in range(max(0, c - history), c + 1) for a in range(T + 1)]
    past, checkpoint, accepted = (int32(column, device) for column in zip(*cases, strict=True))
    inputs = [t.clone() for t in (past, checkpoint, accepted)]
    new_past, new_checkpoint = ops.advance(past, checkpoint, accepted, history=history, max_draft_len=max_draft_len)
    assert new_past.tolist() == [c + a for c, _, a in cases]
    assert new_checkpoint.tolist() == [c if c - f + T > history else f for c, f, _ in cases]
    assert new_past.dtype == new_checkpoint.dtype == torch.int32
    assert all(torch.equal(t, was) for t, was in zip((past, checkpoint, accepted), inputs, strict=True))


def test_pending_rows_never_exceed_the_history_and_the_ring_is_never_full() -> None:
    generator = torch.Generator().manual_seed(0)
    for history, max_draft_len in ((1, 0), (4, 3), (16, 4)):
        past, checkpoint = int32([0] * 64), int32([0] * 64)
        for _ in range(200):
            accepted = torch.randint(0, max_draft_len + 2, (64,), generator=generator, dtype=torch.int32)
            past, checkpoint = ops.advance(past, checkpoint, accepted, history=history, max_draft_len=max_draft_len)
            assert ((past - checkpoint >= 0) & (past - checkpoint <= history)).all()


def test_impossible_lengths_are_refused() -> None:
    ok = int32([4, 4])
    for past, checkpoint, accepted, name in (
        (ok, int32([0, 5]), int32([0, 0]), "checkpoint_lengths[1]: found 5"),
        (ok, int32([-1, 0]), int32([0, 0]), "checkpoint_lengths[0]: found -1"),
        (int32([9, 100]), int32([1, 3]), int32([0, 0]), "checkpoint_lengths[1]: found 3"),
        (int32([-1, 0]), int32([0, 0]), int32([0, 0]), "past_lengths[0]: found -1"),
        (int32([4, 2**31 - 2]), int32([4, 2**31 - 2]), int32([0, 0]), "past_lengths[1]: found 2147483646"),
        (ok, ok, int32([0, 3]), "num_accepted_tokens[1]: found 3"),
        (ok, ok, int32([-1, 0]), "num_accepted_tokens[0]: found -1"),
        (ok, ok.long(), int32([0, 0]), "checkpoint_lengths: found torch.int64"),
        (ok, int32([4]), int32([0, 0]), "checkpoint_lengths: found shape (1,)"),
    ):
        with pytest.raises(OpArgumentError) as caught:
            ops.advance(past, checkpoint, accepted, history=8, max_draft_len=1)
        assert name in str(caught.value)


def test_the_last_position_of_int32_can_be_committed_and_no_length_wraps() -> None:
    last = int32([2**31 - 1 - 2])
    past, _ = ops.advance(last, last, int32([2]), history=8, max_draft_len=1)
    assert past.tolist() == [2**31 - 1]
