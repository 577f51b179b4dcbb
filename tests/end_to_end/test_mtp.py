"""Drafts of the multi-token prediction head, against a plain head in fp64 on the hidden states of ``transformers``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.reference import Reference
from tests.end_to_end.test_parity import PROMPTS, make_llm, tokens_of
from tests.mtp_models import make_with_mtp
from tests.oracle.mtp import Head, Shape
from trtllm_replayssm import LLM, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtllm_replayssm.builders.checkpoint.convert import BalanceSheet, convert
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.engine import build
from trtllm_replayssm.contract.tensors import mtp_weight_specs
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter

FAMILIES = ["nemotron_h", "qwen3_next", "qwen3_5"]
SHAPES = {
    "nemotron_h": Shape(4, 2, 16, 1e-5),
    "qwen3_next": Shape(4, 2, 32, 1e-6, rotary_dim=8),
    "qwen3_5": Shape(4, 2, 32, 1e-6, rotary_dim=8),
}
LENGTH = 60
# What mixers add to the hidden states, so that a head which knows of none of it is right about every other time.
PARTLY = 0.01


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> "Folders":
    return Folders(tmp_path_factory.mktemp("mtp"))


class Folders:
    """Makes each checkpoint when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, kind: Any = "random", mixing: float = 1.0) -> Path:
        folder = self._root / f"{family}-{kind}-{mixing}"
        return folder if folder.exists() else make_with_mtp(folder, family, kind, mixing=mixing, seed=3)


def speculating(folder: Path, max_draft_len: int = 3, **options: Any) -> LLM:
    config = MTPDecodingConfig(max_draft_len=max_draft_len, adaptive=False)
    return make_llm(folder, speculative_config=config, **options)


class Recorder:
    """Keeps what a head proposed, and after which tokens; the model is given other drafts where there is a script.

    Args:
        llm: whose drafter is watched.
        script: prompt -> what plain decoding appends. Of its next tokens two are the drafts, and a wrong one.
    """

    def __init__(self, llm: LLM, script: Mapping[tuple[int, ...], Sequence[int]] | None) -> None:
        self.proposals: list[tuple[list[int], tuple[int, ...]]] = []
        self._sequences: dict[int, list[int]] = {}
        self._continuations: dict[int, list[int]] = {}
        drafter = llm._drafter
        begin, observe, propose = drafter.begin, drafter.observe, drafter.propose

        def watched_begin(request_id: int, prompt_token_ids: Sequence[int]) -> None:
            self._sequences[request_id] = list(prompt_token_ids)
            if script is not None:
                self._continuations[request_id] = [*prompt_token_ids, *script[tuple(prompt_token_ids)]]
            begin(request_id, prompt_token_ids)

        def watched_observe(request_id: int, token_ids: Sequence[int]) -> None:
            self._sequences[request_id].extend(token_ids)
            observe(request_id, token_ids)

        def watched_propose(limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
            found = propose(limits)
            self.proposals += [(list(self._sequences[i]), tuple(drafts)) for i, drafts in found.items()]
            return found if script is None else {i: self._scripted(i, len(drafts)) for i, drafts in found.items()}

        drafter.begin, drafter.observe, drafter.propose = (  # type: ignore[method-assign]
            watched_begin,
            watched_observe,
            watched_propose,
        )

    def _scripted(self, request_id: int, count: int) -> list[int]:
        start = len(self._sequences[request_id])
        right = self._continuations[request_id][start : start + count]
        return [token ^ 1 if number == 2 else token for number, token in enumerate(right)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_scripted", [False, True], ids=["rejected", "two_accepted"])
def test_drafts_are_those_of_a_plain_head(folders: Folders, family: str, is_scripted: bool) -> None:
    """After prompts in pieces, rejected and accepted drafts, in batches: the caches always hold the true rows."""
    folder = folders(family)
    plain = tokens_of(make_llm(folder), PROMPTS, LENGTH)
    llm = speculating(folder, max_batch_size=3)
    recorder = Recorder(llm, dict(zip(map(tuple, PROMPTS), plain, strict=True)) if is_scripted else None)
    assert tokens_of(llm, PROMPTS, LENGTH) == plain
    rate = llm.metrics()["acceptance_rate"]
    assert 0.6 < rate < 0.7 if is_scripted else rate < 0.2
    reference = Reference(folder).model
    head = Head(load_file(folder / "model.safetensors"), SHAPES[family])
    assert len(recorder.proposals) > 70
    for tokens, drafts in recorder.proposals[::2]:
        with torch.no_grad():
            hidden = reference.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        for draft, logits in zip(drafts, head.drafts(tokens, hidden, len(drafts)), strict=True):
            lead = logits.max() - logits[draft]
            assert lead < 1e-3, f"draft {draft} after {len(tokens)} tokens is behind by {lead:.2e}"
            if draft != int(logits.argmax()):
                break  # a near-tie: the plain head goes on from the other token


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_knows_half_is_right_far_more_often_than_by_chance(folders: Folders, family: str) -> None:
    llm = speculating(folders(family, "copying", PARTLY))
    tokens_of(llm, PROMPTS, LENGTH)
    assert 0.2 < llm.metrics()["acceptance_rate"] < 0.95


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "mixing"), [("random", 1.0), ("copying", PARTLY), ("copying", 0.0)])
@pytest.mark.parametrize("max_draft_len", [1, 4])
def test_tokens_are_those_of_plain_decoding(
    folders: Folders, family: str, kind: str, mixing: float, max_draft_len: int
) -> None:
    folder = folders(family, kind, mixing)
    llm, plain = speculating(folder, max_draft_len, max_batch_size=3), make_llm(folder)
    assert tokens_of(llm, PROMPTS, LENGTH) == tokens_of(plain, PROMPTS, LENGTH)
    rules = {"temperature": 0.7, "top_k": 20, "seed": 5}
    assert tokens_of(llm, PROMPTS, 20, **rules) == tokens_of(plain, PROMPTS, 20, **rules)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_knows_the_model_is_always_right(folders: Folders, family: str) -> None:
    llm = speculating(folders(family, "copying", 0.0), 4)
    tokens_of(llm, PROMPTS, LENGTH)
    metrics = llm.metrics()
    assert metrics["acceptance_rate"] == 1.0
    assert metrics["num_decode_rows"] == len(PROMPTS) * -(-(LENGTH - 1) // 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_behind_a_reused_prefix_the_head_drafts_what_it_drafts_without(folders: Folders, family: str) -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8, device_cache_size=2**22)
    llm = speculating(folders(family), max_batch_size=4, kv_cache_config=cache)
    prompt = [3 + i * i % 50 for i in range(30)]
    rules = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found = []
    for _ in range(2):
        # In between, other texts run in the slot.
        llm.generate([9, 8, 7], rules.model_copy(update={"enable_block_reuse": False}))
        llm.reset_metrics()
        recorder = Recorder(llm, None)
        found.append((llm.generate(prompt, rules).outputs[0].token_ids, list(recorder.proposals)))
    assert llm.metrics()["num_reused_tokens"] == 24
    assert found[0] == found[1] and len(found[0][1]) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sequences_of_one_prompt_share_what_the_head_read_of_it(folders: Folders, family: str) -> None:
    folder = folders(family, "copying", 0.0)
    rules = SamplingParams(max_tokens=30, seed=4, n=3, ignore_eos=True, top_k=2)
    llm, alone = speculating(folder, max_batch_size=4), make_llm(folder, max_batch_size=1)
    expected = [completion.token_ids for completion in alone.generate(PROMPTS[0], rules).outputs]
    assert [completion.token_ids for completion in llm.generate(PROMPTS[0], rules).outputs] == expected
    assert llm.metrics()["num_prompt_tokens"] == len(PROMPTS[0])
    assert llm.metrics()["num_accepted_drafts"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_keeps_the_head(folders: Folders, family: str, tmp_path: Path) -> None:
    sheets: list[BalanceSheet] = []
    folder = folders(family)
    converted = convert(folder, tmp_path / "checkpoint", report=sheets.append)
    assert not any(name.startswith("mtp.") for names in sheets[0].ignored.values() for name in names)
    direct, opened = open_model_folder(folder), open_model_folder(converted)
    assert opened.geometry == direct.geometry
    found, expected = opened.load_mtp_weights(), direct.load_mtp_weights()
    assert list(found) == [spec.name for spec in mtp_weight_specs(opened.geometry)] == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not any(name.startswith("mtp.") for name in opened.load_weights())
    llms = [speculating(path) for path in (folder, converted)]
    assert tokens_of(llms[0], PROMPTS, LENGTH) == tokens_of(llms[1], PROMPTS, LENGTH)
    counted = [llm.metrics()["num_accepted_drafts"] for llm in llms]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_heads_run(folders: Folders, dtype: str) -> None:
    llm = speculating(folders("qwen3_5", "copying", 0.0), dtype=dtype)
    tokens_of(llm, PROMPTS, LENGTH)
    assert llm.metrics()["acceptance_rate"] > 0.8


def test_the_adaptive_drafter_hands_hidden_states_on(folders: Folders) -> None:
    llm = make_llm(folders("qwen3_5", "copying", 0.0), speculative_config=MTPDecodingConfig(max_draft_len=2))
    tokens_of(llm, PROMPTS, LENGTH)
    assert llm.metrics()["acceptance_rate"] == 1.0


def test_a_model_without_a_head_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = folders("qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.startswith("mtp."):
            del tensors[name]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"found no multi-token prediction head; needed its weights, mtp\.\*"):
        speculating(other)


def test_the_older_name_of_the_draft_length() -> None:
    assert MTPDecodingConfig(num_nextn_predict_layers=3).max_draft_len == 3
    assert MTPDecodingConfig().max_draft_len == 1
    with pytest.raises(ConfigError, match="max_draft_len, num_nextn_predict_layers: found 2 and 3; needed one"):
        MTPDecodingConfig(max_draft_len=2, num_nextn_predict_layers=3)


def test_an_engine_folder_keeps_the_head(tmp_path: Path) -> None:
    """Built without an engine of it: the torch executor runs both, from the folder's weights."""
    folder = make_with_mtp(tmp_path / "hf", "qwen3_5", "copying", mixing=0.0, seed=3, value_dim=32)
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128, "max_draft_len": 3}
    converted = convert(folder, tmp_path / "checkpoint")
    engine = build(converted, tmp_path / "engine", backend="tensorrt_rtx", compute_capabilities=(120,), **sizes)
    llm = LLM(engine, speculative_config=MTPDecodingConfig(max_draft_len=3, adaptive=False), device="cpu")
    assert tokens_of(llm, PROMPTS, 20) == tokens_of(make_llm(folder), PROMPTS, 20)
    assert llm.metrics()["acceptance_rate"] == 1.0


def test_closing_the_llm_closes_the_head(folders: Folders) -> None:
    llm = speculating(folders("qwen3_5"))
    assert isinstance(llm._drafter, MtpDrafter)
    executor = llm._drafter._executor
    llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    llm.close()
    assert not executor.states
