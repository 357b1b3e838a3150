"""Tests for runner/data/cache.py: a corpus in the cache is whole and unchanged, or rebuilt."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from runner.data import cache


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
