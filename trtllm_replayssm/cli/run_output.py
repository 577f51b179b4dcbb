"""What ``run`` prints: outputs as text or as records, one while it grows, and numbers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.llm import LLM


def print_results(
    outputs: Sequence[RequestOutput], llm: "LLM", *, as_json: bool, with_metrics: bool, with_memory: bool
) -> None:
    """Print whole outputs, and what was counted and taken where that is wanted."""
    ran = {"executor": llm.executor, "device": llm.device, "history": llm.replay.history}
    if as_json:
        result: dict[str, Any] = {"outputs": [_record(output) for output in outputs], **ran}
        result |= {"metrics": llm.metrics()} if with_metrics else {}
        result |= {"memory": llm.memory_plan.model_dump()} if with_memory else {}
        print(json.dumps(result, ensure_ascii=False))
        return
    for number, output in enumerate(outputs):
        _print_output(number, output, is_text=llm.tokenizer is not None)
    if with_metrics:
        _print_numbers("metrics", {**ran, **llm.metrics()})
    if with_memory:
        plan = llm.memory_plan
        _print_numbers("memory, bytes", {**plan.parts(), "total": plan.total})


def print_growing(outputs: Iterable[RequestOutput], *, is_text: bool) -> None:
    """Print a prompt and its one sequence, piece by piece as it comes."""
    completion = None
    for output in outputs:
        if completion is None:
            _print_prompt(0, output)
            print("--- completion 0" if is_text else "--- completion 0, token ids")
        (completion,) = output.outputs
        piece = completion.text_diff if is_text else "".join(f"{token} " for token in completion.token_ids_diff)
        print(piece, end="", flush=True)
    assert completion is not None, "a request has at least its last output"
    print(f"\n--- {_ending(completion)}")


def _record(output: RequestOutput) -> dict[str, Any]:
    """Return an output for JSON: without what only an iteration over a growing one has."""
    made = asdict(output)
    for completion in made["outputs"]:
        del completion["num_seen_characters"], completion["num_seen_tokens"]
    return made


def _print_output(number: int, output: RequestOutput, *, is_text: bool) -> None:
    """Print a prompt and its sequences; without a tokenizer these are token ids."""
    _print_prompt(number, output)
    for completion in output.outputs:
        name = f"{number}" if len(output.outputs) == 1 else f"{number}.{completion.index}"
        if is_text:
            print(f"--- completion {name}, {_ending(completion)}\n{completion.text}")
        else:
            print(f"--- completion {name}, token ids, {_ending(completion)}\n{_joined(completion.token_ids)}")


def _print_numbers(title: str, numbers: Mapping[str, object]) -> None:
    """Print names and values, one a line."""
    print(f"--- {title}")
    width = max(len(name) for name in numbers)
    for name, value in numbers.items():
        print(f"{name:<{width}}  {f'{value:.3f}' if isinstance(value, float) else value}")


def _print_prompt(number: int, output: RequestOutput) -> None:
    if output.prompt is None:
        print(f"--- prompt {number}, token ids\n{_joined(output.prompt_token_ids)}")
    else:
        print(f"--- prompt {number}\n{output.prompt}")


def _ending(completion: CompletionOutput) -> str:
    return f"{len(completion.token_ids)} tokens, finish_reason {completion.finish_reason}"


def _joined(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
