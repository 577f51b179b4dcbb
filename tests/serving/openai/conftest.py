"""One server and one in-process ``LLM`` of the same model, for all tests that leave both as they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.serving.openai.servers import MODEL, ServerProcess
from trtllm_replayssm import LLM, NGramDecodingConfig

TEMPLATE = """{% for message in messages -%}
# {{ message.role }}{{ " " ~ message.name if message.name is defined else "" }}
{% if message.content == "refuse" %}{{ raise_exception("no such words") }}{% endif -%}
{{ message.content }}
{% endfor %}{% if add_generation_prompt %}# {{ speaker or "assistant" }}
{% endif %}"""


@pytest.fixture(scope="session")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, template_file: Path) -> Iterator[ServerProcess]:
    options = ["--served_model_name", "tiny", "--chat_template", str(template_file), "--max_batch_size", "8"]
    options += ["--speculative", "ngram", "--max_sequences", "16"]
    with ServerProcess(options, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(MODEL, device="cpu", dtype="float32", speculative_config=NGramDecodingConfig()) as opened:
        yield opened
