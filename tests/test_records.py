"""Tests of runner/records.py: what is written is valid JSON and comes back as it was."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from runner.records import (
    EvaluationRecord,
    RunRecord,
    Unreadable,
    evaluations_of,
    follow_journal,
    parse_line,
    read_journal,
    updates_of,
    write_atomically,
)
from runner.records import dumps as strict
from tests.test_accounting import update


def record(**changes: object) -> RunRecord:
    plain = RunRecord(
        status="ok",
        message="",
        command=["python", "-m", "runner"],
        workload_id="w",
        setup_id="s",
        config={"batch": 16},
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("loss", [1.5, math.nan, math.inf, -math.inf, None])
def test_an_update_survives_the_journal_whatever_its_loss(loss: float | None) -> None:
    line = strict(update(loss=loss).to_json())
    assert "NaN" not in line
    assert "Infinity" not in line
    back = parse_line(line)
    assert repr(back.loss) == repr(loss)  # type: ignore
    assert replace(back, loss=1.0) == update(loss=1.0)  # type: ignore


def test_a_nonfinite_loss_is_null_with_a_marker() -> None:
    data = update(loss=math.inf).to_json()
    assert (data["loss"], data["nonfinite"]) == (None, "+inf")


def test_the_journal_s_object_has_the_contract_s_names() -> None:
    data = json.loads(strict(update().to_json()))
    assert set(data) >= {"update", "attempt", "applied", "skipped_reason", "loss", "nonfinite"}
    assert set(data["tokens"]) == {"useful", "nonpad", "slots"}
    phases = {"data", "transfer", "forward", "backward", "optimizer", "other", "communication"}
    assert set(data["time"]) == phases | {"total"}
    assert data["memory"] is None


def test_a_line_that_was_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    evaluation = EvaluationRecord(update=1, eval_loss=2.0, eval_tokens=7)
    whole = [strict(update(n).to_json()) for n in (1, 2)] + [strict(evaluation.to_json())]
    path.write_text("\n".join(whole) + "\n" + whole[0][:20])
    lines = read_journal(path)
    assert [u.update for u in updates_of(lines)] == [1, 2]
    assert evaluations_of(lines) == [evaluation]


def test_following_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(strict(update(1).to_json()) + "\n")
    ((_, offset),) = follow_journal(path, 0)
    with path.open("a") as file:
        file.write(strict(update(2).to_json()) + "\n")
    assert [line.update for line, _ in follow_journal(path, offset)] == [2]


def test_a_record_comes_back_equal_and_only_known_statuses_are_taken(tmp_path: Path) -> None:
    record(summary={"eval_loss": 1.0}).write(tmp_path)
    assert RunRecord.read(tmp_path) == record(summary={"eval_loss": 1.0})
    assert RunRecord.read(tmp_path / "none") is None
    with pytest.raises(ValueError, match="status 'fine'"):
        record(status="fine")


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    record().write(tmp_path)
    data = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**data, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99"):
        RunRecord.read(tmp_path)


@pytest.mark.parametrize("text", ["", '{"status": "ok", "mess', "[]", '{"schema_version": 1}', "7"])
def test_a_damaged_record_is_named_with_its_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(Unreadable, match=re.escape(f"{tmp_path}/record.json: ")):
        RunRecord.read(tmp_path)


@pytest.mark.parametrize("broken", ["{", "7", "{}", '{"update": 2}', "\0\0", '{"eval_loss": 1}'])
def test_a_damaged_line_within_a_journal_is_named_by_its_number(
    broken: str, tmp_path: Path
) -> None:
    good = strict(update(1).to_json())
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{good}\n{good}\n{broken}\n{good}\n")
    with pytest.raises(Unreadable, match=r"journal\.jsonl: line 3 is no journal line"):
        read_journal(path)


def test_a_number_that_json_cannot_hold_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        record(summary={"eval_loss": math.nan}).write(tmp_path)
    assert not (tmp_path / "record.json").exists()


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write_atomically(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_threads_that_write_one_file_at_once_do_not_take_each_other_s_half(tmp_path: Path) -> None:
    texts = [str(number) * 4096 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_atomically(tmp_path / "file", text), texts * 50))
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
