"""The C++ reader of kernel images against the Python writer: sound ones survive, unsound ones are named."""

import random
import struct

import pytest

from tests.harness.plugin_harness import Harness, HarnessPlugin, PluginRefusedError
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D
from trtllm_replayssm.errors import BuildError
from trtllm_replayssm.plugins import kernel_image

HEADER, RECORD = 272, 152
# Offsets of an entry's numbers from the entry's start.
CAPABILITY, GRID, BLOCK, SHARED, ROWS, MOST, CUBIN_OFFSET, CUBIN_BYTES = 96, 104, 108, 112, 124, 128, 136, 144


def sound_image() -> bytes:
    return kernel_image.pack(
        "constants",
        [kernel_image.KernelEntry(role, role, 80, False, 1, 32, 0, role.encode() * 9) for role in ("step", "prefill")],
    )


def patched(offset: int, layout: str, value: int) -> bytes:
    image = bytearray(sound_image())
    struct.pack_into(layout, image, offset, value)
    return bytes(image)


def read(harness: Harness, image: bytes) -> None:
    HarnessPlugin.of(harness, CAUSAL_CONV1D, {"activation": 0}, image)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"RSSM", "field kernels: found 4 bytes; needed at least 272"),
        (patched(0, "<B", 0), "that are no kernel image of version 7"),
        (patched(8, "<I", 1), "that are no kernel image of version 7"),
        (patched(12, "<I", 0), "found 0 entries"),
        (patched(12, "<I", 3), "found 3 entries in 675 bytes; needed 1 or more, all inside"),
        (patched(12, "<I", 0xFFFFFFFF), "found 4294967295 entries"),
        (patched(HEADER, "<B", 0), "entry 0 of 2 is not sound: it has no role or no symbol"),
        (patched(HEADER + CAPABILITY, "<i", 0), "its compute capability is 0"),
        (patched(HEADER + GRID, "<i", 0), "its grid_x is 0"),
        (patched(HEADER + BLOCK, "<i", 1025), "its block_x is 1025"),
        (patched(HEADER + ROWS, "<i", 0), "its rows_per_block is 0"),
        (patched(HEADER + MOST, "<i", -1), "its most_blocks_per_multiprocessor is -1"),
        (patched(HEADER + SHARED, "<i", -1), "its dynamic_shared_bytes is -1"),
        (patched(HEADER + RECORD + CUBIN_BYTES, "<Q", 64), "entry 1 of 2 is not sound: its cubin of 64 bytes at 612"),
        (patched(HEADER + CUBIN_BYTES, "<Q", 0), "its cubin of 0 bytes"),
        (patched(HEADER + CUBIN_OFFSET, "<Q", 0), "its cubin of 36 bytes at 0 is not inside"),
        (patched(HEADER + CUBIN_OFFSET, "<Q", 2**64 - 8), "is not inside the image's 675 bytes"),
    ],
)
def test_an_unsound_image_is_refused_with_the_reason(harness: Harness, image: bytes, reason: str) -> None:
    assert len(sound_image()) == 675
    with pytest.raises(PluginRefusedError, match=reason):
        read(harness, image)


def test_two_kernels_for_one_role_and_architecture_are_refused(harness: Harness) -> None:
    entry = kernel_image.KernelEntry("step", "a", 80, False, 1, 32, 0, b"x")
    with pytest.raises(PluginRefusedError, match='entry 1 of 2 .* second one of role "step" for the same architecture'):
        read(harness, kernel_image.pack("constants", [entry, entry]))


@pytest.mark.parametrize(
    ("constants", "role", "symbol"), [("c" * 257, "r", "s"), ("c", "r" * 33, "s"), ("c", "r", "s" * 65)]
)
def test_a_text_that_would_be_cut_is_not_written(constants: str, role: str, symbol: str) -> None:
    """Two kernels' constants could then be the same by what is left of them."""
    with pytest.raises(AssertionError, match="or it is cut"):
        kernel_image.pack(constants, [kernel_image.KernelEntry(role, symbol, 80, False, 1, 32, 0, b"x")])


def test_every_truncation_is_refused(harness: Harness) -> None:
    image = sound_image()
    for length in range(len(image)):
        with pytest.raises(PluginRefusedError):
            read(harness, image[:length])


def test_random_damage_never_goes_further_than_the_checks(harness: Harness) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        image = bytearray(sound_image())
        for _ in range(rng.randint(1, 4)):
            image[rng.randrange(HEADER + 2 * RECORD)] = rng.randrange(256)
        try:
            read(harness, bytes(image))
        except PluginRefusedError:
            continue
        # What the C++ reader takes, the Python reader takes too, unless the damage is in a text's encoding.
        try:
            kernel_image.unpack(bytes(image))
        except UnicodeDecodeError:
            continue
        except BuildError as error:
            raise AssertionError(f"only one reader refuses: {error}") from error
