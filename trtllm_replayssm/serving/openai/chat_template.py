"""Conversations to prompts, by the template that a model's folder has; it runs in jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtllm_replayssm.errors import CheckpointError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """The tag that templates for training have around what the assistant said; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template and the special tokens that it may name.

    Args:
        source: the template's text.
        variables: what it is given at every conversation, the special tokens above all.
        name: where it is from, for errors.

    Raises:
        CheckpointError: it is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(
                f"{name}: found no readable chat template ({error}); needed one of jinja2."
            ) from error
        self._variables = dict(variables)

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> "ChatTemplate | None":
        """Return a folder's template, or None where it has none.

        Args:
            folder: with ``chat_template.jinja``, or a template in ``chat_template.json`` or ``tokenizer_config.json``.
            file: a template to be used instead.

        Raises:
            CheckpointError: a file cannot be read.
            OSError: ``file`` is not there.
        """
        own = folder / "chat_template.jinja"
        config = _read_json(folder / "tokenizer_config.json")
        variables = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        variables = {name: text for name, text in variables.items() if text is not None}
        file = own if file is None and own.is_file() else file
        if file is not None:
            return cls(_read_text(file), variables, str(file))
        for holder in ("chat_template.json", "tokenizer_config.json"):
            found = _read_json(folder / holder).get("chat_template")
            if isinstance(found, list):  # several by name
                named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
                found = named[0].get("template") if named else None
            if isinstance(found, str):
                return cls(found, variables, str(folder / holder))
        return None

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: each with a role and a content.
            add_generation_prompt: begin the assistant's turn.
            variables: further ones of the request; those of the template itself stay what they are.

        Raises:
            RequestError: the template refuses the conversation.
        """
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return self._template.render({**variables, **self._variables, **own})
        except Exception as error:  # whatever a template's code raises over what it was given
            raise RequestError(
                f"messages: found a conversation that the chat template refuses ({error}); needed another."
            ) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own, which escapes for HTML and lacks options that templates have come to use.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: found no UTF-8 text ({error}); needed a chat template.") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: found no valid JSON ({error}); needed it as the model has it.") from error
    return content if isinstance(content, dict) else {}
