"""The launch settings of a peer: the fastest of a list is measured, so that ours is not compared with a default.

A list of settings costs time, most of it the compilation of kernels: choices can be kept in a file and used again.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.timing import Timing
from trtllm_replayssm.bench.workloads import Workload
from trtllm_replayssm.errors import ConfigError, validation_text

Setting = Mapping[str, int | str]
"""Names and values of the library's own parameters."""
SHIPPED: Setting = {}
"""What the library launches when it is told nothing."""


class Tunable(Workload, Protocol):
    """A workload that can be launched in several ways.

    Attributes:
        settings: the ways; not all of them may run on the device.
        setting: that of the next launch.
    """

    settings: tuple[Setting, ...]
    setting: Setting


class Choices:
    """The settings found on one kind of device, kept in a file if there is one.

    Args:
        device: name of the device.
        path: of the JSON file; read when it is there.

    Raises:
        ConfigError: a file of something else, or a path where there can be none.
    """

    def __init__(self, device: str, path: Path | None = None) -> None:
        self._device, self._path = device, path
        self._known: dict[str, dict[str, int | str]] = {}
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"peer_settings: found {path}; needed a file, or a new one in a folder that exists.")
        if path is not None and path.exists():
            try:
                self._known = TypeAdapter(dict[str, dict[str, int | str]]).validate_json(path.read_bytes())
            except ValidationError as error:
                raise ConfigError(f"peer_settings: {path} is no file of settings: {validation_text(error)}") from error

    def get(self, implementation: str, case: KernelCase) -> Setting | None:
        """Return the setting found before, or None."""
        return self._known.get(self._key(implementation, case))

    def put(self, implementation: str, case: KernelCase, setting: Setting) -> None:
        """Keep a setting, and write the file."""
        self._known[self._key(implementation, case)] = dict(setting)
        if self._path is not None:
            self._path.write_text(json.dumps(self._known, indent=1, sort_keys=True) + "\n")

    def _key(self, implementation: str, case: KernelCase) -> str:
        return f"{implementation}, {self._device}, {case}"


def tune(workload: Tunable, case: KernelCase, time: Callable[[Workload], Timing], choices: Choices) -> None:
    """Set the fastest setting: the one found before if it is one of the list still, or the one that wins now.

    Args:
        workload: whose ``setting`` is set.
        case: what it runs.
        time: of the workload as it is set.
        choices: what was found before; a new finding is added.

    Raises:
        Exception: what the last setting raised, where none of them runs.
    """
    known = choices.get(workload.implementation, case)
    if known in workload.settings:
        # The list's own: a file has the names in another order, and some libraries take the values by their place.
        workload.setting = workload.settings[workload.settings.index(known)]
        return
    failure: Exception | None = None
    found: list[tuple[float, int]] = []
    for index, setting in enumerate(workload.settings):
        workload.setting = setting
        try:
            workload.launch(0, 0)  # compiles, which a capture cannot
            found.append((time(workload).seconds, index))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a setting that a foreign kernel refuses, in whatever way, is left out
            failure = error
    if not found:
        assert failure is not None, "there is one setting at least"
        raise failure
    workload.setting = workload.settings[min(found)[1]]
    if len(workload.settings) > 1:
        choices.put(workload.implementation, case, workload.setting)


def setting_name(setting: Setting) -> str:
    """Return a setting as text."""
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "as shipped"
