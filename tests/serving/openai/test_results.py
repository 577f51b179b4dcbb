"""What OpenAI's client gets from the server is what the ``LLM`` generates in this process."""

import asyncio
import json
import math
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.serving.openai.conftest import TEMPLATE
from tests.serving.openai.servers import ServerProcess
from trtllm_replayssm import LLM, CompletionOutput, SamplingParams
from trtllm_replayssm.serving.openai.chat_template import ChatTemplate

PROMPT = "import os\n\ndef main("
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 16}
TOKENS = {"return_token_ids": True}


def expected(llm: LLM, prompt: str = PROMPT, **rules: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**rules)).outputs[0]


def complete(server: ServerProcess, **options: Any) -> Any:
    create: Any = server.client().completions.create  # the library knows its own parameters alone
    return create(model="tiny", **options)


def chat(server: ServerProcess, **options: Any) -> Any:
    create: Any = server.client().chat.completions.create
    return create(model="tiny", **options)


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_a_completion_is_that_of_the_llm(server: ServerProcess, llm: LLM, rules: dict[str, Any]) -> None:
    own = expected(llm, **rules)
    found = complete(server, prompt=PROMPT, extra_body=TOKENS, **rules)
    choice = found.choices[0]
    assert choice.text == own.text and choice.finish_reason == own.finish_reason
    assert choice.token_ids == own.token_ids
    length = len(llm.generate(PROMPT, SamplingParams(max_tokens=1)).prompt_token_ids)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (length, len(own.token_ids))
    assert found.usage.total_tokens == length + len(own.token_ids)
    assert found.usage.prompt_tokens_details is not None and found.usage.prompt_tokens_details.cached_tokens == 0
    assert found.object == "text_completion" and found.id.startswith("cmpl-")


@pytest.mark.parametrize("rules", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_a_stream_adds_up_to_the_completion(server: ServerProcess, llm: LLM, rules: dict[str, Any]) -> None:
    own = expected(llm, **rules)
    stream = complete(
        server, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, extra_body=TOKENS, **rules
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == own.text and len(chunks) > 3
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == own.token_ids
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == own.finish_reason and set(reasons[:-1]) == {None}
    assert all(chunk.usage is None for chunk in chunks) and not last.choices
    assert last.usage is not None and last.usage.completion_tokens == len(own.token_ids)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_is_the_completion_of_the_rendered_conversation(
    server: ServerProcess, llm: LLM, is_stream: bool
) -> None:
    prompt = "# system\nBe brief.\n# user Ann\nimport\nos\n# assistant\n"
    own = expected(llm, prompt, **GREEDY)
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "name": "Ann",
            "content": [{"type": "text", "text": "import"}, {"type": "text", "text": "os"}],
        },
    ]
    rules: Any = {"messages": messages, "temperature": 0.0, "max_completion_tokens": 16}
    if not is_stream:
        choice = chat(server, **rules).choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", own.text)
        assert choice.finish_reason == own.finish_reason
        return
    chunks = list(chat(server, **rules, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    assert chunks[-1].choices[0].finish_reason == own.finish_reason


def test_a_chat_without_a_limit_ends_where_the_model_does(server: ServerProcess, llm: LLM) -> None:
    found = chat(server, messages=[{"role": "user", "content": "x" * 1500}], temperature=0.0, stop=["\n", "#"])
    assert found.choices[0].finish_reason in ("stop", "length")
    assert "\n" not in (found.choices[0].message.content or "")


def test_variables_of_the_template_come_from_the_request(server: ServerProcess, llm: LLM) -> None:
    own = expected(llm, "# user\nhi\n# Bob\n", **GREEDY)
    found = chat(
        server,
        messages=[{"role": "user", "content": "hi"}],
        extra_body={"chat_template_kwargs": {"speaker": "Bob", "messages": "not these"}},
        temperature=0.0,
        max_tokens=16,
    )
    assert found.choices[0].message.content == own.text


def test_several_prompts_and_sequences_are_told_apart(server: ServerProcess, llm: LLM) -> None:
    prompts = ["import os\n", "class A"]
    rules = SamplingParams(n=3, seed=5, max_tokens=8, temperature=1.0)
    own = [completion.text for output in llm.generate(prompts, rules) for completion in output.outputs]
    options: Any = {"prompt": prompts, "n": 3, "seed": 5, "max_tokens": 8, "temperature": 1.0}
    found = complete(server, **options)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text for choice in found.choices] == own
    texts = [""] * 6
    for chunk in complete(server, **options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == own


def test_prompts_may_be_tokens_and_are_echoed(server: ServerProcess, llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode("import os\n")
    own = expected(llm, "import os\n", **GREEDY)
    options: Any = {"echo": True, **GREEDY}
    for prompt in (tokens, [tokens], "import os\n"):
        assert complete(server, prompt=prompt, **options).choices[0].text == "import os\n" + own.text
    chunks = complete(server, prompt=tokens, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "import os\n" + own.text


def test_log_probabilities_are_those_of_the_llm(server: ServerProcess, llm: LLM) -> None:
    own = expected(llm, **SAMPLED, logprobs=3)
    assert own.logprobs is not None
    values = [entries[token].logprob for entries, token in zip(own.logprobs, own.token_ids, strict=True)]
    found = complete(server, prompt=PROMPT, logprobs=3, **SAMPLED).choices[0]
    logprobs = found.logprobs
    assert logprobs is not None and logprobs.token_logprobs and logprobs.tokens and logprobs.top_logprobs
    assert logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    assert "".join(logprobs.tokens) == found.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert [len(top) for top in logprobs.top_logprobs] == [len(entries) for entries in own.logprobs]
    reply = chat(server, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=5)
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries) == reply.choices[0].message.content
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in entries)
    assert all(top.logprob <= 0 and math.isfinite(top.logprob) for entry in entries for top in entry.top_logprobs)


def test_rules_reach_the_llm(server: ServerProcess, llm: LLM) -> None:
    plain = expected(llm, **GREEDY)
    banned = complete(server, prompt=PROMPT, logit_bias={str(plain.token_ids[0]): -100}, extra_body=TOKENS, **GREEDY)
    assert plain.token_ids[0] not in banned.choices[0].token_ids
    own = expected(llm, **GREEDY, frequency_penalty=1.5, presence_penalty=0.5, prompt_ignore_length=10**6)
    found = complete(server, prompt=PROMPT, frequency_penalty=1.5, presence_penalty=0.5, **GREEDY)
    assert found.choices[0].text == own.text != plain.text
    stop = plain.text[3:5]
    stopped = complete(server, prompt=PROMPT, stop=stop, **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (plain.text.partition(stop)[0], "stop")
    rules: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}
    own = expected(llm, **SAMPLED, **rules)
    assert complete(server, prompt=PROMPT, extra_body=rules, **SAMPLED).choices[0].text == own.text


def test_a_response_format_is_kept_to(server: ServerProcess) -> None:

    schema: Any = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema["additionalProperties"] = False
    found = chat(
        server,
        messages=[{"role": "user", "content": "n"}],
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
        max_tokens=400,
        seed=2,
    )
    assert isinstance(json.loads(found.choices[0].message.content or "")["n"], int)


def test_64_clients_get_their_own_results(server: ServerProcess, llm: LLM) -> None:
    prompts = [f"def function_{number}(self" for number in range(64)]
    rules: Any = {"temperature": 0.8, "max_tokens": 10}
    params = [SamplingParams(seed=number, **rules) for number in range(64)]
    own = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def one(client: AsyncOpenAI, number: int) -> str:
        options: Any = {"model": "tiny", "prompt": prompts[number], "seed": number, **rules}
        if number % 2:
            return str((await client.completions.create(**options)).choices[0].text)
        return "".join([c.choices[0].text async for c in await client.completions.create(**options, stream=True)])

    async def everyone() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=120) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(64))))

    assert asyncio.run(everyone()) == own
    server.wait_for_metric("running_sequences", 0)


def test_the_model_is_listed_by_its_name(server: ServerProcess) -> None:
    models = server.client().models.list()
    assert [model.id for model in models] == ["tiny"]
    assert server.client().models.retrieve("tiny").id == "tiny"


def test_what_happened_is_counted(server: ServerProcess) -> None:
    names = ["prompt_tokens_total", "generated_tokens_total", 'sequences_total{end="finished"}', "flushes_total"]
    names += ["time_to_first_token_seconds_count", 'http_requests_total{path="/v1/completions",status="200"}']
    before = {name: server.metric(name) for name in names}
    complete(server, prompt=[5, 6, 7], max_tokens=40, temperature=0.0, extra_body={"ignore_eos": True})
    counted = {name: server.metric(name) - before[name] for name in names}
    assert counted.pop("flushes_total") >= 1
    assert list(counted.values()) == [3, 40, 1, 1, 1]
    assert server.metric("ready") == 1 and server.metric("slots") == 8
    assert server.metric("draft_tokens_total") >= server.metric("accepted_draft_tokens_total") > 0
    assert server.metric("inter_token_seconds_sum") > 0


def test_the_template_of_the_tests_is_read_as_the_server_reads_it() -> None:
    rendered = ChatTemplate(TEMPLATE, {}, "test").render(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, variables={}
    )
    assert rendered == "# user\nhi\n# assistant\n"


def test_a_template_has_what_templates_of_transformers_have() -> None:
    source = """{% for message in messages %}{% generation %}{{ message | tojson(ensure_ascii=False, sort_keys=True) }}
{% endgeneration %}{% break %}{% endfor %}{{ [1] | tojson(indent=1) }}{{ "<" | tojson(separators=(",", ":")) }}"""
    messages = [{"role": "user", "content": "é"}] * 2
    rendered = ChatTemplate(source, {}, "test").render(messages, add_generation_prompt=True, variables={})
    assert rendered == '{"content": "é", "role": "user"}\n[\n 1\n]"<"'
