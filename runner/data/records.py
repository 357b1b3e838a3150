"""Records of a file to rows: which fields are read, of which type, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runner.data.texts import ASSISTANT, Chat, Message, Row, Text

REASONS = {
    "broken": "cannot be parsed",
    "not_an_object": "is not an object with fields",
    "repeated_field": "names a field twice",
    "missing": "has no such field",
    "null": "is null",
    "wrong_type": "is of another type",
    "not_utf8": "is not valid UTF-8",
    "empty": "holds nothing but white space",
    "no_assistant": "has no turn of the assistant",
}
"""Why a record can be left out; the words of `dropped`, with their meaning."""


class Bad(NamedTuple):
    """What is wrong with a record. reason: one of REASONS. detail: in words, field included."""

    reason: str
    detail: str


Record = Mapping[str, Any] | Bad
"""A record's fields by name, or why it has none."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields that are read: `text`, or `prompt` and `completion`, or `messages`.

    Each is the name of a field. What is predicted: all of a text; the completion; what the
    assistant says in a list of `{role, content}`. None of them means a field called `text`.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None

    def __post_init__(self) -> None:
        given = {name for name in ("text", "prompt", "completion", "messages") if self.named(name)}
        if given not in (set(), {"text"}, {"prompt", "completion"}, {"messages"}):
            raise ValueError(
                f"text, prompt, completion, messages: given {', '.join(sorted(given))}; "
                "allowed: text alone, prompt with completion, or messages alone"
            )

    def named(self, name: str) -> str | None:
        """The field that plays a role."""
        found: str | None = getattr(self, name)
        return found

    @property
    def columns(self) -> list[str]:
        """Every field that is read."""
        found = [self.text, self.prompt, self.completion, self.messages]
        return [name for name in found if name] or ["text"]

    def row(self, record: Record) -> Row | Bad:
        """The row of a record."""
        if isinstance(record, Bad):
            return record
        if self.messages:
            return chat(record, self.messages)
        if self.completion and self.prompt:
            prompt = string(record, self.prompt)
            completion = string(record, self.completion)
            if isinstance(prompt, Bad):
                return prompt
            return completion if isinstance(completion, Bad) else full(prompt, completion, self)
        text = string(record, self.text or "text")
        return text if isinstance(text, Bad) else full("", text, self)


def full(prompt: str, completion: str, fields: Fields) -> Text | Bad:
    """A row with something to predict."""
    if not completion.strip():
        return Bad("empty", f"field {fields.columns[-1]!r} {REASONS['empty']}")
    return Text(prompt=prompt, completion=completion)


def string(record: Mapping[str, Any], name: str) -> str | Bad:
    """The text of a field; nothing is converted to one."""
    if name not in record:
        has = ", ".join(map(repr, record)) or "none"
        return Bad("missing", f"no field {name!r}; its fields: {has}")
    return checked(record[name], f"field {name!r}")


def checked(value: Any, what: str) -> str | Bad:
    """A value that must be text in UTF-8."""
    if value is None:
        return Bad("null", f"{what} {REASONS['null']}")
    if not isinstance(value, str):
        return Bad("wrong_type", f"{what} is of type {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return Bad("not_utf8", f"{what} {REASONS['not_utf8']} at character {error.start}")
    return value


def chat(record: Mapping[str, Any], name: str) -> Chat | Bad:
    """A conversation: a list of `{role, content}`, at least one of them the assistant's."""
    if name not in record:
        return Bad("missing", f"no field {name!r}; its fields: {', '.join(map(repr, record))}")
    turns = record[name]
    if turns is None:
        return Bad("null", f"field {name!r} {REASONS['null']}")
    if not isinstance(turns, list):
        return Bad("wrong_type", f"field {name!r} is of type {type(turns).__name__}, not a list")
    messages = []
    for number, turn in enumerate(turns, 1):
        what = f"field {name!r}, turn {number}"
        if not isinstance(turn, Mapping):
            return Bad("wrong_type", f"{what} is of type {type(turn).__name__}, not an object")
        for key in ("role", "content"):
            if key not in turn:
                return Bad("missing", f"{what}: no {key!r}; it has {', '.join(map(repr, turn))}")
        role = checked(turn["role"], f"{what}, role")
        content = checked(turn["content"], f"{what}, content")
        for found in (role, content):
            if isinstance(found, Bad):
                return found
        messages.append(Message(str(role), str(content)))
    said = [message.content for message in messages if message.role == ASSISTANT]
    if not said:
        return Bad("no_assistant", f"field {name!r} {REASONS['no_assistant']}")
    if not any(content.strip() for content in said):
        return Bad("empty", f"field {name!r}: what the assistant says {REASONS['empty']}")
    return Chat(messages=tuple(messages))
