"""Read what a kernel needs of the device from its cubin: registers and stack, out of the ELF section ``.nv.info``."""

import struct
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
# Attributes of .nv.info: one byte of format, one of code, then for format 4 a byte count and (symbol, value).
_FORMAT_SIZED, _REGISTERS, _FRAME_BYTES = 4, 0x2F, 0x11


@dataclass(frozen=True)
class Resources:
    """Registers per thread, and bytes of stack per thread: spills and arrays that did not fit in registers."""

    registers: int
    stack_bytes: int


def resources(cubin: bytes) -> Resources:
    """Return the resources of a cubin's only kernel."""
    data = _section(cubin, b".nv.info")
    values: dict[int, int] = {}
    position = 0
    while position < len(data):
        form, code, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _FORMAT_SIZED:
            continue
        if size == 8:
            values[code] = max(values.get(code, 0), struct.unpack_from("<II", data, position)[1])
        position += size
    return Resources(values[_REGISTERS], values[_FRAME_BYTES])


def _section(elf: bytes, name: bytes) -> bytes:
    assert elf[:6] == b"\x7fELF\x02\x01", "not a little-endian 64-bit ELF file"
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names_index = struct.unpack_from("<HH", elf, 60)
    sections = [_SECTION.unpack_from(elf, table + index * _SECTION.size) for index in range(count)]
    names = sections[names_index][4]
    for section in sections:
        start = names + section[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[section[4] : section[4] + section[5]]
    raise AssertionError(f"no section {name!r}")
