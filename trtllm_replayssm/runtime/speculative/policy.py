"""How many drafts a step should have: by what was accepted, and by what steps were measured to take. No clock here.

A step of B sequences with up to k drafts brings B tokens and the drafts that are accepted, in a time that depends on B
and k. The policy takes the k with the most expected tokens per second, k = 0 being plain decoding:

    (B + sum over sequences and j <= k of P(draft j is accepted)) / seconds(B, k)

A sequence's drafts are accepted with a probability p each, given the ones before: P(draft j) = q p^j, where q is how
often there are drafts at all. p and q are running means of the sequence's own history, which start from those of all
sequences, and go back there while nothing is drafted; so a sequence that was given up is tried again after a while.
Seconds are running means for each power of two that B fits in and each k; a k that was never tried lies on the line
between its neighbours. What is not in use is measured anew now and then: plain steps while there are drafts, and the
other way round, the less often the longer they have not paid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

_FORGETTING = 0.95  # of a sequence's history, for each window of drafts
_GLOBAL_FORGETTING = 0.95  # of all sequences', for each step with drafts
_IDLE_FORGETTING = 0.97  # of a sequence's history, for each step in which it had no drafts
_REST = 7  # steps for which drafts stay off before this is thought over
_PRIOR_WEIGHT = 2.0  # trials that weigh as much as what other sequences say
_FIRST_RATE = 0.6  # before anything was drafted
_HOPELESS = 0.02  # a draft less likely than this is not made
_SMOOTHING = 0.2  # weight of the newest time
_SHORTEST = 1e-9  # seconds: a clock may stand still
_OUTLIER = 4.0  # times longer than so many means count as so many
_SAMPLES = 2  # of a time, before it is believed
_BURST = 1 + _SAMPLES  # steps with drafts to measure one: the first may pay for what was not drafted before
_PLAIN_INTERVAL = 128
_FIRST_SHARE, _LAST_SHARE = 1 / 64, 1 / 512  # of the time, for measuring drafts that do not pay


@dataclass(slots=True)
class Rate:
    """A running mean of successes per trial that forgets.

    Attributes:
        kept: successes, the older ones weighing less.
        tried: trials, idem.
    """

    kept: float = 0.0
    tried: float = 0.0

    def add(self, kept: float, tried: float, forgetting: float) -> None:
        """Count trials."""
        self.kept = forgetting * self.kept + kept
        self.tried = forgetting * self.tried + tried

    def value(self, prior: float, weight: float = 1.0) -> float:
        """Return the mean of what is remembered, times ``weight``, and of ``prior``, which counts as a few trials."""
        return (weight * self.kept + _PRIOR_WEIGHT * prior) / (weight * self.tried + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _History:
    """What is known of one sequence: whether there were drafts, whether they were accepted, and up to which step."""

    found: Rate = field(default_factory=Rate)
    accepted: Rate = field(default_factory=Rate)
    step: int = 0


@dataclass
class _Seconds:
    """Running mean of one kind of step.

    Attributes:
        ignores_lone: whether a step that took far longer than those before and behind it waited for something, and does
            not count.
    """

    ignores_lone: bool
    mean: float = 0.0
    num_samples: int = 0
    has_outlier: bool = False  # the last step was one

    def add(self, seconds: float) -> None:
        if self.num_samples:
            was_outlier, self.has_outlier = self.has_outlier, seconds > _OUTLIER * self.mean
            if self.ignores_lone and self.has_outlier and not was_outlier:
                return
            seconds = min(seconds, _OUTLIER * self.mean)
        weight = max(_SMOOTHING, 1.0 / (self.num_samples + 1))
        self.mean += weight * (seconds - self.mean)
        self.num_samples += 1


@dataclass
class _Bucket:
    """The steps of about one number of sequences.

    Attributes:
        seconds: draft length -> time of a step.
        last: draft length of the last step.
        since_plain: steps since the last plain one.
        plain_seconds: of the plain steps since the last ones with drafts.
        draft_seconds: of the last steps with drafts, one after another.
        burst: steps with drafts that are still to come of a measurement.
        share: of the time, for the next measurement.
        rest: steps for which drafts stay off without a thought.
    """

    seconds: dict[int, _Seconds] = field(default_factory=dict)
    last: int = 0
    since_plain: int = 0
    plain_seconds: float = 0.0
    draft_seconds: float = 0.0
    burst: int = 0
    share: float = _FIRST_SHARE
    rest: int = 0

    def is_known(self, length: int) -> bool:
        """Say whether a draft length was measured, or a longer one: near their end sequences want fewer drafts."""
        longer = (k for k in self.seconds if k == length or k > length > 0)
        return any(self.seconds[k].num_samples >= _SAMPLES for k in longer)

    def time(self, length: int) -> float:
        """Return the seconds of a step, on the line between the nearest measured ones; one at least is there."""
        known = {k: max(seconds.mean, _SHORTEST) for k, seconds in self.seconds.items() if seconds.num_samples}
        below = max((k for k in known if k <= length), default=min(known))
        above = min((k for k in known if k >= length), default=max(known))
        if below == above:
            return known[below]
        return known[below] + (known[above] - known[below]) * (length - below) / (above - below)


class SpeculationPolicy:
    """Chooses draft lengths, step by step.

    Call ``lengths`` before a step, then ``record_drafts`` for each of its sequences and ``record_time``.

    Args:
        catches_up: whether drafting takes longer at times, after steps without drafts for instance, since the drafter
            makes up for what it missed; where it does not, every step is a measure, but for lone ones that waited.
    """

    def __init__(self, *, catches_up: bool = True) -> None:
        self._catches_up = catches_up
        self._buckets: dict[int, _Bucket] = {}
        self._histories: dict[int, _History] = {}
        self._all = _History()
        self._step = 0

    def lengths(self, limits: Mapping[int, int]) -> dict[int, int]:
        """Return how many drafts each sequence should have in the next step.

        Args:
            limits: sequence -> most drafts that are of use.

        Returns:
            sequence -> 0 up to its limit.
        """
        none = dict.fromkeys(limits, 0)
        wanted = {sequence: limit for sequence, limit in limits.items() if limit}
        if not wanted:
            return none
        bucket = self._bucket(len(limits))
        if bucket.burst:
            bucket.burst -= 1
            return dict(limits)
        if bucket.rest:
            bucket.rest -= 1
            return none
        priors = self._all.found.value(1.0), self._all.accepted.value(_FIRST_RATE)
        useful = {sequence: self._useful_chances(sequence, limit, *priors) for sequence, limit in wanted.items()}
        length = _choose(bucket, list(useful.values()), len(limits))
        if length is None:
            bucket.burst = _BURST - 1
            return dict(limits)
        return none | {sequence: min(length, len(chances)) for sequence, chances in useful.items()}

    def record_drafts(self, sequence: int, num_wanted: int, num_drafts: int, num_accepted: int) -> None:
        """Note what became of a sequence's drafts in a step.

        Args:
            sequence: whose they were.
            num_wanted: how many were asked for.
            num_drafts: how many there were.
            num_accepted: how many of them were accepted.
        """
        if not num_wanted:
            return
        history = self._histories.setdefault(sequence, _History(step=self._step))
        forgetting = _FORGETTING * _IDLE_FORGETTING ** (self._step - history.step)
        history.step = self._step + 1
        # Drafts behind the first wrong one were not tried.
        num_tried = min(num_accepted + 1, num_drafts)
        has_found = float(num_drafts > 0)
        history.found.add(has_found, 1.0, forgetting)
        history.accepted.add(num_accepted, num_tried, forgetting if num_drafts else 1.0)
        self._all.found.add(has_found, 1.0, 1.0)
        self._all.accepted.add(num_accepted, num_tried, 1.0)

    def record_time(self, num_sequences: int, length: int, seconds: float) -> None:
        """Note how long a step took, its drafts included.

        Args:
            num_sequences: of the step, those without drafts, too.
            length: the longest that it answered.
            seconds: of drafting and of the step itself.
        """
        self._step += 1
        if length:
            for rate in (self._all.found, self._all.accepted):
                rate.add(0.0, 0.0, _GLOBAL_FORGETTING)
        bucket = self._bucket(num_sequences)
        # The first step with drafts after others may pay for what was missed, the first one of its kind for compiling.
        is_like_others = length == 0 or bucket.last > 0 or not self._catches_up
        if length not in bucket.seconds:
            # A drafter that catches up may take long by itself, now and then: for the prompts of newcomers.
            bucket.seconds[length] = _Seconds(ignores_lone=not self._catches_up)
        elif is_like_others:
            bucket.seconds[length].add(seconds)
        if length:
            bucket.draft_seconds = seconds + (bucket.draft_seconds if bucket.last else 0.0)
            bucket.plain_seconds = 0.0
            bucket.since_plain += 1
        else:
            bucket.plain_seconds += seconds
            bucket.since_plain = 0
        bucket.last = length

    def forget(self, sequence: int) -> None:
        """Drop a sequence's history."""
        self._histories.pop(sequence, None)

    def _bucket(self, num_sequences: int) -> _Bucket:
        return self._buckets.setdefault(max(num_sequences - 1, 0).bit_length(), _Bucket())

    def _useful_chances(self, sequence: int, limit: int, found: float, rate: float) -> list[float]:
        """Return how likely each draft of a sequence is to be accepted, up to the first hopeless one."""
        history = self._histories.get(sequence)
        chance = found
        if history is not None:
            weight = _IDLE_FORGETTING ** (self._step - history.step)
            chance, rate = history.found.value(found, weight), history.accepted.value(rate, weight)
        chances: list[float] = []
        while len(chances) < limit and (chance := chance * rate) >= _HOPELESS:
            chances.append(chance)
        return chances


def _choose(bucket: _Bucket, chances: list[list[float]], num_sequences: int) -> int | None:
    """Return the draft length of a step, or None where drafts do not pay and are to be measured anew.

    Args:
        bucket: what is known of such steps.
        chances: for each sequence that wants drafts, how likely each is to be accepted.
        num_sequences: of the step, those that want none included.
    """
    longest = max(map(len, chances))
    for length in (longest, 0):
        if not bucket.is_known(length):
            return length
    gains = [sum(of_draft) for of_draft in zip_longest(*chances, fillvalue=0.0)]
    tokens = list(accumulate(gains, initial=float(num_sequences)))
    best = max(range(longest + 1), key=lambda length: tokens[length] / bucket.time(length))
    if best:
        bucket.share = _FIRST_SHARE
        return 0 if bucket.since_plain >= _PLAIN_INTERVAL else best
    dearest = max(map(bucket.time, bucket.seconds))
    if bucket.plain_seconds * bucket.share < min(bucket.draft_seconds, _BURST * dearest):
        bucket.rest = _REST
        return 0
    bucket.share = max(bucket.share / 2, _LAST_SHARE)
    return None
