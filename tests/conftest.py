"""Shared test set-up: the ``gpu`` marker skips, visibly, where there is no CUDA device, and nowhere else.

Failures are shown as they happen, too: the summary of a run that a time limit ends is lost.
"""

import signal
from collections.abc import Generator

import pytest

import trtllm_replayssm  # noqa: F401 - before torch: it tells torch's threads to sleep while they wait

# isort: split
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak_requests", type=int, default=1000, help="requests of each soak test")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("found no CUDA device; needed one, for every test with the marker gpu would be skipped")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # What a shell starts in the background ignores SIGINT, and so would the tests' processes and interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _FailuresAtOnce:
    """Writes each test that fails, and where; with xdist the tests of all processes are reported to one."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._reporter is not None:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{report.nodeid} failed in its {report.when}")
            self._reporter.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_FailuresAtOnce(session.config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and torch.cuda.is_available():
        report.outcome, report.longrepr = "failed", f"skipped on a machine with a CUDA device: {report.longrepr}"
    return report
