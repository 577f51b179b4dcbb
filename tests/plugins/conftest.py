"""The opened plugin library; on machines without TensorRT's headers the harness may be prebuilt."""

from pathlib import Path

import pytest

from tests.harness.plugin_harness import Harness
from trtllm_replayssm.plugins.library import plugin_library

_OPTION = "--plugin-harness"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, default=None, help="prebuilt libplugin_harness.so, to be used as it is")


@pytest.fixture(scope="session")
def harness(request: pytest.FixtureRequest) -> Harness:
    # Not known to pytest when this folder was not named on its command line.
    return Harness(plugin_library(), request.config.getoption(_OPTION, default=None))
