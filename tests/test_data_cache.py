"""Tests for runner/data/cache.py: a corpus in the cache is whole and unchanged, or rebuilt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from runner.data import cache

ROOT = Path(__file__).parents[1]


def write_two(folder: Path) -> dict[str, Any]:
    (folder / "train").mkdir()
    (folder / "train" / "data").write_bytes(b"0123456789")
    (folder / "eval").write_bytes(b"ab")
    return {"truncated": 3}


def sealed(tmp_path: Path) -> Path:
    place = tmp_path / "cache" / "corpus"
    cache.build(place, write_two)
    return place


def test_a_built_folder_gives_its_facts_back(tmp_path: Path) -> None:
    place = sealed(tmp_path)
    assert cache.verified(place) == {"truncated": 3}
    assert (place / "train" / "data").read_bytes() == b"0123456789"


def test_a_build_leaves_nothing_beside_its_folder(tmp_path: Path) -> None:
    assert [path.name for path in sealed(tmp_path).parent.iterdir()] == ["corpus"]


def test_a_failed_build_leaves_nothing_at_all(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        write_two(folder)
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        cache.build(tmp_path / "corpus", fail)
    assert list(tmp_path.iterdir()) == []


def truncate(place: Path) -> None:
    (place / "train" / "data").write_bytes(b"01234")


def flip(place: Path) -> None:
    (place / "train" / "data").write_bytes(b"0123456780")


def lose(place: Path) -> None:
    (place / "eval").unlink()


def add(place: Path) -> None:
    (place / "more").write_bytes(b"")


def change_facts(place: Path) -> None:
    found = json.loads((place / cache.MANIFEST).read_text())
    found["facts"]["truncated"] = 4
    (place / cache.MANIFEST).write_text(json.dumps(found))


def cut_manifest(place: Path) -> None:
    text = (place / cache.MANIFEST).read_text()
    (place / cache.MANIFEST).write_text(text[: len(text) // 2])


def replace_manifest(place: Path) -> None:
    (place / cache.MANIFEST).write_text("[]")


def lose_manifest(place: Path) -> None:
    (place / cache.MANIFEST).unlink()


DAMAGES = [truncate, flip, lose, add, change_facts, cut_manifest, replace_manifest, lose_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_any_change_is_noticed_warned_of_and_mended(damage: Any, tmp_path: Path) -> None:
    place = sealed(tmp_path)
    damage(place)
    with pytest.raises(cache.Damaged):
        cache.verified(place)
    with pytest.warns(UserWarning, match="damaged corpus cache .* is rebuilt"):
        assert cache.facts_at(place) is None
    cache.build(place, write_two)
    assert cache.verified(place) == {"truncated": 3}
    assert [path.name for path in place.parent.iterdir()] == ["corpus"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    place = sealed(tmp_path)
    flip(place)
    with pytest.raises(cache.Damaged, match=r"missing, new or changed: train/data$"):
        cache.verified(place)


def test_an_absent_folder_is_no_reason_to_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.facts_at(tmp_path / "absent") is None


def test_a_job_that_finishes_second_keeps_the_first_ones_folder(tmp_path: Path) -> None:
    place = tmp_path / "corpus"

    inodes = []

    def overtaken(folder: Path) -> dict[str, Any]:
        cache.build(place, write_two)
        inodes.append(place.stat().st_ino)
        return write_two(folder)

    cache.build(place, overtaken)
    assert inodes == [place.stat().st_ino]
    assert cache.verified(place) == {"truncated": 3}


def test_a_noted_source_is_remembered_by_its_stamp(tmp_path: Path) -> None:
    cache.remember(tmp_path, "one", "digest of one")
    assert cache.remembered(tmp_path, "one") == "digest of one"
    assert cache.remembered(tmp_path, "two") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"digest": 3}'])
def test_a_note_that_cannot_be_read_is_no_note(text: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(text)
    assert cache.remembered(tmp_path, "one") is None


# --- what a kill or a full disk leaves --------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from runner.data import cache

def write(folder):
    (folder / "half").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)

cache.build(Path(sys.argv[1]) / "corpus", write)
"""


def test_what_a_killed_builder_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "corpus" / "half").exists()
    cache.build(tmp_path / "corpus", write_two)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_the_folder_of_a_builder_at_work_is_left_alone(tmp_path: Path) -> None:
    with cache.building(tmp_path) as made:
        (made / "half").write_bytes(b"x")
        cache.build(tmp_path / "corpus", write_two)
        assert (made / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_folder_without_a_lock_is_removed_only_when_it_is_old(tmp_path: Path) -> None:
    made = tmp_path / f"{cache.BUILDING}x"
    made.mkdir()
    cache.clear_leftovers(tmp_path)
    assert made.exists()
    old = time.time() - cache.GRACE_S - 1
    os.utime(made, (old, old))
    cache.clear_leftovers(tmp_path)
    assert not made.exists()


def test_a_large_file_is_read_again_only_after_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = sealed(tmp_path)
    read: list[str] = []
    digest = cache.file_digest
    monkeypatch.setattr(
        cache, "file_digest", lambda path: (read.append(path.name), digest(path))[1]
    )
    cache.verified(place)
    assert sorted(read) == ["data", "eval"]
    monkeypatch.setattr(cache, "LARGE", 5)
    read.clear()
    cache.verified(place)
    assert read == ["eval"]
    times = (place / "train" / "data").stat()
    (place / "train" / "data").write_bytes(b"0123456780")
    os.utime(place / "train" / "data", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(cache.Damaged, match="changed: train/data"):
        cache.verified(place)
