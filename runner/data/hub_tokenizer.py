"""Tokenizers of the Hugging Face ecosystem, from a folder or by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.contracts import Fault, Unsupported, UserError
from runner.data.fast_tokenizer import FastTokenizer
from runner.data.texts import ASSISTANT, Message, Part, plain_chat
from runner.data.tokenizer import Tokenizer

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What a name on the hub looks like."""
KEY = "data.tokenizer.path"


@dataclass(frozen=True, kw_only=True)
class HubTokenizer:
    """Any tokenizer of `transformers` that has a fast implementation.

    path: a folder (a relative one counts from the launch folder) or a name on the hub. revision:
        of a name. What the tokenizer itself puts before a text (Llama's begin-of-text token, say)
        stands before each example; each ends with its end-of-text token. Special tokens that are
        spelled out in a text become those tokens, as everywhere in that ecosystem.
    """

    path: str
    revision: str | None = None

    def make(self, texts: Callable[[], Iterable[str]], *, source: str, cache: Path) -> Tokenizer:
        """See `runner.data.tokenizer.TokenizerPart`."""
        return fast(self.loaded(), self.path)

    def loaded(self) -> Any:
        """The tokenizer of `transformers`; raises UserError where there is none."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise Unsupported(
                "data.tokenizer needs the library transformers: pip install 'fullstep[hub]'"
            ) from error
        folder = Path(self.path).expanduser().absolute()
        if not folder.is_dir() and not NAME.fullmatch(self.path):
            raise refused(f"{folder}: no such folder")
        where = str(folder) if folder.is_dir() else self.path
        try:
            return AutoTokenizer.from_pretrained(where, revision=self.revision, use_fast=True)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise refused(f"{where}: {reason or type(error).__name__}") from error


def refused(given: str) -> UserError:
    """A path or name that gives no tokenizer that can be used."""
    return UserError(
        Fault(
            key=KEY,
            given=given,
            allowed="a folder with a tokenizer that transformers saved, or a name on the hub; with "
            "a fast implementation and an end-of-text token",
            next_step=f"correct {KEY}",
        )
    )


def fast(tokenizer: Any, path: str) -> FastTokenizer:
    """A tokenizer of `transformers` as the pipeline uses one."""
    if not tokenizer.is_fast:
        raise refused(f"{path}: {type(tokenizer).__name__}, which has no fast implementation")
    if tokenizer.eos_token_id is None:
        raise refused(f"{path}: {type(tokenizer).__name__} without an end-of-text token")
    pad = tokenizer.pad_token_id
    template = tokenizer.chat_template
    return FastTokenizer(
        backend=tokenizer.backend_tokenizer,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.eos_token_id if pad is None else pad,
        begin_ids=begin_ids(tokenizer),
        chat=templated(tokenizer) if template else plain_chat,
        template=str(template or ""),
    )


def begin_ids(tokenizer: Any) -> tuple[int, ...]:
    """The special ids that the tokenizer puts before a text by itself."""
    whole = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    added = len(whole) - len(plain)
    for first in range(added + 1):
        if whole[first : first + len(plain)] == plain:
            return tuple(whole[:first])
    return ()


def templated(tokenizer: Any) -> Callable[[Sequence[Message]], tuple[Part, ...]]:
    """Writes chats by the tokenizer's own template."""

    def write(turns: Sequence[Message], prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            raise unwritten(turns, f"{error}") from error
        return text

    def chat(turns: Sequence[Message]) -> tuple[Part, ...]:
        whole = write(turns, False)
        parts: list[Part] = []
        at = 0
        for number, turn in enumerate(turns):
            if turn.role == ASSISTANT:
                head = write(turns[:number], True)
                said = write(turns[: number + 1], False)
                if not (whole.startswith(said) and said.startswith(head) and len(head) >= at):
                    raise unwritten(turns, "a turn is written otherwise once others follow it")
                parts += [Part(whole[at : len(head)], False), Part(said[len(head) :], True)]
                at = len(said)
        return (*parts, Part(whole[at:], False)) if whole[at:] else tuple(parts)

    return chat


def unwritten(turns: Sequence[Message], reason: str) -> UserError:
    """A chat that the template does not write turn by turn."""
    start = turns[0].content[:60] if turns else ""
    return UserError(
        Fault(
            key=KEY,
            given=f"a chat template that cannot write the chat which begins {start!r}: {reason}",
            allowed="a template that writes a chat turn by turn, so that what the assistant says "
            "can be told apart",
            next_step="correct the chat's roles, or use another tokenizer",
        )
    )
