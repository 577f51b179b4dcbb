"""Enqueues plugins beside a recording driver, in a process of its own, and gives back what the driver was asked to do.

The driver library is found by its name, as NVIDIA's is, so the process needs an ``LD_LIBRARY_PATH`` from its start.
``run`` starts it; ``python -m tests.harness.recorded_run`` is it: a scenario in JSON on stdin, the result on stdout.
"""

import base64
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.plugin_harness import (
    HARNESS_DIR,
    Harness,
    HarnessPlugin,
    PluginRefusedError,
    TensorDesc,
    harness_library,
    shapes_of,
)
from trtllm_replayssm.contract.plugin_io import PLUGINS
from trtllm_replayssm.plugins.library import compile_library, plugin_library

ROOT = HARNESS_DIR.parent.parent


NUM_MULTIPROCESSORS = 20
"""Of the pretended device; as in recording_driver.cpp."""


@dataclass(frozen=True)
class Call:
    """One enqueue: the inputs by name, and an address per tensor, inputs first; outputs may differ from their alias."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    addresses: list[int]
    stream: int = 0
    workspace: int = 0


@dataclass(frozen=True)
class Scenario:
    """One process.

    Attributes:
        op_type: the plugin.
        ints: its fields.
        kernels: its kernel image.
        calls: enqueues, in order, on one object after serialisation and attachment.
        argument_bytes: size of the kernel's Params.
        compute_capability: of the pretended device.
        failing_call: driver function that returns an error.
        attach: attach to a context first, as TensorRT does; else enqueue the object itself.
        deserialize: go on with the runtime's object; else with the builder's.
    """

    op_type: str
    ints: dict[str, int]
    kernels: bytes
    calls: list[Call]
    argument_bytes: int
    compute_capability: int = 90
    failing_call: str = ""
    attach: bool = True
    deserialize: bool = True


@dataclass(frozen=True)
class Launch:
    """One cuLaunchKernelEx; attributes as "id=value,"."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    attributes: str
    argument: bytes


@dataclass
class Recording:
    """What happened.

    Attributes:
        driver_calls: (function, details), in order, but for queries.
        refusals: per call, what the plugin logged when it refused; None when it did not.
        attach_refusal: the same of attachToContext.
        messages: what was logged besides.
    """

    driver_calls: list[tuple[str, str]]
    refusals: list[str | None] = field(default_factory=list)
    attach_refusal: str | None = None
    messages: str = ""

    def named(self, call: str) -> list[str]:
        """Return the details of the calls of one driver function."""
        return [details for name, details in self.driver_calls if name == call]

    def launches(self) -> list[Launch]:
        """Return the kernel launches."""
        found = []
        for details in self.named("cuLaunchKernelEx"):
            *numbers, attributes, argument = details.split()
            n = [int(number) for number in numbers]
            shape = (n[0], n[1], n[2]), (n[3], n[4], n[5]), n[6], n[7]
            found.append(Launch(*shape, attributes.strip("[]"), bytes.fromhex(argument)))
        return found


def driver_environment() -> dict[str, str]:
    """Return the environment of a process that finds the recording driver where it looks for NVIDIA's."""
    driver = compile_library("libcuda.so.1", [HARNESS_DIR / "recording_driver.cpp"])
    return os.environ | {"LD_LIBRARY_PATH": str(driver.parent)}


def run(scenario: Scenario, prebuilt_harness: Path | None = None) -> Recording:
    """Run a scenario in its process."""
    order = asdict(scenario) | {"kernels": base64.b64encode(scenario.kernels).decode()}
    order |= {"library": str(plugin_library()), "harness": str(harness_library(prebuilt_harness))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.recorded_run"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=driver_environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr}"
    result = json.loads(done.stdout)
    result["driver_calls"] = [tuple(call) for call in result["driver_calls"]]
    return Recording(**result)


def _perform(order: dict[str, Any]) -> Recording:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.recording_read.restype = ctypes.c_char_p
    driver.recording_setup(
        order["compute_capability"], ctypes.c_size_t(order["argument_bytes"]), order["failing_call"].encode()
    )
    harness = Harness(Path(order["library"]), Path(order["harness"]))
    io = next(io for io in PLUGINS if io.op_type == order["op_type"])
    built = HarnessPlugin.of(harness, io, order["ints"], base64.b64decode(order["kernels"]))
    plugin = built.deserialized() if order["deserialize"] else built
    recording = Recording([])
    if order["attach"]:
        try:
            plugin = plugin.attached()
        except PluginRefusedError as refusal:
            recording.attach_refusal = str(refusal)
    for call in order["calls"]:
        inputs, outputs = shapes_of(io, {n: TensorDesc(tuple(s), t) for n, (s, t) in call["tensors"].items()})
        try:
            plugin.enqueue(inputs, outputs, call["addresses"], call["stream"], call["workspace"])
            recording.refusals.append(None)
        except PluginRefusedError as refusal:
            recording.refusals.append(str(refusal))
    lines = driver.recording_read().decode().splitlines()
    recording.driver_calls = [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
    recording.messages = harness.messages()
    return recording


if __name__ == "__main__":
    json.dump(asdict(_perform(json.load(sys.stdin))), sys.stdout)
