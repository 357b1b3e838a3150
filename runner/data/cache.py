"""A folder of prepared corpora that jobs share: whole or absent, and checked when read.

A corpus is built in a temporary folder beside its place and renamed into it, so a reader never
sees half of one and two jobs that prepare the same one do no harm. A manifest holds the digest
of every file; what does not match is rebuilt, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.records import write_atomically

MANIFEST = "manifest.json"


class Damaged(Exception):
    """A cached folder that is there but is not what was written."""


def file_digests(folder: Path) -> dict[str, str]:
    """Hex sha256 of every file but the manifest, by path within the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def text_digest(facts: Any) -> str:
    """Hex sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest: `facts`, the digest of every file, and the manifest's own digest."""
    body = {"facts": facts, "files": file_digests(folder)}
    write_atomically(folder / MANIFEST, json.dumps({**body, "sha256": text_digest(body)}))


def verified(folder: Path) -> dict[str, Any]:
    """The facts of a sealed folder; raises Damaged when anything differs from what was sealed."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = {"facts": found["facts"], "files": found["files"]}
        if found["sha256"] != text_digest(body):
            raise Damaged("the manifest was changed")
        actual = file_digests(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    if actual != body["files"]:
        differing = {name for name, _ in actual.items() ^ body["files"].items()}
        raise Damaged(f"missing, new or changed: {', '.join(sorted(differing))}")
    facts: dict[str, Any] = body["facts"]
    return facts


def facts_at(place: Path) -> dict[str, Any] | None:
    """The facts of the folder; None when it is absent, or damaged, of which it warns."""
    if not place.exists():
        return None
    try:
        return verified(place)
    except Damaged as error:
        warnings.warn(f"damaged corpus cache {place} is rebuilt: {error}", stacklevel=2)
        return None


def build(place: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Let `write` fill a folder and return its facts, then put it at `place`.

    Another job's intact folder at `place` is kept; both hold the same.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=place.parent) as made:
        folder = Path(made, "corpus")
        folder.mkdir()
        seal(folder, write(folder))
        move_into(folder, place)


def move_into(folder: Path, place: Path, *, tries: int = 8) -> None:
    """Rename `folder` to `place`, taking a damaged one away first."""
    for attempt in range(tries):
        try:
            folder.rename(place)
            return
        except OSError:
            with suppress(Damaged):
                verified(place)
                return
            with suppress(FileNotFoundError):
                place.rename(folder.with_name(f"damaged-{attempt}"))
    raise OSError(f"cannot put a corpus at {place}: it keeps changing")


def remember(folder: Path, stamp: str, digest: str) -> None:
    """Note that files with this stamp hold a corpus with this digest."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{stamp}.json", json.dumps({"digest": digest}))


def remembered(folder: Path, stamp: str) -> str | None:
    """The digest noted for a stamp; None when there is none, or none that can be read."""
    try:
        digest = json.loads((folder / f"{stamp}.json").read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) else None
