"""Runs the engine of a multi-token prediction head beside the engine of its model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trtllm_replayssm.contract.manifest import MTP_ENGINE_FILE
from trtllm_replayssm.contract.memory_plan import mtp_head_bytes
from trtllm_replayssm.contract.tensors import mtp_state_specs, mtp_weight_specs, shared_matrix_specs
from trtllm_replayssm.errors import ManifestError, ReplaySSMError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.executors import gate
from trtllm_replayssm.runtime.executors.engine import Engine, profile_of
from trtllm_replayssm.runtime.executors.mtp_executor import MtpExecutor, SharedMatrices, check_head_memory
from trtllm_replayssm.runtime.executors.tensorrt_executor import TensorRTExecutor, allocate_states, load_weights


class TensorRTMtpExecutor(MtpExecutor):
    """A head as an engine.

    Its matrices are the weights that the model's engine has bound. Where that one has its weights inside, they are read
    a second time from the folder's file.

    Args:
        folder: the engine folder, whose manifest has a head.
        target: runs the model's engine; closed after this.

    Raises:
        BackendError: TensorRT refuses the engine.
        ManifestError: the engine or the weights are damaged or others.
        CapacityError: caches and weights do not fit the device.
    """

    def __init__(self, folder: Path, target: TensorRTExecutor) -> None:
        manifest, limits, device = target.manifest, target.limits, target.device
        geometry, record = manifest.geometry, manifest.mtp
        assert record is not None, "open_executor refuses engines without a head"
        plan = gate.read_engine(folder / MTP_ENGINE_FILE, record)
        is_embedded = manifest.weights == "embedded"
        device_bytes = mtp_head_bytes(geometry, manifest.replay, limits, embeds_weights=is_embedded)
        check_head_memory(device_bytes, limits, device)
        self._replay = manifest.replay
        own, shared = mtp_weight_specs(geometry), shared_matrix_specs(geometry)
        if is_embedded:
            gate.check_weights(target.weights_file, manifest)
            matrices, weights = load_weights(target.weights_file, shared, device), {}
        else:
            matrices, weights = target.weights, load_weights(target.weights_file, own, device)
        lacking = [spec.name for spec in shared if spec.name not in matrices]
        if lacking:
            raise ManifestError(
                f"{target.weights_file}: found no {lacking[0]}; needed it for the multi-token prediction head. Name "
                f"the checkpoint that the engine was built from with the option checkpoint_dir."
            )
        specs = mtp_state_specs(geometry, manifest.replay, limits)
        with torch.cuda.device(device), _named():
            states = tuple(map(pools.State, specs, allocate_states(specs, limits, device)))
            records = (record.tensors, manifest.profiles)
            self._engine = Engine(target.backend, plan, records, states, weights, device)
        first, last = shared[0].name, shared[-1].name
        super().__init__(geometry, limits, SharedMatrices(matrices[first], matrices[last]), states, device_bytes)

    def close(self) -> None:
        """Release the engine, the caches and the weights; those of the target stay."""
        self._engine.close()
        super().close()

    def _run(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        first_slot: int,
        key_length: int,
    ) -> torch.Tensor:
        # The graph's attention knows all rows of the window for tokens and all of the cache for keys: it needs neither
        # num_tokens and slot_ids nor key_length. What it makes becomes its input when drafts are chained, hence new
        # memory for every result.
        del key_length
        out = torch.empty_like(embedded)
        inputs = (embedded, hidden.contiguous(), counters[0])
        profile = profile_of(embedded.shape[1], self._replay)
        with _named():
            results = self._engine.run(profile, inputs, first_slot, {"next_hidden_states": out})
        return results["next_hidden_states"]


@contextmanager
def _named() -> Iterator[None]:
    """Let errors say which of the two engines they are of."""
    try:
        yield
    except ReplaySSMError as error:
        raise type(error)(f"multi-token prediction head: {error.message}") from error
