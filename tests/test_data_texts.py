"""Tests for runner/data/texts.py and runner/data/tokenizer.py."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from runner.data.texts import Text, collect, side
from runner.data.tokenizer import ByteTokenizer, exact_ids, id_type


def text(completion: str, prompt: str = "") -> Text:
    return Text(prompt=prompt, completion=completion)


def test_rows_that_cannot_be_used_are_counted_by_reason() -> None:
    rows = [
        text("one", "p"),
        text(""),
        text(" \n"),
        text("one", "p"),
        text("one", "q"),
        text("\ud800"),
        text("one", "p"),
    ]
    found = collect(rows)
    assert found.rows == (text("one", "p"), text("one", "q"))
    assert found.dropped == {"empty": 2, "duplicates": 2, "not_utf8": 1}


def test_the_digest_tells_prompt_from_completion_and_sees_the_order() -> None:
    digests = {
        collect(rows).digest
        for rows in (
            [text("c", "ab")],
            [text("bc", "a")],
            [text("abc")],
            [text("abc"), text("d")],
            [text("d"), text("abc")],
        )
    }
    assert len(digests) == 5


def test_the_side_is_decided_by_the_hash_of_the_whole_content() -> None:
    """The published SHA-256 of `abc` starts with ba7816bf: 0.7284 of the range."""
    for prompt, completion in (("", "abc"), ("a", "bc"), ("ab", "c")):
        assert side(prompt, completion, eval_share=0.7285) == "eval"
        assert side(prompt, completion, eval_share=0.7283) == "train"


def test_about_the_given_share_is_held_out() -> None:
    draw = random.Random(0)
    sides = [side("", str(draw.random()), eval_share=0.05) for _ in range(20_000)]
    deviation = math.sqrt(20_000 * 0.05 * 0.95)
    assert abs(sides.count("eval") - 1000) < 4 * deviation


def test_a_larger_share_only_moves_texts_into_evaluation() -> None:
    texts = [str(i) for i in range(500)]
    few = {t for t in texts if side("", t, eval_share=0.1) == "eval"}
    more = {t for t in texts if side("", t, eval_share=0.3) == "eval"}
    assert few < more


def test_bytes_are_the_ids_of_the_byte_tokenizer() -> None:
    found = ByteTokenizer().encode(["aé\0", ""])
    assert [ids.tolist() for ids in found] == [[97, 195, 169, 0], []]


def test_padding_and_end_of_text_are_two_ids_that_no_text_has() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab) == (256, 257, 258)


@pytest.mark.parametrize(
    ("vocab", "name"),
    [
        (258, "uint16"),
        (65_536, "uint16"),
        (65_537, "int32"),
        (2**31, "int32"),
        (2**31 + 1, "int64"),
    ],
)
def test_the_stored_type_holds_the_largest_id(vocab: int, name: str) -> None:
    """Case C49."""
    assert id_type(vocab).name == name
    assert exact_ids(np.array([vocab - 1]), vocab).tolist() == [vocab - 1]


@pytest.mark.parametrize("ids", [[0, 258], [-1, 3]])
def test_an_id_outside_the_vocabulary_is_refused_not_wrapped(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"allowed: 0 to 257 \(vocab 258\)"):
        exact_ids(np.array(ids), 258)
