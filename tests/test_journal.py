"""Tests of runner/journal.py."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from runner import accounting
from runner.forwarding.runs import is_timed
from runner.journal import INTERVAL_S, Journal
from runner.records import EvaluationRecord, UpdateRecord, read_journal
from tests.test_accounting import update


def test_records_are_on_disk_soon_after_they_were_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(update(1))
    limit = time.monotonic() + 10 * INTERVAL_S
    while not read_journal(path) and time.monotonic() < limit:
        time.sleep(0.01)
    assert read_journal(path) == [update(1)]
    journal.close()


def test_closing_writes_the_rest_in_order_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(500):
        journal.append(update(number))
    journal.close()
    journal.close()
    assert [line.update for line in read_journal(path)] == list(range(500))


def test_a_flush_is_complete_when_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(1, 50):
        journal.append(update(number))
        journal.flush()
        assert len(read_journal(path)) == number
    journal.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_record_that_could_not_be_written_is_never_passed_over() -> None:
    journal = Journal(Path("/dev/full"))
    journal.append(update(1))
    limit = time.monotonic() + 10 * INTERVAL_S
    with pytest.raises(OSError, match="No space left"):
        while time.monotonic() < limit:
            time.sleep(0.01)
            journal.append(update(2))
    with pytest.raises(OSError, match="No space left"):
        journal.close()
    journal.close()


@pytest.mark.timing
def test_handing_over_costs_microseconds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    record = update(1)
    costs = []
    for _ in range(200):
        begin = time.perf_counter()
        journal.append(record)
        costs.append(time.perf_counter() - begin)
    journal.close()
    assert sorted(costs)[100] < 2e-5


def test_an_emulated_run_s_journal_tells_no_time_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, timed=False)
    journal.append(update(1))
    journal.append(EvaluationRecord(update=1, eval_loss=2.0, eval_tokens=7))
    journal.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["time"] is None and first["host"] is None
    assert (first["loss"], first["tokens"]) == (1.0, {"useful": 10, "nonpad": 10, "slots": 10})
    assert second == {"update": 1, "eval_loss": 2.0, "nonfinite": None, "eval_tokens": 7}
    back = read_journal(path)[0]
    assert isinstance(back, UpdateRecord)
    assert math.isnan(back.total) and all(math.isnan(s) for s in back.time.values())
    assert not any(is_timed(name) for name in accounting.summary([back]))
