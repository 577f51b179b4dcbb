"""``fla`` (flash-linear-attention): the recurrent decode of one token, and the chunked rule over a prompt."""

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, PeerPrefill, bare
from trtllm_replayssm.bench.peers.gated_delta_net import COLUMNS, GaplessInputs, GatedDeltaNetPeerStep, with_columns
from trtllm_replayssm.bench.recurrences import Packed
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED

_OPS = "fla.ops.gated_delta_rule"


class FusedRecurrent(GatedDeltaNetPeerStep):
    """``fused_recurrent_gated_delta_rule``: one token, its state new memory; states are fp32 and have our layout."""

    implementation = "fla fused_recurrent_gated_delta_rule"
    kind: Kind = "conventional"
    module = f"{_OPS}.fused_recurrent"
    settings = (SHIPPED, *COLUMNS[1:])  # as shipped it has the first

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._states = list(self.states())
        self._inputs = GaplessInputs(self.packed, self.num_sets)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a slot's state in the library: ours."""
        return self.packed.recurrence.state

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token on fp32 states."""
        return case.replay.window == 1 and case.replay.state_dtype == "float32"

    @torch.no_grad()
    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        y: Tensor
        with with_columns(self.library, "fused_recurrent_gated_delta_rule_fwd_kernel", self.setting, axis=0):
            # The next step of the set starts from what this one leaves, as in the library's layer.
            y, self._states[index] = self.library.fused_recurrent_gated_delta_rule(
                **_inputs(self._inputs[index], self.packed),
                initial_state=self._states[index],
                output_final_state=True,
            )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states."""
        return bare(self._states[index][rows], self.packed.recurrence)


class Chunked(PeerPrefill):
    """``chunk_gated_delta_rule``, which tunes its own kernels; the last states are fp32, whatever the case's are."""

    implementation = "fla chunk_gated_delta_rule"
    module = f"{_OPS}.chunk"

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._inputs = GaplessInputs(self.packed, self.num_sets)

    @torch.no_grad()
    def launch(self, step: int, index: int) -> Tensor:
        """Launch the prefill of one set."""
        y: Tensor
        y, self.last_states = self.library.chunk_gated_delta_rule(
            **_inputs(self._inputs[index], self.packed), output_final_state=True
        )
        return y


def _inputs(inputs: dict[str, Tensor], packed: Packed) -> dict[str, object]:
    """Return raw inputs and constants by the library's names: norms, decays and beta are the kernels' work."""
    q, k, v, a, b = (inputs[name] for name in ("q", "k", "v", "a", "b"))
    return {
        **{"q": q, "k": k, "v": v, "g": a, "beta": b},
        **packed.weights,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
    }
