"""Texts from the Python standard library that runs the job: read with `ast`, never imported."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from runner.data.texts import Text

SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
"""Folders that are not the library itself: installed packages, and tests, some of which are
deliberately no valid Python."""

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def library() -> Path:
    """Folder of the running Python's standard library, in a virtual environment too."""
    return Path(sysconfig.get_path("stdlib"))


def sources(folder: Path) -> list[Path]:
    """Python files of the library, ordered by their path within it."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(root, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def stamp(folder: Path, files: list[Path]) -> str:
    """Digest that changes when a file comes, goes or is written; reads no content.

    The change time is included: it notices an edit that kept size and modification time.
    """
    facts = []
    for path in files:
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        facts.append((path.relative_to(folder).as_posix(), status.st_size, *times))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def parse(path: Path) -> ast.Module:
    """Syntax tree of a file; its warnings about old escapes are the library's own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes(), filename=str(path))


def docstrings(files: list[Path]) -> Iterator[Text]:
    """Signature and docstring of everything documented, in the order of the files.

    A file that is no valid Python is left out with a warning that names it.
    """
    for path in files:
        try:
            tree = parse(path)
        except (SyntaxError, ValueError) as error:
            warnings.warn(f"left out of the corpus: {path} ({error})", stacklevel=2)
            continue
        for node in documented(tree):
            yield Text(prompt=signature(node), completion=ast.get_docstring(node) or "")


def documented(node: ast.AST) -> Iterator[Documented]:
    """Functions and classes that have a docstring, in source order.

    Only statements can hold them, so expressions, most of a tree, are not visited.
    """
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, Documented) and ast.get_docstring(child, clean=False) is not None:
                yield child
            yield from documented(child)


def signature(node: Documented) -> str:
    """`def name(args) -> result:` or `class Name(bases):`, on one line, newline included."""
    header = copy.copy(node)
    header.body = []
    header.decorator_list = []
    return ast.unparse(header) + "\n"


def topics(path: Path) -> Iterator[Text]:
    """Texts of `pydoc_data/topics.py` by topic name; no part of them is a prompt."""
    for statement in parse(path).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            found: dict[str, str] = ast.literal_eval(statement.value)
            for name in sorted(found):
                yield Text(prompt="", completion=found[name])
