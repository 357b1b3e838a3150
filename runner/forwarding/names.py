"""Names and values as a tracking store accepts them: no two of ours become one of its own.

MLflow 3 takes word characters (any script), `/ . - :` and spaces in names of parameters and
metrics. It refuses a leading or double slash, `.` or `..` between slashes and `..` at the start,
limits names to 250 characters, and cuts values at 6,000 without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

NAME_LIMIT = 250
VALUE_LIMIT = 6000
_REFUSED = re.compile(r"[^\w.\- ]|^ | $", re.UNICODE)


def _coded(text: str) -> str:
    return "".join(f":{ord(char):x}:" for char in text)


def _segment(text: str) -> str:
    if text == "":
        return "::"
    if text == "." or text.startswith(".."):
        return _coded(".") + (_segment(text[1:]) if text[1:] else "")
    return _REFUSED.sub(lambda match: _coded(match.group()), text)


def safe_name(name: str) -> str:
    """`name` for a metric or parameter; different names give different results.

    A character that is refused, and the colon itself, is written `:hex:` with its code point in
    hexadecimal (`acc@1` is `acc:40:1`); an empty part between slashes is `::`. A result over 250
    characters keeps its beginning and ends in `:sha256.` and 32 digits of the whole name's digest,
    which no shorter name can end in.
    """
    coded = "/".join(_segment(part) for part in name.split("/"))
    return shortened(coded, NAME_LIMIT)


def shortened(text: str, limit: int) -> str:
    """`text` within `limit` characters; a longer one ends in a digest of all of it."""
    if len(text) <= limit:
        return text
    tail = f":sha256.{sha256(text.encode()).hexdigest()[:32]}"
    return text[: limit - len(tail)] + tail


def safe_value(text: str, limit: int = VALUE_LIMIT) -> str:
    """`text`, or its beginning and a suffix that says it was cut, with its length and digest."""
    if len(text) <= limit:
        return text
    digest = sha256(text.encode()).hexdigest()
    tail = f"... (cut; {len(text)} characters, sha256 {digest})"
    return text[: limit - len(tail)] + tail


def _reads_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def value_text(value: Any) -> str:
    """A configured value as text: a string as it is, anything else as JSON.

    A string that would read as JSON is quoted, so that `"null"` and null stay different.
    """
    if isinstance(value, str) and not _reads_as_json(value):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and text of every leaf; lists and empty mappings are leaves.

    A dot or colon inside a key is written `:2e:` or `:3a:`, so `{"a.b": 1}` and
    `{"a": {"b": 1}}` stay different.
    """
    for key, value in config.items():
        part = re.sub(r"[.:]", lambda match: _coded(match.group()), str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{part}.")
        else:
            yield prefix + part, value_text(value)


def params_of(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, str]:
    """Every parameter of a run by its store name, cut where the store would cut."""
    named = {**dict(flatten(config)), **{key: value_text(v) for key, v in extra.items()}}
    return {safe_name(key): safe_value(text) for key, text in named.items()}
