"""Rows of text before tokenization: what is kept, and on which side of the split it falls."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from runner.contracts import Split


class Part(NamedTuple):
    """A stretch of a row that is tokenized apart, so that no token spans the mask's edge.

    loss: whether its tokens are predicted. ends: whether the end-of-text token follows it.
    begins: whether what the tokenizer puts before a text stands in front of it.
    """

    text: str
    loss: bool
    ends: bool = False
    begins: bool = False


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


class Renders(Protocol):
    """Knows how a chat is written down: a tokenizer."""

    def render(self, messages: Sequence[Message]) -> tuple[Part, ...]:
        """The parts of a chat; only what the assistant says is predicted."""


class Row(Protocol):
    """One row of a source."""

    @property
    def content(self) -> str:
        """All that the row says, whatever tokenizer will read it; decides the side of the split."""

    def parts(self, renders: Renders) -> tuple[Part, ...]:
        """What is tokenized, in order."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row: `prompt` is read but never predicted, `completion` is predicted."""

    prompt: str
    completion: str

    @property
    def content(self) -> str:
        """Prompt and completion."""
        return self.prompt + self.completion

    def parts(self, renders: Renders) -> tuple[Part, ...]:
        """The prompt, where there is one, and the completion with the end of text."""
        completion = Part(self.completion, True, ends=True, begins=not self.prompt)
        if not self.prompt:
            return (completion,)
        return (Part(self.prompt, False, begins=True), completion)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One conversation."""

    messages: tuple[Message, ...]

    @property
    def content(self) -> str:
        """The turns as JSON."""
        return json.dumps(self.messages)

    def parts(self, renders: Renders) -> tuple[Part, ...]:
        """The conversation as the tokenizer's chat template writes it."""
        return renders.render(self.messages)


def plain_chat(messages: Sequence[Message]) -> tuple[Part, ...]:
    """A chat for tokenizers without a template: `role: content` on a line of its own for each
    turn. What the assistant says is predicted, with an end-of-text token behind each turn."""
    parts: list[Part] = []
    unread = ""
    for message in messages:
        unread += f"{message.role}: "
        if message.role == ASSISTANT:
            parts.append(Part(unread, False, begins=not parts))
            parts.append(Part(message.content, True, ends=True))
            unread = "\n"
        else:
            unread += f"{message.content}\n"
    return (*parts, Part(unread, False)) if unread.strip() else tuple(parts)


ASSISTANT = "assistant"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The rows of a source, in an order that the source's content alone decides.

    rows: distinct rows with something to predict.
    dropped: rows left out, by reason.
    """

    rows: tuple[Text, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex sha256 over the rows; says nothing of where they came from."""
        found = hashlib.sha256()
        for row in self.rows:
            for part in (row.prompt.encode(), row.completion.encode()):
                found.update(len(part).to_bytes(8, "big"))
                found.update(part)
        return found.hexdigest()


def fault_of(row: Text, seen: Mapping[Text, None]) -> str | None:
    """Why a row is left out, or None."""
    if not row.completion.strip():
        return "empty"
    if row in seen:
        return "duplicates"
    try:
        (row.prompt + row.completion).encode("utf-8")
    except UnicodeEncodeError:
        return "not_utf8"
    return None


def collect(rows: Iterable[Text]) -> Texts:
    """Keep the first of each row that can be used, and count the others by reason."""
    kept: dict[Text, None] = {}
    dropped: Counter[str] = Counter()
    for row in rows:
        fault = fault_of(row, kept)
        if fault is None:
            kept[row] = None
        else:
            dropped[fault] += 1
    return Texts(rows=tuple(kept), dropped=dict(dropped))


def side(prompt: str, completion: str, *, eval_share: float) -> Split:
    """The split of a text, by a hash of its whole content.

    Neither position nor length limit enters: the same text is always on the same side.
    """
    return side_of(prompt + completion, eval_share=eval_share)


def side_of(content: str, *, eval_share: float) -> Split:
    """`side` of a row by its content."""
    digest = hashlib.sha256(content.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < eval_share * 2**64 else "train"
