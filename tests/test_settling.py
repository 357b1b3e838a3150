"""Tests of runner/settling.py: `accum=auto`, in one whole job."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.compose import command_of
from runner.door import parser
from runner.records import RunRecord
from runner.running import run
from tests.test_compose import fault
from tests.test_shortage import CORPUS_JOB


def test_auto_takes_the_largest_micro_batch_that_fits_and_records_the_number(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"cache='{corpora}'", *CORPUS_JOB, "model.vocab=2048", "batch=64", "process=inline"]
    words += ["accum=auto", "memory_limit=40MiB", "plan.predict=true"]
    command = command_of(parser().parse_args(words), tmp_path)
    assert run(command, tmp_path, words) == 0
    (folder,) = tmp_path.glob("runs/*/*")
    record = RunRecord.read(folder)
    assert record is not None and record.status == "ok"
    accum = record.config["accum"]
    assert accum in (2, 4, 8)
    assert record.sizes["global_batch"] == 64
    assert record.sizes["micro_batch"] == 64 // accum
    peak = record.memory["peak_bytes"]
    assert peak <= 40 * 2**20
    # what was predicted stands beside what was measured, and in the summary
    assert record.memory["predicted"]["peak_bytes"] == pytest.approx(peak, rel=1e-3)
    assert record.memory["prediction_error"] == pytest.approx(0, abs=1e-3)
    assert record.summary["predicted_peak_bytes"] == record.memory["predicted"]["peak_bytes"]
    assert "not_predicted" not in record.memory


@pytest.mark.parametrize("word", ["accum=most", "accum=1.5"])
def test_another_word_is_refused(word: str) -> None:
    found = fault(word)
    assert (found.key, found.next_step) == ("accum", "accum=auto")


def test_auto_is_refused_for_compiled_code() -> None:
    with pytest.raises(Exception, match="accum: given auto with compile=default"):
        command_of(parser().parse_args(["accum=auto", "compile=default"]), Path("/tmp/nowhere"))
