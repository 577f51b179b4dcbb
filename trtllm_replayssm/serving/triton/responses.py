"""What ``LLM`` returns -> the tensors of Triton responses: all of it once, or what is new after every step."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_replayssm.serving.triton.requests import Array, GenerationRequest


class ResponseWriter:
    """Writes the responses of one request; it knows what has been sent.

    Args:
        request: what was asked for.
        wanted: names of the outputs that the client asked for.
    """

    def __init__(self, request: GenerationRequest, wanted: Collection[str]) -> None:
        self._request = request
        self._wanted = wanted
        self._sent_characters = [0] * request.params.n
        self._sent_tokens = [0] * request.params.n

    def tensors(self, output: RequestOutput) -> dict[str, Array]:
        """Return the outputs that hold what is new, the batch dimension included; once more, nothing is new."""
        sequences = output.outputs
        starts, self._sent_tokens = self._sent_tokens, [len(sequence.token_ids) for sequence in sequences]
        new_ids = [sequence.token_ids[start:] for sequence, start in zip(sequences, starts, strict=True)]
        tensors: dict[str, Array] = {
            "text_output": _texts([self._new_text(output, sequence) for sequence in sequences]),
            "output_ids": _rows(new_ids, self._request.pad_id, np.int32),
            "sequence_length": np.array([[len(ids) for ids in new_ids]], dtype=np.int32),
            "finish_reason": _texts([sequence.finish_reason or "" for sequence in sequences]),
            "stop_reason": _texts(["" if s.stop_reason is None else str(s.stop_reason) for s in sequences]),
        }
        if self._request.with_log_probs:
            found = [_log_probs(sequence)[start:] for sequence, start in zip(sequences, starts, strict=True)]
            sums = [sequence.cumulative_logprob for sequence in sequences]
            tensors["cum_log_probs"] = np.array([sums], dtype=np.float32)
            tensors["output_log_probs"] = _rows(found, 0.0, np.float32)
        if self._request.with_num_input_tokens:
            tensors["num_input_tokens"] = np.array([[len(output.prompt_token_ids)]], dtype=np.int32)
        if self._request.with_num_output_tokens:
            tensors["num_output_tokens"] = np.array([self._sent_tokens], dtype=np.int32)
        return {name: tensor for name, tensor in tensors.items() if name in self._wanted}

    def _new_text(self, output: RequestOutput, sequence: CompletionOutput) -> str:
        sent = self._sent_characters[sequence.index]
        new = sequence.text[sent:]
        self._sent_characters[sequence.index] = max(sent, len(sequence.text))
        is_first = self._request.with_input and sent == 0 and bool(new)
        return (output.prompt or "") + new if is_first else new


def _log_probs(sequence: CompletionOutput) -> list[float]:
    # ``logprobs`` says of each token the likeliest ones, 0 of them here, and the token's own.
    return [found[token].logprob for found, token in zip(sequence.logprobs or (), sequence.token_ids, strict=True)]


def _texts(texts: list[str]) -> Array:
    return np.array([[text.encode("utf-8") for text in texts]], dtype=np.object_)


def _rows(rows: Sequence[Sequence[float]], fill: float, dtype: npt.DTypeLike) -> Array:
    padded = np.full((1, len(rows), max(map(len, rows))), fill, dtype=dtype)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded
