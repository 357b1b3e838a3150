"""Tests for runner/data/stdlib.py."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from pathlib import Path

import pytest

from runner.data import stdlib
from runner.data.texts import Text

SOURCE = '''"""The module's own docstring is no example."""
raise SystemExit("this file must never be imported")

@decorated(by="a: colon")
def plain(a, *, b: int = 1,
          c="):") -> "str":  # a comment: with colon
    """First line.

        Indented.
    Last.
    """
    def inner(): "of plain"

class Outer(Base, metaclass=Meta):
    """Outer's."""
    async def wait(self): r"""raw \\d"""
    def silent(self):
        return """no docstring"""

if True:
    class Bare: "bare"
elif False:
    def other(): "other"
else:
    try:
        def tried(): "tried"
    except ValueError:
        def caught(): "caught"
    else:
        def went_well(): "went well"
    finally:
        def at_last(): "at last"
for x in y:
    def looped(): "looped"
with x:
    def entered(): "entered"
match x:
    case 1:
        def matched(): "matched"
def empty(): ""
def number(): 1
def formatted(): f"{x}"
'''

FOUND = [
    ("def plain(a, *, b: int=1, c='):') -> 'str':\n", "First line.\n\n    Indented.\nLast."),
    ("def inner():\n", "of plain"),
    ("class Outer(Base, metaclass=Meta):\n", "Outer's."),
    ("async def wait(self):\n", "raw \\d"),
    ("class Bare:\n", "bare"),
    ("def other():\n", "other"),
    ("def tried():\n", "tried"),
    ("def caught():\n", "caught"),
    ("def went_well():\n", "went well"),
    ("def at_last():\n", "at last"),
    ("def looped():\n", "looped"),
    ("def entered():\n", "entered"),
    ("def matched():\n", "matched"),
    ("def empty():\n", ""),
]


def write(folder: Path, **sources: str) -> list[Path]:
    """Write files whose names have `__` for the slash, in the given order."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return stdlib.sources(folder)


def test_everything_with_a_docstring_is_found_wherever_it_stands(tmp_path: Path) -> None:
    found = list(stdlib.docstrings(write(tmp_path, module=SOURCE)))
    assert found == [Text(prompt=prompt, completion=completion) for prompt, completion in FOUND]


def test_files_are_ordered_by_path_and_tests_and_packages_are_left_out(tmp_path: Path) -> None:
    names = ("b", "a_b", "a", "a__z", "test__t", "a__tests__t", "site-packages__p", "lib2to3__l")
    found = write(tmp_path, **dict.fromkeys((*names, "idlelib__idle_test__i"), ""))
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "a/z.py",
        "a.py",
        "a_b.py",
        "b.py",
    ]


def test_a_file_that_is_no_python_is_left_out_with_a_warning(tmp_path: Path) -> None:
    files = write(tmp_path, bad="print 'two'\n", good='def f(): "doc"\n')
    with pytest.warns(UserWarning, match=r"left out of the corpus: .*bad\.py"):
        found = list(stdlib.docstrings(files))
    assert found == [Text(prompt="def f():\n", completion="doc")]


def test_the_declared_encoding_of_a_file_is_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(b'# coding: latin-1\ndef f(): "caf\xe9"\n')
    assert [text.completion for text in stdlib.docstrings([path])] == ["café"]


def test_the_stamp_is_the_same_while_nothing_changes(tmp_path: Path) -> None:
    files = write(tmp_path, a="x = 1\n", b="y = 2\n")
    assert stdlib.stamp(tmp_path, files) == stdlib.stamp(tmp_path, stdlib.sources(tmp_path))


def test_the_stamp_notices_a_file_that_came_or_went(tmp_path: Path) -> None:
    one = stdlib.stamp(tmp_path, write(tmp_path, a="x = 1\n"))
    two = stdlib.stamp(tmp_path, write(tmp_path, b="y = 2\n"))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({one, two, stdlib.stamp(tmp_path, stdlib.sources(tmp_path))}) == 3


def test_the_stamp_notices_an_edit_that_kept_size_and_modification_time(tmp_path: Path) -> None:
    files = write(tmp_path, a="x = 1\n")
    before, times = stdlib.stamp(tmp_path, files), files[0].stat()
    while files[0].stat().st_ctime_ns == times.st_ctime_ns:
        files[0].write_text("x = 2\n")
        os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files[0].stat().st_mtime_ns == times.st_mtime_ns
    assert stdlib.stamp(tmp_path, files) != before


def test_topics_are_whole_texts_by_name(tmp_path: Path) -> None:
    path = tmp_path / "topics.py"
    path.write_text("# generated\ntopics = {'b': 'text of b', 'a': 'text' ' of a'}\n")
    assert list(stdlib.topics(path)) == [
        Text(prompt="", completion="text of a"),
        Text(prompt="", completion="text of b"),
    ]


def test_the_running_librarys_own_docstrings_are_what_inspect_reports() -> None:
    folder = stdlib.library()
    found = {
        (text.prompt, text.completion)
        for text in stdlib.docstrings([folder / "json/__init__.py", folder / "asyncio/queues.py"])
    }
    dumps = [c for prompt, c in found if prompt.startswith("def dumps(obj, *, skipkeys=False, ")]
    assert dumps == [inspect.getdoc(json.dumps)]
    assert ("async def join(self):\n", inspect.getdoc(asyncio.Queue.join)) in found


def test_the_library_is_found_from_within_a_virtual_environment() -> None:
    files = stdlib.sources(stdlib.library())
    assert stdlib.library() / "argparse.py" in files
    assert not any("site-packages" in path.parts for path in files)
