"""Shared test set-up: the ``gpu`` marker skips, visibly, where there is no CUDA device, and nowhere else."""

from collections.abc import Generator

import pytest

import trtllm_replayssm  # noqa: F401 - before torch: it tells torch's threads to sleep while they wait

# isort: split
import torch


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("found no CUDA device; needed one, for every test with the marker gpu would be skipped")


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
