"""A few requests of one layer through the conventional op: prompts in pieces, then windows with random acceptance."""

import numpy as np
import torch

from trtllm_replayssm import ops
from trtllm_replayssm.bench.recurrences import recurrence_of
from trtllm_replayssm.contract.geometry import ModelGeometry, ReplayGeometry

SLOTS, PROMPT, STEPS = 5, 70, 12


def drive(geometry: ModelGeometry, replay: ReplayGeometry, device: torch.device) -> list[torch.Tensor]:
    """Run a prompt in two pieces in every slot but one, then windows of all rows, padding among them.

    Returns:
        The outputs of every call, padding left out, fp32 on the CPU; the same numbers go in every time.
    """
    m = geometry.recurrence
    assert m is not None
    recurrence = recurrence_of(m)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    weights = recurrence.draw_weights(device)
    snapshots = torch.randn(SLOTS, replay.window + 1, *recurrence.state, device=device)
    op = getattr(ops, f"{recurrence.name}_conventional")
    past = np.zeros(SLOTS, dtype=np.int32)

    def run(slots: list[int], seq_len: int) -> torch.Tensor:
        conv = torch.randn(len(slots), seq_len, m.conv_dim, device=device, dtype=torch.bfloat16)
        packed = torch.randn(len(slots), seq_len, m.d_in_proj, device=device, dtype=torch.bfloat16)
        counters = {
            "past_lengths": [int(past[slot]) for slot in slots],
            "num_tokens": [seq_len if slot >= 0 else 0 for slot in slots],
            "slot_ids": slots,
        }
        on_device = {name: torch.tensor(v, dtype=torch.int32, device=device) for name, v in counters.items()}
        inputs = recurrence.inputs(conv, packed)
        y: torch.Tensor = op(**inputs, **weights, ssm_snapshots=snapshots, **on_device, max_draft_len=replay.window - 1)
        return y[torch.tensor(slots) >= 0].float().cpu()

    outputs = []
    used = list(range(SLOTS - 1))
    for slot in used:
        for piece in (PROMPT - 20, 20):
            outputs.append(run([slot], piece))
            past[slot] += piece
    for _ in range(STEPS):
        outputs.append(run([*used, -1], replay.window))
        past[used] += rng.integers(1, replay.window + 1, len(used)).astype(np.int32)
    return outputs


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest error of an output, relative to the token's largest."""
    errors = [
        ((one - other).abs() / other.abs().amax(dim=(-2, -1), keepdim=True)).max()
        for one, other in zip(found, expected, strict=True)
    ]
    return float(max(errors))
