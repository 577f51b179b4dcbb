"""Stop strings in whole generations: over the borders of tokens and of speculated windows, kept or cut."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, SamplingParams

RULES = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("stop") / "hf", pattern="M*-M", tokenizer=True)


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "drafts"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    speculative = NGramDecodingConfig(max_draft_len=request.param, adaptive=False) if request.param else None
    with LLM(folder, device="cpu", max_seq_len=96, speculative_config=speculative) as opened:
        yield opened


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_of_several_tokens_ends_the_text_before_or_behind_it(llm: LLM, length: int) -> None:
    plain = llm.generate("stop", RULES).outputs[0]
    # The longest text the first tokens can be cut to is that of the whole generation.
    for at in range(0, len(plain.text) - length, 4):
        stop = plain.text[at : at + length]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        first = plain.text.find(stop)
        cut = llm.generate("stop", RULES.model_copy(update={"stop": ("never there", stop)})).outputs[0]
        kept = RULES.model_copy(update={"stop": (stop,), "include_stop_str_in_output": True})
        whole = llm.generate("stop", kept).outputs[0]
        assert (cut.text, cut.stop_reason, cut.finish_reason) == (plain.text[:first], stop, "stop")
        assert (whole.text, whole.stop_reason) == (plain.text[: first + length], stop)
        assert cut.token_ids == whole.token_ids == plain.token_ids[: len(cut.token_ids)]
