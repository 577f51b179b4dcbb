"""Which launches share a counter, and that launches at the same time do not."""

import pytest
import torch
from torch import Tensor

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


class Step:
    """Many launches of one step of 64 rows, none of which changes what the others find; and the output of each."""

    def __init__(self, seed: int) -> None:
        case = Mamba2Case("P64-T1", 64, 64, 128, 8, 16, 0)
        driver = Mamba2Driver(case, num_slots=64, seed=seed, device="cuda")
        for pool in driver.pools.values():
            pool.uniform_()
        driver.past, driver.checkpoint = [9] * 64, [4] * 64
        rows = [Row(slot, 1, 0) for slot in range(64)]
        self.tensors = driver.tensors(rows, driver.make_window([1] * 64, 1))
        self.expected = self.launch(1)[0]

    def launch(self, times: int) -> list[Tensor]:
        return [ops.mamba2(**self.tensors, history=16, max_draft_len=0) for _ in range(times)]


def require_outputs(outputs: list[Tensor], step: Step) -> None:
    assert all(torch.equal(y, step.expected) for y in outputs)


def test_graphs_that_run_at_the_same_time_do_not_disturb_each_other() -> None:
    """Two graphs captured on one stream replay on two: with one counter between them heads would be left out."""
    steps, launches = [Step(1), Step(2)], []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step.launch(50)
        launches.append((graph, outputs, new_stream()))
    for _, outputs, _ in launches:
        for y in outputs:
            y.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, stream in launches:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for step, (_, outputs, _) in zip(steps, launches, strict=True):
        require_outputs(outputs, step)


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_streams_that_run_at_the_same_time_do_not_disturb_each_other(is_captured: bool) -> None:
    """Of one capture, too, which joins them."""
    steps = [Step(1), Step(2)]

    def run() -> list[list[Tensor]]:
        first, second = torch.cuda.current_stream(), new_stream()
        second.wait_stream(first)
        outputs: list[list[Tensor]] = [[], []]
        for _ in range(50):
            outputs[0] += steps[0].launch(1)
            with torch.cuda.stream(second):
                outputs[1] += steps[1].launch(1)
        first.wait_stream(second)
        return outputs

    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for y in (*found[0], *found[1]):
            y.fill_(torch.nan)
        for _ in range(20):
            graph.replay()
    else:
        found = run()
    torch.cuda.synchronize()
    for outputs, step in zip(found, steps, strict=True):
        require_outputs(outputs, step)
