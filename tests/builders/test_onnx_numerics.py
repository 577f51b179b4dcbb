"""The graph that TensorRT parses computes what the module computes: prefill, windows, flushes and rejections."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tests.builders.tiny_geometry import (
    is_cache,
    poisoned_states,
    random_model,
    random_weights,
    tiny_geometry,
    tiny_qwen_geometry,
)
from tests.onnx_evaluator import Evaluator
from trtllm_replayssm.builders.export import export, set_kernels
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import PLUGINS

LIMITS = EngineLimits(max_batch_size=4, max_input_len=24, max_seq_len=96, max_num_tokens=12)

States = dict[str, torch.Tensor]
Step = Callable[[dict[str, torch.Tensor], States], tuple[torch.Tensor, States]]


def run_module(model: torch.nn.Module) -> Step:
    def step(tensors: dict[str, torch.Tensor], states: States) -> tuple[torch.Tensor, States]:
        logits, present = model(*tensors.values(), tuple(states.values()))
        for given, returned in zip(states.values(), present, strict=True):
            assert returned is given, "the module updates its states in place"
        return logits, states

    return step


@dataclass
class Session:
    """Slots that are prefilled and decoded by the module and by the graph alike; each keeps its own states."""

    replay: ReplayGeometry
    module: Step
    graph: Step
    states: dict[str, States]
    past: torch.Tensor = field(default_factory=lambda: torch.zeros(LIMITS.max_batch_size, dtype=torch.int32))
    checkpoint: torch.Tensor = field(default_factory=lambda: torch.zeros(LIMITS.max_batch_size, dtype=torch.int32))
    steps: int = 0
    flushes: int = 0

    def run(self, input_ids: torch.Tensor, num_tokens: torch.Tensor, slot_ids: torch.Tensor, first: int = 0) -> None:
        """Run one step on cache rows first .. first + B - 1 and compare logits and every state."""
        rows = slice(first, first + len(slot_ids))
        window = input_ids.shape[1]
        tensors = {
            "input_ids": input_ids,
            "past_lengths": self.past[rows].clone(),
            "checkpoint_lengths": self.checkpoint[rows].clone(),
            "num_tokens": num_tokens,
            "slot_ids": slot_ids,
            "logits_indices": torch.arange(window, dtype=torch.int32).repeat(len(slot_ids), 1),
        }
        results = {}
        for name, step in (("module", self.module), ("graph", self.graph)):
            states = self.states[name]
            bound = {key: value[rows] if is_cache(key) else value for key, value in states.items()}
            logits, present = step(tensors, bound)
            for key, value in present.items():
                (states[key][rows] if is_cache(key) else states[key]).copy_(value)
            results[name] = logits
        is_valid = (torch.arange(window) < num_tokens[:, None]) & (slot_ids >= 0)[:, None]
        expected = results["module"][is_valid]
        assert torch.isfinite(expected).all()
        # Sums round in proportion to their largest terms, and an unscaled tied embedding makes logits of 30.
        largest = float(expected.abs().flatten().max()) if len(expected) else 1.0
        torch.testing.assert_close(results["graph"][is_valid], expected, rtol=1e-5, atol=5e-6 * largest)
        self._compare_states(self.past[rows] + num_tokens * (slot_ids >= 0), first)
        self.steps += 1

    def _compare_states(self, written: torch.Tensor, first: int) -> None:
        for key, value in self.states["module"].items():
            other = self.states["graph"][key]
            if not is_cache(key):
                torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5, equal_nan=True, msg=key)
                continue
            for row, length in enumerate(written.tolist(), start=first):
                torch.testing.assert_close(other[row, :, :length], value[row, :, :length], rtol=1e-5, atol=1e-5)

    def commit(self, accepted: torch.Tensor, slot_ids: torch.Tensor, rows: slice, *, is_prefill: bool) -> None:
        used = slot_ids >= 0
        past, checkpoint = self.past[rows], self.checkpoint[rows]
        if is_prefill:
            new = protocol.advance_prefill(past, accepted)
        else:
            constants = {"history": self.replay.history, "max_draft_len": self.replay.max_draft_len}
            self.flushes += int((protocol.needs_flush(past, checkpoint, **constants) & used).sum())
            new = protocol.advance(past, checkpoint, accepted, **constants)
        self.past[rows] = torch.where(used, new[0], past)
        self.checkpoint[rows] = torch.where(used, new[1], checkpoint)


def make_session(geometry: ModelGeometry, replay: ReplayGeometry) -> Session:
    model = random_model(geometry, replay)
    graph = export(geometry, replay, LIMITS)
    set_kernels(graph, {io.op_type: b"any kernels" for io in PLUGINS})
    evaluator = Evaluator(graph, random_weights(geometry))
    states = {name: poisoned_states(geometry, replay, LIMITS) for name in ("module", "graph")}
    for key, value in states["graph"].items():
        # As TensorRTExecutor allocates them: the graph's attention weighs masked rows by zero, and zero times NaN is
        # NaN. All other states of the graph, and all of the module's, stay NaN until a token is written.
        if is_cache(key):
            value.zero_()
    return Session(replay, run_module(model), evaluator.step, states)


def prefill(session: Session, slot: int, tokens: torch.Tensor) -> None:
    for chunk in torch.split(tokens, LIMITS.max_num_tokens):
        count = torch.tensor([len(chunk)], dtype=torch.int32)
        slot_ids = torch.tensor([slot], dtype=torch.int32)
        session.run(chunk[None], count, slot_ids, first=slot)
        is_prefill = len(chunk) > session.replay.window
        session.commit(count, slot_ids, slice(slot, slot + 1), is_prefill=is_prefill)


def random_tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("pattern", "history", "max_draft_len", "changes"),
    [
        pytest.param("M-*M", 8, 3, {}, id="all-layers-T4-W8"),
        pytest.param("M*-", 1, 0, {"tie_word_embeddings": True}, id="tied-conventional-T1-W1"),
        pytest.param("MM", 5, 4, {}, id="recurrent-alone-T5-W5"),
        pytest.param("G-*-", 8, 3, {}, id="qwen-T4-W8"),
        pytest.param("*-G-", 1, 0, {"tie_word_embeddings": True}, id="qwen-tied-conventional-T1-W1"),
    ],
)
def test_graph_and_module_agree_over_prefill_windows_flushes_and_rejections(
    pattern: str, history: int, max_draft_len: int, changes: dict[str, bool]
) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    replay = ReplayGeometry(history=history, max_draft_len=max_draft_len)
    make = tiny_qwen_geometry if "G" in pattern else tiny_geometry
    session = make_session(make(pattern, **changes), replay)
    rows = LIMITS.max_batch_size
    for slot, length in ((2, 17), (0, 1), (1, 12)):
        prefill(session, slot, random_tokens(generator, length))
    for round_number in range(18):
        if round_number == 9:  # slot 0 is given to another request: two counters, nothing else
            session.past[0] = session.checkpoint[0] = 0
            prefill(session, 0, random_tokens(generator, 5))
        slot_ids = torch.tensor([0, 1, 2, -1] if round_number % 3 else [0, -1, 2, -1], dtype=torch.int32)
        num_tokens = torch.randint(0, replay.window + 1, (rows,), generator=generator, dtype=torch.int32)
        session.run(random_tokens(generator, rows, replay.window), num_tokens, slot_ids)
        accepted = (torch.rand(rows, generator=generator) * (num_tokens + 1)).to(torch.int32)
        session.commit(accepted, slot_ids, slice(0, rows), is_prefill=False)
    assert session.flushes >= 5, "the run must flush to show anything"


def test_a_stale_checkpoint_length_is_noticed() -> None:
    """Teeth: the graph is given another f than the module, and the comparison fails."""
    generator = torch.Generator().manual_seed(3)
    replay = ReplayGeometry(history=4, max_draft_len=1)
    session = make_session(tiny_geometry("M"), replay)
    graph = session.graph

    def shifted(tensors: dict[str, torch.Tensor], states: States) -> tuple[torch.Tensor, States]:
        past = tensors["past_lengths"]
        return graph(tensors | {"checkpoint_lengths": torch.maximum(past - 1, torch.zeros_like(past))}, states)

    prefill(session, 0, random_tokens(generator, 6))
    session.graph = shifted
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(AssertionError):
        for _ in range(3):
            session.run(random_tokens(generator, 1, 1), one, one - 1)
            session.commit(one, one - 1, slice(0, 1), is_prefill=False)
