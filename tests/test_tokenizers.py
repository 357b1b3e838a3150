"""Tests for the tokenizers: bpe.py, hub_tokenizer.py, fast_tokenizer.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from runner.assemble import load_corpus
from runner.checks import build_parts
from runner.compose import command_of
from runner.contracts import IGNORE, UserError
from runner.data import bpe
from runner.data.bpe import Bpe
from runner.data.examples import encode
from runner.data.fast_tokenizer import FastTokenizer
from runner.data.hub_tokenizer import HubTokenizer, fast
from runner.data.jsonl import Jsonl
from runner.data.padded import Padded
from runner.data.texts import Chat, Message, Text
from runner.door import parser
from tests.filed import jsonl, write

LETTERS = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
CHATML = (
    "{% for m in messages %}<|im|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant {% endif %}"
)


def letters(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters, 26 ids, `z` being end of text unless something else is."""
    backend = Tokenizer(models.WordLevel(LETTERS, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"eos_token": "z"} | settings))


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def made(part: Any, texts: list[str], cache: Path) -> Any:
    return part.make(lambda: texts, source="source", cache=cache)


# --- tokenizers of the ecosystem --------------------------------------------------------------


def test_a_saved_tokenizer_gives_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    path = saved(tmp_path, letters())
    tokenizer = made(HubTokenizer(path=path), [], tmp_path)
    assert [ids.tolist() for ids in tokenizer.encode(["abc", "", "hi"])] == [[0, 1, 2], [], [7, 8]]
    assert (tokenizer.vocab, tokenizer.eos_id, tokenizer.pad_id) == (26, 25, 25)
    assert tokenizer.begin_ids == ()


def test_ends_of_text_are_predicted_where_padding_has_the_same_id(tmp_path: Path) -> None:
    """Case C07: padding is known by length; masking by id would leave 7 targets of 9."""
    tokenizer = fast(letters(pad_token="z"), "")
    assert tokenizer.pad_id == tokenizer.eos_id == 25
    examples = encode([Text(prompt="", completion=t) for t in ("abc", "abcdef")], tokenizer)
    (micro,) = Padded().micro_batches(examples, size=2, pad_id=25, seq_len=64)
    assert micro.counts.useful == (4 - 1) + (7 - 1)
    assert micro.targets.tolist() == [
        [1, 2, 25, IGNORE, IGNORE, IGNORE, IGNORE],
        [1, 2, 3, 4, 5, 25, IGNORE],
    ]


def test_added_tokens_count_even_beyond_a_gap() -> None:
    """Case C49: 26 letters and 2 added tokens."""
    tokenizer = letters()
    tokenizer.add_tokens(["<one>", AddedToken("<two>", special=True)])
    found = fast(tokenizer, "")
    assert found.vocab == 28
    assert [ids.tolist() for ids in found.encode(["a<one>b<two>"])] == [[0, 26, 1, 27]]
    backend = Tokenizer(models.WordLevel({"a": 0, "z": 70_000}, unk_token="a"))
    assert FastTokenizer(backend=backend, eos_id=70_000, pad_id=0).vocab == 70_001


def test_a_tokenizer_that_was_saved_cutting_and_padding_does_neither(tmp_path: Path) -> None:
    tokenizer = letters(pad_token="z")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9, pad_id=25, pad_token="z")
    found = made(HubTokenizer(path=saved(tmp_path, tokenizer)), [], tmp_path)
    assert [ids.tolist() for ids in found.encode(["abcd", "a"])] == [[0, 1, 2, 3], [0]]


def beginning() -> PreTrainedTokenizerFast:
    """Puts `y` before each text and `z` behind, as Llama's do."""
    tokenizer = letters(bos_token="y")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="y $A z", special_tokens=[("y", 24), ("z", 25)]
    )
    return tokenizer


def test_what_the_tokenizer_begins_with_stands_before_each_example_once() -> None:
    tokenizer = fast(beginning(), "")
    assert tokenizer.begin_ids == (24,)
    plain, asked = encode(
        [Text(prompt="", completion="ab"), Text(prompt="a", completion="b")], tokenizer
    )
    assert plain.ids.tolist() == [24, 0, 1, 25]
    assert plain.loss.tolist() == [False, True, True, True]
    assert asked.ids.tolist() == [24, 0, 1, 25]
    assert asked.loss.tolist() == [False, False, True, True]


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(messages=tuple(Message(role, content) for role, content in turns))


def test_a_chat_template_decides_what_is_written_and_the_assistant_is_predicted() -> None:
    tokenizer = fast(letters(chat_template=CHATML), "")
    parts = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")).parts(
        tokenizer
    )
    assert [(part.text, part.loss, part.ends, part.begins) for part in parts] == [
        ("<|im|>user a<|end|><|im|>assistant ", False, False, False),
        ("b<|end|>", True, False, False),
        ("<|im|>user c<|end|><|im|>assistant ", False, False, False),
        ("d<|end|>", True, False, False),
    ]
    assert "".join(part.text for part in parts) == letters(
        chat_template=CHATML
    ).apply_chat_template(
        [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)],
        tokenize=False,
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content if loop.last else '' }};{% endfor %}",
        "{{ raise_exception('no such role') }}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(template: str) -> None:
    tokenizer = fast(letters(chat_template=template), "")
    turns = chat(("user", "ab"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(UserError, match="the chat which begins 'ab'"):
        turns.parts(tokenizer)


@pytest.mark.parametrize("path", ["./none", "/none/of/that", "~/none such"])
def test_a_folder_that_is_not_there_is_named_whole(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        made(HubTokenizer(path=path), [], tmp_path)
    (fault,) = raised.value.faults
    assert fault.given == f"{Path(path).expanduser().absolute()}: no such folder"


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    with pytest.raises(UserError, match="without an end-of-text token"):
        fast(letters(eos_token=None), "")


def test_whatever_encodes_otherwise_has_another_identity() -> None:
    more = letters()
    more.add_tokens(["ab"])
    kinds = [letters(), more, letters(chat_template=CHATML)]
    assert len({fast(one, "").identity for one in kinds}) == 3
    assert fast(letters(), "").identity == fast(letters(), "").identity


# --- BPE --------------------------------------------------------------------------------------

WORDS = ["the cat sat on the mat", "the hat", "that cat"] * 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(Bpe(size=300), WORDS, tmp_path_factory.mktemp("bpe"))


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_survives_the_byte_level_tokenizer(trained: Any, text: str) -> None:
    (ids,) = trained.encode([text])
    assert trained.backend.decode(ids.tolist(), skip_special_tokens=False) == text
    assert trained.eos_id not in ids


def test_frequent_words_become_single_tokens_and_spelled_tokens_stay_text(trained: Any) -> None:
    (ids,) = trained.encode(["the cat"])
    assert len(ids) == 2
    (ids,) = trained.encode(["<|endoftext|><|pad|>"])
    assert not {trained.eos_id, trained.pad_id} & set(ids.tolist())
    assert 258 < trained.vocab <= 300


def test_it_is_trained_once_for_each_corpus_and_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[int] = []
    train = bpe.trained
    monkeypatch.setattr(bpe, "trained", lambda *a: (trainings.append(1), train(*a))[1])
    first = made(Bpe(size=300), WORDS, tmp_path)
    assert made(Bpe(size=300), WORDS, tmp_path).identity == first.identity
    assert len(trainings) == 1
    made(Bpe(size=270), WORDS, tmp_path)
    Bpe(size=300).make(lambda: WORDS, source="other", cache=tmp_path)
    assert len(trainings) == 3
    for path in (tmp_path / "tokenizers").iterdir():
        path.write_text(path.read_text().replace("the", "teh"))
    with pytest.warns(UserWarning, match="damaged tokenizer"):
        assert made(Bpe(size=300), WORDS, tmp_path).identity == first.identity


def test_no_more_than_the_sample_is_read() -> None:
    def texts() -> Iterator[str]:
        yield "abcdef"
        yield "ghij"
        raise AssertionError("read on")

    assert list(bpe.within(texts(), 8)) == ["abcdef", "gh"]


# --- in a corpus ------------------------------------------------------------------------------


def config(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = write(tmp_path, "x.jsonl", jsonl(*({"text": f"the cat {i}"} for i in range(60))))
    base = ("data=jsonl", f"data.files={path}", "data.eval_share=0.3", f"cache={tmp_path}/cache")
    return dict(command_of(parser().parse_args([*base, *words]), tmp_path).jobs[0].config)


def test_ids_beyond_the_models_rows_are_refused_before_training(tmp_path: Path) -> None:
    """Case C49."""
    asked = config(tmp_path, "data/tokenizer=bpe", "data.tokenizer.size=300", "model.vocab=272")
    with pytest.raises(UserError) as raised:
        load_corpus(asked, build_parts(asked))
    (fault,) = raised.value.faults
    assert fault.key == "model.vocab"
    assert fault.given.startswith("272 rows for token ids up to ")
    fine = config(tmp_path, "data/tokenizer=bpe", "data.tokenizer.size=300", "model.vocab=304")
    corpus = load_corpus(fine, build_parts(fine))
    assert corpus.vocab <= 300
    assert {example.ids.dtype for example in corpus.train} == {np.dtype(np.uint16)}


def test_bpe_learns_from_the_training_side_only(tmp_path: Path) -> None:
    train = write(tmp_path, "t.jsonl", jsonl({"text": "common " * 20}, {"text": "x"}))
    held_out = write(tmp_path, "e.jsonl", jsonl({"text": "secret " * 20}))
    part = Jsonl(files=str(train), eval_files=str(held_out), tokenizer=Bpe(size=400))
    corpus = part.load(seq_len=256, cache=str(tmp_path / "cache"))
    assert corpus.train[0].length < 25
    assert corpus.eval[0].length > 100


def test_another_tokenizer_is_another_corpus(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", jsonl(*({"text": f"row {i}"} for i in range(40))))
    found = set()
    for tokenizer in (
        Bpe(size=258),
        Bpe(size=300),
        HubTokenizer(path=saved(tmp_path / "t", letters())),
    ):
        part = Jsonl(files=str(path), eval_share=0.5, tokenizer=tokenizer)
        found.add(part.load(seq_len=64, cache=str(tmp_path / "cache")).fingerprint)
    assert len(found) == 3
