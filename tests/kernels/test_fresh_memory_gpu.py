"""Short lives of slots in memory that nobody has written, by every kernel: what ``make sanitize`` checks.

Small on purpose, since a checker slows kernels down by orders of magnitude. Nothing but the kernels writes the pools,
so that a checker sees every read of memory that the protocol calls dead.
"""

import pytest
import torch

from tests.cases import ALL_CASES, CONV_DEVICE_CASES, DTYPES, GATED_DELTA_NET_SHAPE_CASES, Mamba2Case, ReplayCase
from tests.kernels.raw_steps import live_with_conv
from tests.kernels.test_chunked_delta_prefill import WIDE
from tests.ops.driver import Row, live
from tests.ops.drivers import replayed
from tests.ops.test_causal_conv1d import ConvDriver
from trtllm_replayssm import ops

pytestmark = pytest.mark.gpu

# The first three run the pipelined step where there is one, the other Mamba-2 ones the generic step, of every width and
# type; then Gated DeltaNet, its chunks of two and of three heads, with WIDE both make-ups of its chunked prefill.
LIVES = (
    "mamba2-G1-T4",
    "state_bf16",
    "P80-decode-state_bf16",
    "N256-T2-W8",
    "P80-T8-W8-fp16",
    "W2-T2-fp32",
    "state_fp16",
    "qwen3_next-T4",
    "gdn-2x6-T8-state_bf16",
    "gdn-T3-fp32",
    "gdn-W1-fp32",
    "gdn-state_fp16",
)


CASES = [case for case in (*ALL_CASES, *GATED_DELTA_NET_SHAPE_CASES) if case.name in LIVES]


@pytest.mark.parametrize("case", [*CASES, WIDE], ids=lambda case: case.name)
def test_slots_live_in_fresh_memory(case: ReplayCase, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = replayed(case, "meta", num_slots=2).make_pools()
    pools = {name: torch.empty_like(pool, device="cuda") for name, pool in shapes.items()}
    driver = replayed(case, "cuda", num_slots=2, seed=3, pools=pools)
    monkeypatch.setattr(driver, "poison_unused", lambda: None)  # leave the pools as they were allocated
    live(driver)
    driver.assert_within_bounds()
    assert driver.flushes >= 4, "two prefills and a flush of each slot at least"


@pytest.mark.parametrize(("channels", "d_conv", "dtype"), CONV_DEVICE_CASES)
def test_a_convolution_lives_in_fresh_memory(channels: int, d_conv: int, dtype: str) -> None:
    driver = ConvDriver(channels, d_conv, d_conv + 3, dtype, "cuda", num_slots=2, seed=3)
    shape = (driver.num_slots, driver.ring_rows, channels)
    driver.ring = torch.empty(shape, dtype=DTYPES[dtype], device="cuda")
    for num_tokens, seq_len in ((2, 4), (4, 4), (1, 1), (30, 40), (9, 9), (3, 4), (0, 4)):
        kept = 1 if seq_len <= 4 else seq_len  # the rows of a longer window have overwritten what a rejection needs
        driver.run([Row(1, num_tokens, num_tokens), Row(-1, seq_len, 0), Row(0, seq_len, kept)], seq_len)
    driver.assert_within_bound()


# Two chunks for each multiprocessor at most: one launch on a GPU with bulk copies.
CONVOLVING = [case for case in ALL_CASES if case.name in ("nemotron_3-T4", "P80-decode-state_bf16")]


@pytest.mark.parametrize("case", CONVOLVING, ids=lambda case: case.name)
def test_a_step_that_convolves_lives_in_fresh_memory(case: Mamba2Case) -> None:
    live_with_conv(case, "cuda", ops.mamba2_with_conv)
