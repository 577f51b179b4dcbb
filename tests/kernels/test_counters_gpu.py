"""Which launches share a counter, and that launches at the same time do not."""

import pytest
import torch

from tests.cases import Mamba2Case
from tests.ops.driver import Row
from tests.ops.mamba2_driver import Mamba2Driver
from trtllm_replayssm import ops
from trtllm_replayssm.plugins.counters import counter_of_launch

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]


def captured_counters(count: int) -> list[int]:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept = torch.zeros(1, device=DEVICE)
        counters = [counter_of_launch(DEVICE) for _ in range(count)]
    del kept
    return counters


def test_a_stream_keeps_its_counter_and_every_capture_has_another() -> None:
    own = counter_of_launch(DEVICE)
    assert counter_of_launch(DEVICE) == own
    with torch.cuda.stream(new_stream()):
        other = counter_of_launch(DEVICE)
    captures = [captured_counters(3) for _ in range(2)]
    assert all(len(set(counters)) == 1 for counters in captures)
    assert len({own, other, captures[0][0], captures[1][0]}) == 4


def test_graphs_that_run_at_the_same_time_do_not_disturb_each_other() -> None:
    """Two graphs captured on one stream replay on two: with one counter between them heads would be left out."""
    case = Mamba2Case("P64-T1", 64, 64, 128, 8, 16, 0)
    rows = [Row(slot, 1, 0) for slot in range(64)]
    launches = []
    for seed in (1, 2):
        driver = Mamba2Driver(case, num_slots=64, seed=seed, device="cuda")
        for pool in driver.pools.values():
            pool.uniform_()
        driver.past, driver.checkpoint = [9] * 64, [4] * 64
        tensors = driver.tensors(rows, driver.make_window([1] * 64, 1))
        expected = ops.mamba2(**tensors, history=16, max_draft_len=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                y = ops.mamba2(**tensors, history=16, max_draft_len=0)
        launches.append((graph, y, expected, new_stream(), tensors))
    for _, y, *_ in launches:
        y.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, _, stream, _ in launches:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, y, expected, *_ in launches:
        assert torch.equal(y, expected)
