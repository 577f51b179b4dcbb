"""What the tests of the chunked prefills share: cases on a GPU and emulated, and slots in front of a prompt."""

from collections.abc import Collection, Sequence
from typing import TypeVar

import pytest

from tests.cases import ReplayCase
from tests.ops.driver import Driver, Row

D = TypeVar("D", bound=Driver)


def by_case(cases: Sequence[ReplayCase], emulated: Collection[str]) -> pytest.MarkDecorator:
    """Parametrise a test with ``case`` and ``device``; "cpu" is the emulator, for the cases of these names."""
    parameters = [pytest.param(case, "cuda", id=f"{case.name}-cuda", marks=pytest.mark.gpu) for case in cases]
    parameters += [pytest.param(case, "cpu", id=f"{case.name}-cpu") for case in cases if case.name in emulated]
    return pytest.mark.parametrize(("case", "device"), parameters)


def with_pending(driver: D) -> D:
    """Bring slots 0 and 1 to pending ring rows, more in 1; 2 stays fresh; all dead memory is poisoned."""
    T = driver.case.window
    driver.run([Row(0, T + 2, T + 2), Row(1, T + 5, T + 5)], T + 5)
    for step in range(driver.case.history // T):
        driver.run([Row(1, T, T), Row(0, T, 1 if step % 2 else 0)], T)
    assert driver.past[1] > driver.checkpoint[1]
    driver.poison_unused()
    return driver
