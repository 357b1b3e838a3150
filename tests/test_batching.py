"""Tests for runner/data/padded.py and what the collator counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts import IGNORE, Batching, Counts, Example, MicroBatch
from runner.data.padded import Padded


def example(ids: list[int], *, prompt: int = 0) -> Example:
    return Example(ids=np.array(ids), loss=np.arange(len(ids)) >= prompt)


def batches(
    examples: list[Example], *, size: int, pad_id: int = 0, seq_len: int = 64
) -> list[MicroBatch]:
    return Padded().micro_batches(examples, size=size, pad_id=pad_id, seq_len=seq_len)


def total(micros: list[MicroBatch]) -> Counts:
    return sum((micro.counts for micro in micros), Counts())


def four_documents() -> list[Example]:
    """Documents of 2, 3, 5 and 10 tokens, the first two of the last one masked."""
    return [
        example([11, 12]),
        example([21, 22, 23]),
        example([31, 32, 33, 34, 35]),
        example(list(range(41, 51)), prompt=2),
    ]


def test_padded_is_a_batching_that_keeps_the_loss_curve() -> None:
    assert isinstance(Padded(), Batching)
    assert Padded.numerics == "same"


def test_slots_nonpad_and_useful_tokens_are_three_figures() -> None:
    """Case C38."""
    two = batches(four_documents(), size=2)
    assert [micro.counts for micro in two] == [
        Counts(useful=1 + 2, nonpad=5, slots=2 * 3),
        Counts(useful=4 + 8, nonpad=15, slots=2 * 10),
    ]
    assert total(two) == Counts(useful=15, nonpad=20, slots=26)
    assert total(batches(four_documents(), size=4)) == Counts(useful=15, nonpad=20, slots=40)
    assert total(batches(four_documents(), size=1)) == Counts(useful=15, nonpad=20, slots=20)


def test_every_tensor_of_a_micro_batch_is_as_worked_by_hand() -> None:
    micro = batches([example([5, 6]), example([7, 8, 9, 10], prompt=2)], size=2, pad_id=99)[0]
    assert micro.input_ids.tolist() == [[5, 6, 99, 99], [7, 8, 9, 10]]
    assert micro.targets.tolist() == [
        [6, IGNORE, IGNORE, IGNORE],
        [IGNORE, 9, 10, IGNORE],
    ]
    assert str(micro.input_ids.dtype) == str(micro.targets.dtype) == "torch.int64"
    assert micro.lengths == (2, 4)
    assert micro.examples == 2
    assert micro.positions is micro.segments is micro.weights is micro.sequence is None


@pytest.mark.parametrize(
    ("rows", "length", "targets"),
    [(2, 5, 8), (5, 2, 5), (1, 1, 0)],
)
def test_each_row_has_one_target_fewer_than_tokens(rows: int, length: int, targets: int) -> None:
    """Case C05."""
    micro = batches([example(list(range(1, length + 1))) for _ in range(rows)], size=rows)[0]
    assert micro.counts.useful == targets
    assert int((micro.targets != IGNORE).sum()) == targets


def test_targets_are_shifted_exactly_once() -> None:
    """Case C06: in a text of period 3, a is followed by b; shifted twice it would be c."""
    a, b, c = 97, 98, 99
    micro = batches([example([a, b, c] * 4)], size=1)[0]
    following = {
        (int(now), int(then))
        for now, then in zip(micro.input_ids[0], micro.targets[0], strict=True)
        if then != IGNORE
    }
    assert following == {(a, b), (b, c), (c, a)}


def test_end_of_text_is_a_target_even_where_padding_has_the_same_id() -> None:
    """Case C07: 3 and 6 bytes and their ends; masking by id would leave 7 targets."""
    end = 257
    rows = [example([1, 2, 3, end]), example([1, 2, 3, 4, 5, 6, end])]
    micro = batches(rows, size=2, pad_id=end)[0]
    assert micro.counts.useful == (4 - 1) + (7 - 1) == 9
    assert micro.targets[0].tolist() == [2, 3, end, *[IGNORE] * 4]
    assert micro.targets[1].tolist() == [2, 3, 4, 5, 6, end, IGNORE]
    assert micro.counts.slots - micro.counts.nonpad == 3


def test_the_last_micro_batch_is_shorter_not_dropped() -> None:
    micros = batches([example([n, n]) for n in range(1, 8)], size=4)
    assert [micro.examples for micro in micros] == [4, 3]
    assert [int(row[0]) for micro in micros for row in micro.input_ids] == [1, 2, 3, 4, 5, 6, 7]


def test_a_fully_masked_example_has_no_target_and_does_not_disturb_the_others() -> None:
    micro = batches([example([1, 2, 3], prompt=3), example([4, 5])], size=2)[0]
    assert micro.targets.tolist() == [[IGNORE] * 3, [5, IGNORE, IGNORE]]
    assert micro.counts == Counts(useful=1, nonpad=5, slots=6)


def test_an_example_over_the_length_limit_is_refused_not_cut() -> None:
    with pytest.raises(ValueError, match="an example has 5 tokens; allowed: up to 4"):
        batches([example([1, 2, 3, 4, 5])], size=1, seq_len=4)


def test_narrow_stored_ids_survive_as_int64() -> None:
    ids = np.array([1, 65535, 65535], dtype=np.uint16)
    micro = batches([Example(ids=ids, loss=np.ones(3, dtype=np.bool_))], size=1)[0]
    assert micro.input_ids.tolist() == [[1, 65535, 65535]]
    assert micro.targets.tolist() == [[65535, 65535, IGNORE]]


rows_of_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=12),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_tokens, size=st.integers(1, 5), pad_id=st.integers(0, 300))
def test_each_position_agrees_with_the_definition(
    rows: list[list[tuple[int, bool]]], size: int, pad_id: int
) -> None:
    examples = [
        Example(ids=np.array([i for i, _ in row]), loss=np.array([k for _, k in row], np.bool_))
        for row in rows
    ]
    micros = batches(examples, size=size, pad_id=pad_id)
    seen = [
        (ids, targets)
        for micro in micros
        for ids, targets in zip(micro.input_ids.tolist(), micro.targets.tolist(), strict=True)
    ]
    assert len(seen) == len(rows)
    for row, (ids, targets) in zip(rows, seen, strict=True):
        for place in range(len(ids)):
            assert ids[place] == (row[place][0] if place < len(row) else pad_id)
            predicted = place + 1 < len(row) and row[place + 1][1]
            assert targets[place] == (row[place + 1][0] if predicted else IGNORE)
    assert total(micros).useful == sum(e.useful for e in examples)
    assert total(micros).nonpad == sum(len(row) for row in rows)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    assert total(micros).slots == sum(len(g) * max(len(row) for row in g) for g in groups)
