"""Protocol buffers' text format, as far as a Triton model configuration needs it.

A message is a mapping; a repeated field is a list; a string is text; an enumerator is a ``Name``; ``Comment`` keys are
comments above what follows.
"""

import json
from collections.abc import Mapping, Sequence


class Name(str):
    """A value written without quotation marks: an enumerator."""


class Comment(str):
    """A line of comment; as a key of a message, whose value does not matter."""


Scalar = str | int | bool
Value = Scalar | Mapping[str, "Value"] | Sequence["Value"]


def render(message: Mapping[str, Value], indent: int = 0) -> str:
    """Write the fields of a message, one a line."""
    lines: list[str] = []
    space = "  " * indent
    for key, value in message.items():
        if isinstance(key, Comment):
            lines.append(f"{space}# {key}".rstrip())
        else:
            lines += [_field(key, item, indent) for item in _items(value)]
    return "\n".join(lines)


def _items(value: Value) -> Sequence[Value]:
    """Return the values of a field: several for a repeated message, one list for a repeated scalar."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return [value]
    return value if value and isinstance(value[0], Mapping) else [value]


def _field(key: str, value: Value, indent: int) -> str:
    space = "  " * indent
    if isinstance(value, Mapping):
        return f"{space}{key} {{\n{render(value, indent + 1)}\n{space}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{space}{key}: [{', '.join(_scalar(item) for item in value)}]"
    return f"{space}{key}: {_scalar(value)}"


def _scalar(value: Value) -> str:
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON's escapes that the text format does not have stand for characters beyond ASCII alone, and those stay.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
