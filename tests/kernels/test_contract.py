"""The kernels' headers and their Python twins agree: parameter structs and the protocol's predicate."""

import ctypes
from pathlib import Path

import pytest

from tests.kernels.emulation import compile_host
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.params import CausalConv1dParams, Mamba2Params


@pytest.mark.parametrize(
    ("folder", "struct"), [("mamba2", Mamba2Params), ("causal_conv1d", CausalConv1dParams)], ids=["mamba2", "conv1d"]
)
def test_params_have_the_layout_of_the_header(folder: str, struct: type[ctypes.Structure], tmp_path: Path) -> None:
    name = struct.__name__
    fields = [field[0] for field in struct._fields_]
    source = tmp_path / "layout.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) unsigned'
    offsets = ", ".join(f"offsetof({name}, {field}), sizeof({name}::{field})" for field in fields)
    source.write_text(
        f'#include <cstddef>\n#include "{folder}/params.h"\n'
        f"{export} struct_bytes() {{ return sizeof({name}); }}\n"
        f"{export} layout(int i) {{ const unsigned table[] = {{{offsets}}}; return table[i]; }}\n"
    )
    library = compile_host(tmp_path / "layout.so", source, {}, SOURCE_DIR)
    assert library.struct_bytes() == ctypes.sizeof(struct)
    for index, field in enumerate(fields):
        descriptor = getattr(struct, field)
        assert library.layout(2 * index) == descriptor.offset, field
        assert library.layout(2 * index + 1) == descriptor.size, field


def test_the_headers_predicate_is_the_contracts_for_all_lengths(tmp_path: Path) -> None:
    source = tmp_path / "protocol.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) int'
    source.write_text(
        '#include "common/protocol.h"\n'
        f"{export} needs_flush(int c, int f, int w, int d) {{ return replay::needs_flush(c, f, w, d); }}\n"
        f"{export} advance(int c, int f, int w, int d) {{ return replay::advance_checkpoint(c, f, w, d); }}\n"
        f"{export} row(int position, int rows) {{ return replay::ring_row(position, rows); }}\n"
    )
    library = compile_host(tmp_path / "protocol.so", source, {}, SOURCE_DIR)
    for history in range(1, 33):
        for draft in range(min(history, 8)):
            for base in (0, 1, 2**31 - 100):
                for pending in range(history + 1):
                    arguments = base + pending, base, history, draft
                    kwargs = {"history": history, "max_draft_len": draft}
                    flushed = protocol.needs_flush(base + pending, base, **kwargs)
                    _, folded = protocol.advance(base + pending, base, 0, **kwargs)
                    assert library.needs_flush(*arguments) == flushed
                    assert library.advance(*arguments) == folded
    assert all(library.row(t, rows) == t % rows for rows in range(1, 73) for t in (0, 1, rows - 1, rows, 2**31 - 1))
