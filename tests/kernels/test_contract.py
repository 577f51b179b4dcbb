"""The kernels' headers and their Python twins agree: parameter structs, the protocol's predicates and limits."""

import ctypes
from pathlib import Path

import pytest

from tests.kernels.emulation import compile_host
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.params import (
    LONGEST_STEP_WINDOW,
    CausalConv1dParams,
    GatedDeltaNetParams,
    Mamba2Params,
    Mamba2WithConvParams,
)
from trtllm_replayssm.plugins.specializations import MAX_ROWS


@pytest.mark.parametrize(
    ("header", "struct"),
    [
        ("mamba2/params.h", Mamba2Params),
        ("mamba2/params_with_conv.h", Mamba2WithConvParams),
        ("causal_conv1d/params.h", CausalConv1dParams),
        ("gated_delta_net/params.h", GatedDeltaNetParams),
    ],
    ids=["mamba2", "mamba2_with_conv", "conv1d", "gated_delta_net"],
)
def test_params_have_the_layout_of_the_header(header: str, struct: type[ctypes.Structure], tmp_path: Path) -> None:
    name = struct.__name__
    fields = [field[0] for field in struct._fields_]
    source = tmp_path / "layout.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) unsigned'
    offsets = ", ".join(f"offsetof({name}, {field}), sizeof({name}::{field})" for field in fields)
    source.write_text(
        f'#include <cstddef>\n#include "{header}"\n'
        f"{export} struct_bytes() {{ return sizeof({name}); }}\n"
        f"{export} layout(int i) {{ const unsigned table[] = {{{offsets}}}; return table[i]; }}\n"
    )
    library = compile_host(tmp_path / "layout.so", source, {}, SOURCE_DIR)
    assert library.struct_bytes() == ctypes.sizeof(struct)
    for index, field in enumerate(fields):
        descriptor = getattr(struct, field)
        assert library.layout(2 * index) == descriptor.offset, field
        assert library.layout(2 * index + 1) == descriptor.size, field


def test_the_headers_constants_are_those_of_the_launches(tmp_path: Path) -> None:
    source = tmp_path / "constants.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) int'
    source.write_text(
        '#include "causal_conv1d/params.h"\n#include "common/protocol.h"\n'
        f"{export} longest_step_window() {{ return LONGEST_STEP_WINDOW; }}\n"
        f"{export} max_rows() {{ return replay::MAX_ROWS; }}\n"
    )
    library = compile_host(tmp_path / "constants.so", source, {}, SOURCE_DIR)
    assert library.longest_step_window() == LONGEST_STEP_WINDOW
    assert library.max_rows() == MAX_ROWS


def test_the_headers_predicates_are_the_contracts_for_all_lengths(tmp_path: Path) -> None:
    source = tmp_path / "protocol.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) int'
    source.write_text(
        '#include "common/protocol.h"\n'
        f"{export} needs_flush(int c, int f, int w, int d) {{ return replay::needs_flush(c, f, w, d); }}\n"
        f"{export} is_prefill(int s, int d) {{ return replay::is_prefill(s, d); }}\n"
        f"{export} row(int position, int rows) {{ return replay::ring_row(position, rows); }}\n"
    )
    library = compile_host(tmp_path / "protocol.so", source, {}, SOURCE_DIR)
    for history in range(1, 33):
        for draft in range(min(history, 8)):
            for base in (0, 1, 2**31 - 100):
                for pending in range(history + 1):
                    arguments = base + pending, base, history, draft
                    kwargs = {"history": history, "max_draft_len": draft}
                    assert library.needs_flush(*arguments) == protocol.needs_flush(base + pending, base, **kwargs)
    for draft in range(16):
        for seq_len in (*range(40), 2**31 - 1):
            assert library.is_prefill(seq_len, draft) == protocol.is_prefill(seq_len, draft)
    assert all(library.row(t, rows) == t % rows for rows in range(1, 73) for t in (0, 1, rows - 1, rows, 2**31 - 1))
