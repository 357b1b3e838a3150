"""Tests for the readers of files: jsonl, json_array, csv_rows, parquet, plain, lines, records."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.assemble import assemble, choose_device, load_corpus
from runner.checks import build_parts, job_id, workload_id
from runner.compose import command_of
from runner.contracts import UserError
from runner.data.csv_rows import Csv
from runner.data.files import Files
from runner.data.json_array import Json
from runner.data.jsonl import Jsonl
from runner.data.lines import Block, blocks, line_number, lines
from runner.data.parquet import Parquet
from runner.data.plain import PlainText
from runner.data.records import REASONS
from runner.data.texts import Chat, Text
from runner.door import parser
from runner.step import measured_update
from tests.filed import contents, jsonl, refusal, rows, texts, write
from tests.support import Quiet

# --- lines and their ends ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
        (b'{"text": "a"}\r{"text": "b"}\r', ["a", "b"]),
        (b'{"text": "a"}\n\n  \n{"text": "b"}', ["a", "b"]),
        (
            '{"text": "a\u2028b"}\n{"text": "c\u0085\u2029d"}\n'.encode(),
            ["a\u2028b", "c\u0085\u2029d"],
        ),
        (b'{"text": "a\\u2028b"}\n{"text": "\\r\\n"}x', None),
    ],
)
def test_json_lines_end_where_lines_end_and_nowhere_else(
    content: bytes, expected: list[str] | None, tmp_path: Path
) -> None:
    """Case C43: 2 rows each, strings as `json.loads` has them."""
    part = Jsonl(files=str(write(tmp_path, "x.jsonl", content)))
    if expected is None:
        assert "line 2: cannot be parsed" in refusal(part)
    else:
        assert contents(part) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\u2029b\nc\u2028d\ne\u0085f\x0cg\n", ["a\u2029b", "c\u2028d", "e\u0085f\x0cg"]),
        ("a\rb\r\nc\n", ["a", "b", "c"]),
        ("\ufeffa\n\n \nb", ["a", "b"]),
    ],
)
def test_lines_of_text_end_where_lines_end_and_nowhere_else(
    content: str, expected: list[str], tmp_path: Path
) -> None:
    """Case C43: 3 rows each, separators that are content left in place."""
    assert contents(PlainText(files=str(write(tmp_path, "x.txt", content)))) == expected


def test_a_whole_file_can_be_a_row(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "one\n\ntwo\n")
    write(tmp_path, "b.txt", "three")
    assert contents(PlainText(files=str(tmp_path), rows="file")) == ["one\n\ntwo", "three"]


@given(
    pieces=st.lists(st.sampled_from(["\n", "\r", "\r\n", "a", "bcd", "é", "\u2028"]), max_size=40),
    size=st.integers(1, 9),
)
def test_blocks_of_any_size_hold_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], size: int
) -> None:
    text = "".join(pieces)
    path = write(tmp_path_factory.mktemp("blocks"), "x", text)
    expected = io.StringIO(text, newline=None).read().split("\n")
    expected = expected[:-1] if expected[-1] == "" else expected
    numbered = [
        (line_number(block, number), line)
        for block in blocks(path, size)
        for number, line in enumerate(lines(block))
    ]
    assert numbered == list(enumerate(expected, 1))


def test_a_block_within_a_long_line_reads_no_further_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "x", b"y" * 10_000 + b"\nz\n")
    first, *inner, last = blocks(path, 1000)
    assert lines(first) == ["y" * 10_000]
    monkeypatch.setattr("runner.data.lines.PIECE", None)  # reading on would read the whole file
    read: list[int] = []
    monkeypatch.setattr("runner.data.lines.first_end", lambda d: (read.append(len(d)), -1)[1])
    assert [lines(block) for block in inner] == [[]] * 9
    assert read == [1000] * 9
    monkeypatch.undo()
    assert lines(last) == ["z"]


def test_a_line_is_whole_in_however_many_pieces_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.data.lines.PIECE", 2)
    path = write(tmp_path, "x", "abcdefghi\r\njk\nlm")
    found = [lines(block) for block in blocks(path, 3)]
    assert found == [["abcdefghi"], [], [], ["jk"], ["lm"], []]


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    """Case C43: Latin-1."""
    path = write(tmp_path, "x.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    said = refusal(Jsonl(files=str(path)))
    assert f"{path} line 2: the line is not valid UTF-8" in said
    assert "byte 0xe9 at byte offset 30" in said
    assert contents(Jsonl(files=str(path), on_bad="skip")) == ["fine"]
    assert rows(Jsonl(files=str(path), on_bad="skip"))[1] == {"not_utf8": 1}
    for name, part in (("t.txt", PlainText), ("t.csv", Csv)):
        other = write(tmp_path, name, b"text\ncaf\xe9\n")
        assert f"{other} line 2" in refusal(part(files=str(other)))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\x1f\x8b\x08\x00\xff\xff", "compressed"), ("{}".encode("utf-16"), "UTF-16")],
)
def test_what_a_binary_file_may_be_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(Jsonl(files=str(write(tmp_path, "x.jsonl", content))))


# --- records and their fields -----------------------------------------------------------------

FAULTY = [
    ('{"text": ', "broken", "cannot be parsed"),
    ('{"text": "a"', "broken", "cannot be parsed"),
    ('["a"]', "not_an_object", "is not an object with fields, but of type list"),
    ('"a"', "not_an_object", "of type str"),
    ('{"text": "a", "text": "b"}', "repeated_field", "names a field twice: 'text'"),
    ('{"txt": "b", "id": 1}', "missing", "no field 'text'; its fields: 'txt', 'id'"),
    ("{}", "missing", "no field 'text'; its fields: none"),
    ('{"text": null}', "null", "field 'text' is null"),
    ('{"text": 7}', "wrong_type", "field 'text' is of type int, not text"),
    ('{"text": true}', "wrong_type", "of type bool"),
    ('{"text": ["a"]}', "wrong_type", "of type list"),
    ('{"text": ""}', "empty", "field 'text' holds nothing but white space"),
    ('{"text": " \\t\\n"}', "empty", "holds nothing but white space"),
    ('{"text": "\\ud800"}', "not_utf8", "field 'text' is not valid UTF-8"),
    ("[" * 100_000, "broken", "cannot be parsed"),
]


@pytest.mark.parametrize(("line", "reason", "detail"), FAULTY)
def test_a_faulty_line_is_named_or_counted(
    line: str, reason: str, detail: str, tmp_path: Path
) -> None:
    """Cases C44 and C46: file, 1-based line and field; or two rows and a count."""
    path = write(tmp_path, "x.jsonl", f'{{"text": "a"}}\n{line}\n{{"text": "c"}}\n')
    said = refusal(Jsonl(files=str(path)))
    assert said.startswith(f"{path} line 2: ")
    assert detail in said
    kept, dropped = rows(Jsonl(files=str(path), on_bad="skip"))
    assert [row.content for row in kept] == ["a", "c"]
    assert dropped == {reason: 1}


def test_an_array_given_as_lines_is_told_where_it_belongs(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", json.dumps([{"text": "a"}], indent=1))
    assert "line 1: cannot be parsed" in refusal(Jsonl(files=str(path)))
    assert "data=json reads an array of objects" in refusal(Jsonl(files=str(path)))


def test_every_reason_has_a_case() -> None:
    assert {reason for _, reason, _ in FAULTY} | {"no_assistant"} == set(REASONS)


def test_a_truncated_last_line_is_named_after_blank_ones(tmp_path: Path) -> None:
    """Case C46."""
    path = write(tmp_path, "x.jsonl", '{"text": "a"}\n\n\n{"text": "b')
    assert f"{path} line 4" in refusal(Jsonl(files=str(path)))


def test_a_line_far_into_a_large_file_has_its_right_number(tmp_path: Path) -> None:
    line = jsonl({"text": "x" * 99})
    count = 2**21 // len(line)
    path = write(tmp_path, "x.jsonl", line * count + "{\n" + line)
    assert f"{path} line {count + 1}: " in refusal(Jsonl(files=str(path)))


def test_a_shard_that_is_null_throughout_spoils_no_other(tmp_path: Path) -> None:
    """Case C44: one row, and never the text `None`."""
    write(tmp_path, "1.jsonl", jsonl({"text": None}))
    write(tmp_path, "2.jsonl", jsonl({"text": "x"}))
    assert rows(Jsonl(files=str(tmp_path), on_bad="skip")) == (
        [Text(prompt="", completion="x")],
        {"null": 1},
    )


def test_prompt_and_completion_come_from_the_fields_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", jsonl({"q": "2+2=", "a": "4", "text": "no"}))
    part = Jsonl(files=str(path), prompt="q", completion="a")
    assert rows(part)[0] == [Text(prompt="2+2=", completion="4")]
    empty = write(tmp_path, "y.jsonl", jsonl({"q": "", "a": "4"}, {"q": "x", "a": " "}))
    part = Jsonl(files=str(empty), prompt="q", completion="a")
    assert "line 2: field 'a' holds nothing" in refusal(part)


@pytest.mark.parametrize(
    "named",
    [{"prompt": "q"}, {"completion": "a"}, {"text": "t", "messages": "m"}],
)
def test_fields_that_do_not_go_together_are_refused(named: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="allowed: text alone, prompt with completion"):
        Jsonl(files="x", **named)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "hi"}], "no_assistant"),
        ([{"role": "assistant", "content": " "}], "empty"),
        ([{"role": "assistant"}], "missing"),
        ([{"role": "assistant", "content": None}], "null"),
        ([{"role": "assistant", "content": ["x"]}], "wrong_type"),
        (["hi"], "wrong_type"),
        ({"role": "assistant", "content": "x"}, "wrong_type"),
        (None, "null"),
    ],
)
def test_a_faulty_chat_is_named_or_counted(messages: Any, reason: str, tmp_path: Path) -> None:
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path, "x.jsonl", jsonl({"m": good}, {"m": messages}))
    assert f"{path} line 2: field 'm'" in refusal(Jsonl(files=str(path), messages="m"))
    kept, dropped = rows(Jsonl(files=str(path), messages="m", on_bad="skip"))
    assert [isinstance(row, Chat) for row in kept] == [True]
    assert dropped == {reason: 1}


# --- other formats ----------------------------------------------------------------------------


def test_values_of_a_table_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    """Types are given, never guessed: pandas would make 7, NaN and True of these."""
    path = write(tmp_path, "x.csv", "\ufeffid,text\r\n1,007\r\n2,NA\r\n\r\n3,True\r\n")
    assert contents(Csv(files=str(path))) == ["007", "NA", "True"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)))
def test_a_table_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[str]
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerows([["n", "text"], *([str(i), value] for i, value in enumerate(values))])
    path = write(tmp_path_factory.mktemp("csv"), "x.csv", out.getvalue())
    expected = [value for value in values if value.strip()]
    assert contents(Csv(files=str(path), on_bad="skip")) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('id,text\n1,"two\nlines"\n2\n', "line 4: cannot be parsed: 1 values under a header of 2"),
        ("id,text\n1,a,b\n", "line 2: cannot be parsed: 3 values"),
        ('id,text\n1,"a"b\n', "line 2: cannot be parsed"),
        ('id,text\n1,"a\n', "line 2: cannot be parsed"),
        ("text,text\na,b\n", "line 1: the header has 'text' twice"),
        ("id,words\n1,a\n", "line 2: no field 'text'; its fields: 'id', 'words'"),
        ("id,text\n1,\n", "line 2: field 'text' holds nothing"),
        ("id,text\n1,a\n".encode("utf-16"), "line 1: the header is not valid UTF-8"),
        ("id,text\n1,a\n".encode("utf-16"), "it looks like UTF-16"),
        ("pr\xe9nom,text\n1,a\n".encode("latin1"), "byte 0xe9 at byte offset 2"),
        (gzip.compress(b"id,text\n1,a\n", mtime=0), "it is compressed: decompress it first"),
    ],
)
def test_a_faulty_row_of_a_table_is_named(content: str | bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(Csv(files=str(write(tmp_path, "x.csv", content))))


@pytest.mark.parametrize(("word", "letter"), [("tab", "\t"), (r"\t", "\t"), ('";"', ";")])
def test_a_delimiter_can_be_typed(word: str, letter: str, tmp_path: Path) -> None:
    path = write(tmp_path, "x.csv", f"id{letter}text\n1{letter}a, b\n")
    words = ["data=csv", f"data.files={path}", f"data.delimiter={word}"]
    (plan,) = command_of(parser().parse_args(words), tmp_path).jobs
    assert contents(build_parts(plan.config).data) == ["a, b"]


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n"])
def test_what_cannot_delimit_is_refused(delimiter: str) -> None:
    with pytest.raises(ValueError, match="delimiter: given"):
        Csv(files="x", delimiter=delimiter)


def test_a_field_longer_than_the_csv_module_allows_is_read(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    long = "x" * (before + 1)
    assert contents(Csv(files=str(write(tmp_path, "x.csv", f"text\n{long}\n")))) == [long]
    assert csv.field_size_limit() == before


def test_an_array_of_objects_is_read_with_the_lines_of_its_elements(tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": "b\u2028"}, {"text": None}]
    path = write(tmp_path, "x.json", "\ufeff" + json.dumps(records, indent=1))
    assert f"{path} line 8: field 'text' is null" in refusal(Json(files=str(path)))
    assert contents(Json(files=str(path), on_bad="skip")) == ["a", "b\u2028"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', "data=jsonl reads lines"),
        ('[{"text": "a"}\n{"text": "b"}]', "line 2: cannot be parsed: ',' or ']' is missing"),
        ('[{"text": "a"},\n{"text": ]', "line 2: cannot be parsed"),
        ('[{"text": "a"},\n', "line 2: cannot be parsed"),
        ('[{"text": "a"}] x', "something follows the array"),
        ('[\n"a"]', "line 2: is not an object"),
        ('[{"text": "a",\n"text": "b"}]', "line 1: names a field twice"),
    ],
)
def test_a_faulty_array_is_named(content: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(Json(files=str(write(tmp_path, "x.json", content))))


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def test_rows_of_parquet_are_numbered_across_their_groups(tmp_path: Path) -> None:
    values = ["a", "b", "c", None, "e"]
    path = parquet(tmp_path / "x.parquet", {"id": [1] * 5, "text": values}, row_group_size=2)
    assert f"{path} row 4: field 'text' is null" in refusal(Parquet(files=path))
    assert rows(Parquet(files=path, on_bad="skip"))[1] == {"null": 1}
    assert contents(Parquet(files=path, on_bad="skip")) == ["a", "b", "c", "e"]


def test_columns_of_parquet_must_be_there_and_be_text(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", {"id": [7], "words": ["a"]})
    assert "row 1: no field 'text'; its fields: 'id', 'words'" in refusal(Parquet(files=path))
    assert "field 'id' is of type int, not text" in refusal(Parquet(files=path, text="id"))
    dictionary = pa.array(["x", "y"]).dictionary_encode()
    path = parquet(tmp_path / "y.parquet", {"text": dictionary})
    assert contents(Parquet(files=path)) == ["x", "y"]


def test_a_chat_in_parquet_is_a_list_of_structs(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = parquet(tmp_path / "x.parquet", {"messages": [turns]})
    (row,) = rows(Parquet(files=path, messages="messages"))[0]
    assert row == Chat(messages=(("user", "q"), ("assistant", "a")))  # type: ignore[arg-type]


def test_a_missing_column_of_parquet_is_not_told_to_read_it_as_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", {"words": ["a"]})
    assert "it is a Parquet file" not in refusal(Parquet(files=path))
    said = refusal(Jsonl(files=path))
    assert said.endswith("; it is a Parquet file: data=parquet")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", "PAR1 not really")
    assert f"{path}: no Parquet file" in refusal(Parquet(files=str(path)))


# --- paths ------------------------------------------------------------------------------------


def test_files_folders_globs_and_lists_are_found_in_order_and_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "note.txt"):
        write(tmp_path, name, jsonl({"text": name}))

    def found(files: Any) -> list[str]:
        return [row.content for row in rows(Jsonl(files=files), tmp_path)[0]]

    assert found(".") == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert found("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert found(["b.jsonl", "**/*.jsonl"]) == ["b.jsonl", "a.jsonl", "deep/c.jsonl"]
    assert found(["note.txt", str(tmp_path / "a.jsonl")]) == ["note.txt", "a.jsonl"]


def test_a_file_under_two_names_is_read_once_and_never_held_out_too(tmp_path: Path) -> None:
    real = write(tmp_path, "d/a.jsonl", jsonl({"text": "a"}))
    (tmp_path / "link.jsonl").symlink_to(real)
    (tmp_path / "e").mkdir()
    names = ["link.jsonl", "d", "e/../d/a.jsonl"]
    assert [row.content for row in rows(Jsonl(files=names), tmp_path)[0]] == ["a"]
    leaking = Jsonl(files="d", eval_files="link.jsonl")
    (fault,) = leaking.faults(tmp_path)
    assert (fault.key, fault.given) == (
        "data.eval_files",
        f"{tmp_path}/link.jsonl, which data.files names too",
    )


def test_paths_that_lead_nowhere_are_named_whole_and_all_together(tmp_path: Path) -> None:
    """Case C72: the message shows the absolute path tried."""
    (tmp_path / "folder").mkdir()
    part = Jsonl(files=["none.jsonl", "folder"], eval_files="x/*.jsonl")
    keys = [(fault.key, fault.given) for fault in part.faults(tmp_path)]
    assert keys == [
        ("data.files", f"{tmp_path}/none.jsonl: no such file"),
        ("data.files", f"{tmp_path}/folder: a folder without *.jsonl"),
        ("data.eval_files", f"{tmp_path}/x/*.jsonl: no such file"),
    ]
    assert f"counts from {tmp_path}" in part.faults(tmp_path)[0].next_step


@pytest.mark.parametrize("files", [7, [], "", ["a", 7], None])
def test_files_must_be_paths(files: Any) -> None:
    with pytest.raises(ValueError, match="files: given"):
        Jsonl(files=files)


# --- the corpus -------------------------------------------------------------------------------


def load(part: Files, cache: Path, **changes: Any) -> Any:
    return part.load(**({"seq_len": 64, "cache": str(cache)} | changes))


def test_files_become_a_corpus_and_a_changed_file_another(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", jsonl(*({"text": f"row {i}"} for i in range(40))))
    part = Jsonl(files=str(path), eval_share=0.5)
    first = load(part, tmp_path / "cache")
    assert texts(first) == sorted(f"row {i}" for i in range(40))
    assert first.tokens == sum(example.length for example in first.train)
    assert load(part, tmp_path / "cache").fingerprint == first.fingerprint
    path.write_text(path.read_text().replace('row 7"', 'row X"'))
    assert "row X" in texts(load(part, tmp_path / "cache"))


def test_the_same_content_elsewhere_is_the_same_corpus_and_other_reading_another(
    tmp_path: Path,
) -> None:
    content = jsonl(*({"text": f"row {i}", "b": f"other {i}"} for i in range(40)))
    one, two = (str(write(tmp_path, name, content)) for name in ("1.jsonl", "d/2.jsonl"))

    def fingerprint(**changes: Any) -> str:
        part = Jsonl(**({"files": one, "eval_share": 0.5} | changes))
        return str(load(part, tmp_path / "cache").fingerprint)

    assert fingerprint() == fingerprint(files=two)
    assert len({fingerprint(), fingerprint(text="b"), fingerprint(on_bad="skip")}) == 3


def test_evaluation_files_are_held_out_whole_and_nothing_else_is(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", jsonl(*({"text": f"t{i}"} for i in range(30))))
    write(tmp_path, "eval.jsonl", jsonl(*({"text": f"e{i}"} for i in range(5))))
    part = Jsonl(files=str(tmp_path / "train.jsonl"), eval_files=str(tmp_path / "eval.jsonl"))
    corpus = load(part, tmp_path / "cache")
    assert (len(corpus.train), len(corpus.eval)) == (30, 5)
    both = Jsonl(files=str(tmp_path), eval_files=str(tmp_path / "eval.jsonl"))
    assert both.faults(tmp_path)[0].key == "data.eval_files"


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_a_file_without_a_row_is_refused_with_counts(content: str, tmp_path: Path) -> None:
    """Case C47."""
    part = Jsonl(files=str(write(tmp_path, "x.jsonl", content)))
    with pytest.raises(UserError, match=r"0 rows after dropping \{\}, 0 usable for train"):
        load(part, tmp_path / "cache")


def test_a_chat_is_predicted_where_the_assistant_speaks(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "q"), ("assistant", "aa"), ("user", "r"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    train = write(tmp_path, "t.jsonl", jsonl({"messages": messages}))
    held_out = write(tmp_path, "e.jsonl", jsonl({"messages": messages}))
    part = Jsonl(files=str(train), eval_files=str(held_out), messages="messages")
    (example,) = load(part, tmp_path / "cache").train
    said = [*b"system: s\nuser: q\nassistant: aa", 257, *b"\nuser: r\nassistant: b", 257]
    assert example.ids.tolist() == said
    predicted = [i for i, wanted in enumerate(example.loss) if wanted]
    assert [example.ids.tolist()[i] for i in predicted] == [*b"aa", 257, *b"b", 257]
    assert predicted == [29, 30, 31, 52, 53]  # 10 + 8 + 11 bytes, 2, end, 1 + 8 + 11


def test_a_block_says_where_it_is() -> None:
    assert Jsonl(files="x").place(Block(Path(__file__), 0, 10), 0) == 1


# --- as a job ---------------------------------------------------------------------------------


def test_a_missing_file_is_reported_before_anything_starts(tmp_path: Path) -> None:
    words = ["data=jsonl", "data.files=none.jsonl", "batch=0"]
    with pytest.raises(UserError) as raised:
        command_of(parser().parse_args(words), tmp_path)
    found = {fault.key: fault.given for fault in raised.value.faults}
    assert found["data.files"] == f"{tmp_path}/none.jsonl: no such file"
    assert "batch" in found
    assert list(tmp_path.iterdir()) == []


def config(tmp_path: Path, *words: str) -> dict[str, Any]:
    write(tmp_path, "t.jsonl", jsonl(*({"text": f"t{i}"} for i in range(3))))
    write(tmp_path, "e.jsonl", jsonl({"text": "e"}))
    files = [f"data.files={tmp_path}/t.jsonl", f"data.eval_files={tmp_path}/e.jsonl"]
    words = ("data=jsonl", *files, f"cache={tmp_path}/cache", "model.vocab=272", *words)
    return dict(command_of(parser().parse_args(words), tmp_path).jobs[0].config)


def test_fewer_rows_than_an_update_asks_for_are_refused_with_counts(tmp_path: Path) -> None:
    """Case C47: 3 rows of 2 bytes and an end, and 4 are asked for."""
    asked = config(tmp_path, "batch=4")
    with pytest.raises(UserError) as raised:
        load_corpus(asked, build_parts(asked))
    (fault,) = raised.value.faults
    assert fault.given == (
        "4 examples per update; there are 3 to train on, of 9 tokens, and 1 held out"
    )
    for words in (["batch=3"], ["batch=4", "data.on_bad=skip"]):
        fine = config(tmp_path, *words)
        assert len(load_corpus(fine, build_parts(fine)).train) == 3


def test_where_files_lie_is_no_part_of_the_workload_but_their_stamp_of_the_job(
    tmp_path: Path,
) -> None:
    one = config(tmp_path)
    write(tmp_path, "copy.jsonl", (tmp_path / "t.jsonl").read_bytes())
    two = config(tmp_path, f"data.files={tmp_path}/copy.jsonl")
    assert workload_id(one, "corpus") == workload_id(two, "corpus")
    assert workload_id(config(tmp_path, "data.text=b"), "corpus") != workload_id(one, "corpus")
    before = job_id(one, tmp_path)
    assert job_id(one, tmp_path) == before
    write(tmp_path, "t.jsonl", jsonl({"text": "other"}))
    assert job_id(one, tmp_path) != before


COMMAND = re.compile(r"^python -m runner (data=.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_the_commands_of_the_manual_compose_where_the_files_are(page: str, tmp_path: Path) -> None:
    for name in (
        "my_folder/x.jsonl",
        "pairs.jsonl",
        "chats.jsonl",
        "a.csv",
        "b/c.csv",
        "held_out.csv",
    ):
        write(tmp_path, name, jsonl({"body": "a"}))
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
    commands = COMMAND.findall(text.replace("/corpora/", f"{tmp_path}/my_folder/"))
    assert commands
    for words in map(shlex.split, commands):
        (plan,) = command_of(parser().parse_args(words), tmp_path).jobs
        assert plan.config["data"]


def test_a_new_users_folder_trains_from_the_command_of_the_manual(tmp_path: Path) -> None:
    rows = [{"body": f"the {i}th row of my own"} for i in range(400)]
    write(tmp_path, "my_folder/mine.jsonl", jsonl(*rows))
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    words = shlex.split(COMMAND.findall(readme)[0])
    words[1] = f"data.files={tmp_path}/my_folder"
    words += ["updates=3", f"cache={tmp_path}/cache"]
    (plan,) = command_of(parser().parse_args(words), tmp_path).jobs
    parts = build_parts(plan.config)
    device = choose_device("cpu")
    job = assemble(plan.config, parts, device, load_corpus(plan.config, parts))
    outcome = measured_update(job.training, lambda: next(job.feed.draws()), Quiet())
    assert outcome.figures is not None
    assert outcome.figures[0] == pytest.approx(5.6, abs=0.3)  # ln 272 = 5.6
    assert outcome.counts.useful == sum(length - 1 for length in outcome.lengths)
