"""What ``LLM`` returns -> the tensors of Triton responses: all of it once, or what is new after every step."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_replayssm.serving.triton.requests import Array, GenerationRequest


def response_tensors(output: RequestOutput, request: GenerationRequest, wanted: Collection[str]) -> dict[str, Array]:
    """Return the tensors of one response: what ``output`` has that those before it had not.

    Args:
        output: an item of an iteration over the request's handle.
        request: what was asked for.
        wanted: names of the tensors that the client asked for.

    Returns:
        By name, the batch dimension included.
    """
    sequences = output.outputs
    new_ids = [sequence.token_ids_diff for sequence in sequences]
    tensors: dict[str, Array] = {
        "text_output": _texts([_new_text(output, sequence, request) for sequence in sequences]),
        "output_ids": _rows(new_ids, request.pad_id, np.int32),
        "sequence_length": np.array([[len(ids) for ids in new_ids]], dtype=np.int32),
        "finish_reason": _texts([sequence.finish_reason or "" for sequence in sequences]),
        "stop_reason": _texts(["" if s.stop_reason is None else str(s.stop_reason) for s in sequences]),
    }
    if request.with_log_probs:
        sums = [sequence.cumulative_logprob for sequence in sequences]
        tensors["cum_log_probs"] = np.array([sums], dtype=np.float32)
        tensors["output_log_probs"] = _rows([_log_probs(sequence) for sequence in sequences], 0.0, np.float32)
    if request.with_num_input_tokens:
        tensors["num_input_tokens"] = np.array([[len(output.prompt_token_ids)]], dtype=np.int32)
    if request.with_num_output_tokens:
        counts = [len(sequence.token_ids) for sequence in sequences]
        tensors["num_output_tokens"] = np.array([counts], dtype=np.int32)
    return {name: tensor for name, tensor in tensors.items() if name in wanted}


def _new_text(output: RequestOutput, sequence: CompletionOutput, request: GenerationRequest) -> str:
    new = sequence.text_diff
    is_first = request.with_input and sequence.num_seen_characters == 0 and bool(new)
    return (output.prompt or "") + new if is_first else new


def _log_probs(sequence: CompletionOutput) -> list[float]:
    # Of each token the likeliest ones, 0 of them here, and the token's own.
    pairs = zip(sequence.logprobs_diff or (), sequence.token_ids_diff, strict=True)
    return [found[token].logprob for found, token in pairs]


def _texts(texts: list[str]) -> Array:
    return np.array([[text.encode("utf-8") for text in texts]], dtype=np.object_)


def _rows(rows: Sequence[Sequence[float]], fill: float, dtype: npt.DTypeLike) -> Array:
    padded = np.full((1, len(rows), max(map(len, rows))), fill, dtype=dtype)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded
