"""A folder of prepared corpora that jobs share: whole or absent, and checked when read.

A corpus is built in a temporary folder beside its place and renamed into it, so a reader never
sees half of one and two jobs that prepare the same one do no harm. A manifest holds the digest
of every file; what does not match is rebuilt, with a warning. Whoever builds holds a lock on the
temporary folder, so that one whose builder was killed is known and cleared away by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.records import write_atomically

MANIFEST = "manifest.json"
BUILDING = ".building-"
LOCK = "lock"
GRACE_S = 60.0
"""Age below which a temporary folder without a lock may belong to a job that just made it."""
LARGE = 2**26
"""Bytes from which a file whose size and times are those of its sealing is not read again."""


class Damaged(Exception):
    """A cached folder that is there but is not what was written."""


def file_digest(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def written(path: Path) -> list[int]:
    """Size and times of a file: they change with every write (the change time cannot be set)."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def file_digests(
    folder: Path, sealed: Callable[[str], tuple[list[int], str] | None] = lambda name: None
) -> dict[str, str]:
    """Hex sha256 of every file but the manifest, by path within the folder.

    sealed: what was `written` when a file was sealed, and its digest then; a large file that was
        not written since is not read.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            name = path.relative_to(folder).as_posix()
            known = sealed(name)
            unread = known and known[0][0] >= LARGE and known[0] == written(path)
            found[name] = known[1] if known and unread else file_digest(path)
    return found


def text_digest(facts: Any) -> str:
    """Hex sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest: `facts`, the digest of every file, and the manifest's own digest."""
    # The times come first: a write that falls between them and the digest then counts as later.
    files = [path for path in folder.rglob("*") if path.is_file()]
    times = {path.relative_to(folder).as_posix(): written(path) for path in files}
    body = {"facts": facts, "files": file_digests(folder), "written": times}
    write_atomically(folder / MANIFEST, json.dumps({**body, "sha256": text_digest(body)}))


def verified(folder: Path) -> dict[str, Any]:
    """The facts of a sealed folder; raises Damaged when anything differs from what was sealed."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = {"facts": found["facts"], "files": found["files"], "written": found["written"]}
        if found["sha256"] != text_digest(body):
            raise Damaged("the manifest was changed")
        times, digests = body["written"], body["files"]
        actual = file_digests(
            folder, lambda name: (times[name], digests[name]) if name in digests else None
        )
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
    clear_leftovers(place.parent)
    with building(place.parent) as made:
        folder = made / "corpus"
        folder.mkdir()
        seal(folder, write(folder))
        move_into(folder, place)


@contextmanager
def building(parent: Path) -> Iterator[Path]:
    """A temporary folder that is locked as long as its maker lives, and gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix=BUILDING, dir=parent))
    try:
        with (made / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Remove the temporary folders of makers that were killed; those in use are left alone."""
    for made in parent.glob(f"{BUILDING}*"):
        with suppress(OSError):
            if not (made / LOCK).exists():
                if time.time() - made.stat().st_mtime > GRACE_S:
                    shutil.rmtree(made)
                continue
            with (made / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(made)


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
