"""Tests for ../runner/measure/shortage.py, ../runner/units.py and `memory_limit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.compose import command_of
from runner.door import parser
from runner.measure.probe import probe
from runner.measure.shortage import account_of_a_part
from runner.memory.loss import Full
from runner.records import RunRecord
from runner.running import run
from runner.units import bytes_of
from tests.support import examples, padded, tiny_gpt, training_of
from tests.test_same_setup import JOB

CORPUS_JOB = [word for word in JOB if "allow" not in word]


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5KiB", 1536), ("512 MiB", 2**29), ("1000", 1000), ("1e9", 10**9)],
)
def test_sizes_mean_powers_of_1024(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["24GB", "24G", "-1GiB", "much", "", "1GiB2"])
def test_a_size_with_two_meanings_or_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        bytes_of(text)


def test_a_sweep_goes_on_after_a_job_that_memory_does_not_hold(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", f"cache='{corpora}'", *CORPUS_JOB, "model.vocab=2048", "memory_limit=40MiB"]
    words += ["memory/loss=full,chunked", "batch=64", "plan.predict=true"]
    command = command_of(parser().parse_args(words), tmp_path)
    assert run(command, tmp_path, words) == 1
    full, chunked = (RunRecord.read(folder) for folder in sorted(tmp_path.glob("runs/*/*/[01]")))
    assert full is not None and chunked is not None
    assert (full.status, chunked.status) == ("oom", "ok")
    assert "memory_limit=40MiB" in full.message and "log_softmax" in full.message
    assert "predicted to fit with" in full.message
    # the cheapest first: another accumulation computes nothing again, chunks do
    assert 0 < full.message.index("accum=2 (work x 1.00)") < full.message.index("loss=chunked")
    assert full.memory["peak_bytes"] > 40 * 2**20 >= chunked.memory["peak_bytes"]
    assert "step_s_median" not in full.summary


class Small(Full):
    """Refuses more tokens than a small device would hold."""

    def loss_sum(self, hidden: Tensor, *more: Any) -> Tensor:
        if hidden.shape[0] > 3:
            raise torch.OutOfMemoryError("planted")
        return super().loss_sum(hidden, *more)


def test_the_account_of_what_did_not_fit_is_scaled_from_the_part_that_fits() -> None:
    micros = padded(examples(*[40] * 12), 12)
    whole, _ = probe(training_of(tiny_gpt()), [micros])
    found = account_of_a_part(training_of(tiny_gpt(), loss=Small()), [micros])
    assert whole is not None and found is not None
    assert found.scaled == 4 and whole.scaled == 1
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    kept = "saved_activations"
    assert found.at_peak[kept] == pytest.approx(whole.at_peak[kept], rel=0.01)
    assert found.at_peak["parameters"] == whole.at_peak["parameters"]
    assert found.largest[0].bytes == whole.largest[0].bytes


def test_where_not_even_a_row_fits_there_is_no_account() -> None:
    class Nothing(Full):
        def loss_sum(self, hidden: Tensor, *more: Any) -> Tensor:
            raise torch.OutOfMemoryError("planted")

    micros = padded(examples(9, 9), 2)
    assert account_of_a_part(training_of(tiny_gpt(), loss=Nothing()), [micros]) is None
