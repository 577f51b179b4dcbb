"""Draft lengths in a simulated machine: its step times and acceptance rates are known, so the best length is, too."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from trtllm_replayssm import NGramDecodingConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.speculative.adaptive import AcceptanceGate, AdaptiveDrafter
from trtllm_replayssm.runtime.speculative.policy import SpeculationPolicy

LONGEST = 4
Cost = Callable[[int, int], float]


def bandwidth_bound(batch: int, length: int) -> float:
    return 1.0 + 0.01 * batch + 0.02 * length


def compute_bound(batch: int, length: int) -> float:
    return batch * (1.0 + length)


class Machine:
    """Runs steps of a policy against a cost model; a step's time varies by a tenth.

    Args:
        cost: sequences, longest draft length -> seconds.
        policy: what chooses.
    """

    def __init__(self, cost: Cost, policy: SpeculationPolicy | None = None, seed: int = 0) -> None:
        self.cost = cost
        self.policy = policy or SpeculationPolicy()
        self.random = random.Random(seed)
        self.tokens = 0
        self.seconds = 0.0
        self.lengths: list[dict[int, int]] = []

    def run(self, steps: int, rates: Sequence[float], limit: int = LONGEST) -> "Machine":
        for _ in range(steps):
            lengths = self.policy.lengths(dict.fromkeys(range(len(rates)), limit))
            longest = max(lengths.values())
            for sequence, rate in enumerate(rates):
                accepted = 0
                while accepted < lengths[sequence] and self.random.random() < rate:
                    accepted += 1
                self.policy.record_drafts(sequence, lengths[sequence], lengths[sequence], accepted)
                self.tokens += 1 + accepted
            seconds = self.cost(len(rates), longest) * self.random.uniform(0.9, 1.1)
            self.policy.record_time(len(rates), longest, seconds)
            self.seconds += seconds
            self.lengths.append(lengths)
        return self

    def longest(self) -> list[int]:
        return [max(lengths.values()) for lengths in self.lengths]

    def speed(self) -> float:
        return self.tokens / self.seconds


def best_fixed_speed(cost: Cost, rates: Sequence[float]) -> float:
    def tokens(length: int) -> float:
        return sum(1.0 + sum(rate**j for j in range(1, length + 1)) for rate in rates)

    return max(tokens(length) / cost(len(rates), length) for length in range(LONGEST + 1))


def test_drafts_stay_on_where_steps_hardly_take_longer() -> None:
    longest = Machine(bandwidth_bound).run(1000, [0.8] * 8).longest()
    assert longest.count(LONGEST) > 950
    assert longest[-500:].count(0) >= 3, "plain steps are measured now and then"


def test_drafts_switch_themselves_off_where_steps_take_as_much_longer() -> None:
    longest = Machine(compute_bound).run(2000, [0.8] * 8).longest()
    assert longest.count(0) > 1900
    assert longest[-1500:].count(0) > 1480, "probes grow rare"
    assert any(longest[200:]), "and never end"


def test_drafts_switch_themselves_off_where_none_is_accepted() -> None:
    def cost(batch: int, length: int) -> float:
        return bandwidth_bound(batch, length) + 0.2 * length

    assert Machine(cost).run(2000, [0.0] * 4).longest().count(0) > 1900


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 7, 24])
def test_the_speed_is_near_that_of_the_best_fixed_length(batch: int, slope: float, rate: float) -> None:
    def cost(batch: int, length: int) -> float:
        return 1.0 + slope * length + (2.0 if length else 0.0) * slope

    machine = Machine(cost).run(1500, [rate] * batch)
    assert machine.speed() > 0.9 * best_fixed_speed(cost, [rate] * batch)
    # Never below plain decoding, but for what measuring costs.
    assert machine.speed() > 0.96 * batch / cost(batch, 0)


def test_each_sequence_has_its_own_length() -> None:
    rates = [0.95, 0.95, 0.02]
    lengths = Machine(bandwidth_bound).run(800, rates).lengths[400:]
    drafts = [sum(step[sequence] for step in lengths) / len(lengths) for sequence in range(3)]
    assert drafts[0] > 3.5 < drafts[1]
    assert drafts[2] < 2.0


def test_what_did_not_pay_is_tried_again() -> None:
    def cost(batch: int, length: int) -> float:
        return 1.0 + 0.2 * length

    machine = Machine(cost)
    assert not any(machine.run(600, [0.0] * 4).longest()[-20:])
    assert machine.run(1500, [0.95] * 4).longest()[-200:].count(LONGEST) > 190


def test_batches_are_told_apart() -> None:
    def cost(batch: int, length: int) -> float:
        return compute_bound(batch, length) if batch > 8 else bandwidth_bound(batch, length)

    machine = Machine(cost)
    for _ in range(10):
        machine.run(100, [0.8] * 4).run(100, [0.8] * 32)
    few = [max(step.values()) for step in machine.lengths if len(step) == 4]
    many = [max(step.values()) for step in machine.lengths if len(step) == 32]
    assert few.count(LONGEST) > 900
    assert many.count(0) > 900


def test_one_slow_step_does_not_switch_drafts_off() -> None:
    machine = Machine(bandwidth_bound).run(100, [0.8])
    machine.policy.record_time(1, LONGEST, 1000.0)
    assert machine.run(100, [0.8]).longest()[-50:].count(LONGEST) >= 49


def test_steps_that_wait_for_something_now_and_then_do_not_switch_drafts_off() -> None:
    """As those that capture a CUDA graph do, or a garbage collection."""

    class Waiting(Machine):
        def run(self, steps: int, rates: Sequence[float], limit: int = LONGEST) -> Machine:
            for _ in range(steps // 10):
                super().run(9, rates, limit)
                usual, self.cost = self.cost, lambda batch, length: 20.0
                super().run(1, rates, limit)
                self.cost = usual
            return self

    longest = Waiting(bandwidth_bound, SpeculationPolicy(catches_up=False)).run(1000, [0.8] * 8).longest()
    assert longest.count(LONGEST) > 950


def test_limits_are_kept() -> None:
    policy = SpeculationPolicy()
    for step in range(500):
        limits = {sequence: (step + sequence) % 5 for sequence in range(5)}
        lengths = policy.lengths(limits)
        assert lengths.keys() == limits.keys()
        assert all(0 <= lengths[sequence] <= limit for sequence, limit in limits.items())
        policy.record_time(5, max(lengths.values()), 0.0)
    assert policy.lengths({1: 0, 2: 0}) == {1: 0, 2: 0}


def test_the_gate_closes_for_good() -> None:
    gate = AcceptanceGate(3, 0.5)
    for num_accepted in (0, 0):
        gate.add(4, num_accepted)
    gate.add(0, 0)
    assert gate.is_open, "two steps are not three"
    gate.add(4, 4)
    assert not gate.is_open
    gate.add(4, 4)
    gate.add(4, 4)
    assert not gate.is_open


class AlwaysRight:
    """Drafts 5, 5, 5 ...; counts what it was asked for."""

    max_draft_len = LONGEST

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.seen: list[tuple[int, ...]] = []

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None: ...

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        self.seen.append(tuple(token_ids))

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        self.asked.append(dict(limits))
        return {request_id: [5] * limit for request_id, limit in limits.items()}

    def end(self, request_id: int) -> None: ...


def drive(drafter: AdaptiveDrafter, steps: int, *, batch: int = 1, accept: bool, seconds: Cost | None = None) -> None:
    clock: list[float] = [0.0]
    drafter._clock = lambda: clock[0]
    for request_id in range(batch):
        drafter.begin(request_id, [1])
    for _ in range(steps):
        drafts = drafter.propose(dict.fromkeys(range(batch), LONGEST))
        clock[0] += 1.0 if seconds is None else seconds(batch, max(map(len, drafts.values()), default=0))
        for request_id in range(batch):
            drafter.observe(request_id, (*drafts.get(request_id, ()), 5) if accept else (6,))
    for request_id in range(batch):
        drafter.end(request_id)


def test_the_drafter_sees_the_clock() -> None:
    inner = AlwaysRight()
    drive(AdaptiveDrafter(inner, NGramDecodingConfig()), 200, batch=2, accept=True, seconds=bandwidth_bound)
    assert sum(asked[0] == LONGEST for asked in inner.asked) > 180
    inner = AlwaysRight()
    drive(AdaptiveDrafter(inner, NGramDecodingConfig()), 200, batch=2, accept=True, seconds=lambda b, k: 1.0 + 2 * k)
    assert sum(asked[0] == 0 for asked in inner.asked) > 150
    assert len(inner.seen) == 400


@pytest.mark.parametrize("is_free", [False, True])
def test_what_is_not_found_costs_a_free_drafter_nothing(is_free: bool) -> None:
    """Drafts are found in one step of ten; there they pay, and only a drafter that is asked first misses them."""

    class Rare(AlwaysRight):
        def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
            found = super().propose(limits)
            return found if len(self.asked) % 10 == 0 else {}

    inner = Rare()
    drafter = AdaptiveDrafter(inner, NGramDecodingConfig(), is_free=is_free)
    taken: list[int] = []
    propose = drafter.propose

    def counted(limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        drafts = propose(limits)
        taken.append(len(drafts.get(0, ())))
        return drafts

    drafter.propose = counted  # type: ignore[method-assign]
    drive(drafter, 400, accept=True, seconds=lambda batch, length: 1.0 + 0.5 * length)
    assert (taken.count(LONGEST) >= 38) == is_free


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1])
def test_rare_drafts_that_are_wrong_are_given_up(share: float) -> None:
    """Of many sequences, now and then one finds drafts; each time, the step of all of them would take longer."""
    draws, batch, steps = random.Random(0), 64, 3000
    taken: list[int] = []

    class Rare(AlwaysRight):
        def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
            return {i: [5] * limit for i, limit in limits.items() if draws.random() < share}

    def seconds(_: int, length: int) -> float:
        taken.append(length)
        return 1.0 + 0.25 * (length > 0)

    drive(
        AdaptiveDrafter(Rare(), NGramDecodingConfig(), is_free=True), steps, batch=batch, accept=False, seconds=seconds
    )
    assert sum(length > 0 for length in taken) <= steps / 100, "at a quarter more, a four-hundredth of the time"
    assert any(taken[500:]), "tried again now and then"


def test_a_threshold_ends_speculation() -> None:
    config = NGramDecodingConfig(adaptive=False, acceptance_rate_window_size=5, acceptance_rate_threshold=0.1)
    inner = AlwaysRight()
    drive(AdaptiveDrafter(inner, config), 20, accept=False)
    assert [asked[0] for asked in inner.asked] == [LONGEST] * 5 + [0] * 15
    inner = AlwaysRight()
    drive(AdaptiveDrafter(inner, config), 20, accept=True)
    assert [asked[0] for asked in inner.asked] == [LONGEST] * 20


def test_too_many_requests_decode_plainly() -> None:
    config = NGramDecodingConfig(adaptive=False, max_concurrency=3)
    inner = AlwaysRight()
    drafter = AdaptiveDrafter(inner, config)
    drive(drafter, 2, batch=3, accept=True)
    drive(drafter, 2, batch=4, accept=True)
    assert [asked[0] for asked in inner.asked] == [LONGEST] * 2 + [0] * 2


@pytest.mark.parametrize("options", [{"acceptance_rate_window_size": 5}, {"acceptance_rate_threshold": 0.5}])
def test_window_and_threshold_go_together(options: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match="acceptance_rate_window_size, acceptance_rate_threshold: found .* needed both"
    ):
        NGramDecodingConfig(**options)  # type: ignore[arg-type]
