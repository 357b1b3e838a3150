"""Tests of runner/journal.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.journal import INTERVAL_S, Journal
from runner.records import read_journal
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
