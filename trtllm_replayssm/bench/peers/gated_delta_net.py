"""What peers of Gated DeltaNet share: states with the value axis first, unit keys in rings, inputs without gaps."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.peers.common import Launch, PeerStep, relaunched
from trtllm_replayssm.bench.recurrences import ACTIVATION, Packed, normal
from trtllm_replayssm.bench.tuning import Setting
from trtllm_replayssm.contract.geometry import DTYPE_BYTES, GatedDeltaNetGeometry


def geometry_of(m: object) -> GatedDeltaNetGeometry:
    """Return a layer that is known to be one of Gated DeltaNet."""
    assert isinstance(m, GatedDeltaNetGeometry), "the registry asks for peers of the case's family"
    return m


class GatedDeltaNetPeerStep(PeerStep):
    """Another library's step of Gated DeltaNet; its states are [Hv, V, K], ours are [Hv, K, V]."""

    @property
    def geometry(self) -> GatedDeltaNetGeometry:
        """The layer."""
        return geometry_of(self.case.geometry)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a slot's state in the library."""
        m = self.geometry
        return m.n_value_heads, m.value_dim, m.key_dim

    @property
    def scale(self) -> float:
        """What the kernels multiply queries of length 1 with."""
        return float(self.geometry.key_dim**-0.5)

    def ring_row_bytes(self) -> int:
        """Return the bytes of one token's k and u, both of the activation type, and g in fp32."""
        m = self.geometry
        return (m.d_key + m.d_value) * ACTIVATION.itemsize + m.n_value_heads * DTYPE_BYTES["float32"]

    def unit_keys(self, *leading: int) -> Tensor:
        """Return random keys of length 1, [*leading, K] of the activation type, as the libraries' rings hold them."""
        keys = normal((*leading, self.geometry.key_dim), torch.float32, self.device)
        return torch.nn.functional.normalize(keys, dim=-1).to(ACTIVATION)

    def output(self) -> Tensor:
        """Return memory for a step's output, [batch, T, Hv, V]."""
        m = self.geometry
        shape = (self.case.batch_size, self.case.replay.window, m.n_value_heads, m.value_dim)
        return torch.empty(shape, dtype=ACTIVATION, device=self.device)


WINDOW_BOUND = 2e-2
"""Of the outputs of a replayed window: state, keys and each u are rounded to 16 bits, and the next u builds on them."""


class GaplessInputs:
    """The inputs of all sets, copied beforehand so that no number lies between those of one tensor.

    Kernels that read no other layout copy a model's slices first; here that costs nothing, in their favour.

    Args:
        packed: the inputs where a model has them.
        num_sets: sets.
    """

    def __init__(self, packed: Packed, num_sets: int) -> None:
        self._sets = [
            {name: tensor.contiguous() for name, tensor in packed.inputs(index).items()} for index in range(num_sets)
        ]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sets[index]


COLUMNS: tuple[Setting, ...] = tuple({"BV": columns, "num_warps": 1} for columns in (8, 16, 32))
"""Columns of a head's state by a block, and its warps: what is fast on an H200 for one batch size or another."""


def with_columns(library: Any, kernel: str, setting: Setting, axis: int) -> AbstractContextManager[None]:
    """Give a kernel the columns and warps of a setting.

    Args:
        library: the module whose function launches the kernel.
        kernel: its name there.
        setting: of ``COLUMNS``, or as shipped.
        axis: of the grid that the blocks of one head are on.
    """
    if not setting:
        return nullcontext()

    def changed(launch: Launch) -> Launch:
        grid = list(launch.grid)
        grid[axis] = grid[axis] * launch.options["BV"] // int(setting["BV"])
        return launch._replace(grid=tuple(grid), options={**launch.options, **setting})

    return relaunched(library, kernel, changed)
