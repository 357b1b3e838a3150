"""Corpora from files of one's own: found, read record by record, checked, prepared."""

from __future__ import annotations

import glob
import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from runner.contracts import Corpus, Fault, Split, UserError
from runner.data import cache as store
from runner.data import pipeline
from runner.data.feeding import Feeding
from runner.data.lines import Block, broken_byte
from runner.data.prepare import Options, Sided
from runner.data.records import Bad, Fields, Record
from runner.data.tokenizer import ByteTokenizer

ON_BAD = ("error", "skip")
COMPRESSED = "it is compressed: decompress it first"
UTF16 = "it looks like UTF-16: convert it, with iconv -f utf-16 -t utf-8 for example"
STARTS = {
    b"\x1f\x8b": COMPRESSED,
    b"BZh": COMPRESSED,
    b"\xfd7zXZ": COMPRESSED,
    b"\x28\xb5\x2f\xfd": COMPRESSED,
    b"PK\x03\x04": COMPRESSED,
    b"\xff\xfe": UTF16,
    b"\xfe\xff": UTF16,
    b"PAR1": "it is a Parquet file: data=parquet",
}
"""What a file is that is no text, by its first bytes."""


@dataclass(frozen=True, kw_only=True)
class Rows(Feeding):
    """What every source of rows takes.

    tokenizer: turns text into ids. eval_share: expected share of the rows that are held out, by a
        hash of their content. overlong: what happens to a row longer than `seq_len`: `truncate`
        drops its right end, `cut` makes consecutive examples of it.
    on_bad: a row that cannot be used is an `error` that names its place, or is left out (`skip`)
        and counted by reason.
    """

    tokenizer: Any = field(default_factory=ByteTokenizer)
    eval_share: float = 0.05
    overlong: str = "truncate"
    on_bad: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options(seq_len=2)
        if self.on_bad not in ON_BAD:
            raise ValueError(f"on_bad: given {self.on_bad!r}; allowed: {', '.join(ON_BAD)}")

    def options(self, *, seq_len: int) -> Options:
        """What decides the examples; raises ValueError for a field out of range."""
        return Options(
            name=type(self).__name__.lower(),
            seq_len=seq_len,
            eval_share=self.eval_share,
            overlong=self.overlong,
        )


@dataclass(frozen=True, kw_only=True)
class Files(Rows):
    """Files of one format.

    files: a path, a glob, a folder, or a list of them; relative ones count from the launch
        folder. eval_files: files to hold out; the others are then all trained on.
    """

    place_keys: ClassVar[frozenset[str]] = frozenset({"files", "eval_files"})
    suffix: ClassVar[str]
    unit: ClassVar[str] = "line"
    files: Any
    eval_files: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, patterns in (("files", self.files), ("eval_files", self.eval_files or ["-"])):
            if not listed(patterns) or not all(isinstance(p, str) and p for p in listed(patterns)):
                raise ValueError(f"{name}: given {patterns!r}; allowed: a path or a list of paths")

    @property
    def fields(self) -> Fields:
        """The fields that are read of each record."""
        return Fields()

    @abstractmethod
    def blocks(self, path: Path) -> Sequence[Block]:
        """The parts of a file that can be read by themselves, in order."""

    @abstractmethod
    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """The records of a block, each with what `place` needs to name its place."""

    def place(self, block: Block, number: int) -> int:
        """Number in the file, from 1, of the line or row of a record; for messages only."""
        return number

    def found(self, launch: Path) -> dict[Split, list[Path]]:
        """The files by side; raises UserError naming every path that leads to none."""
        sides: dict[Split, Any] = {"train": self.files, "eval": self.eval_files or []}
        keys: dict[Split, str] = {"train": "data.files", "eval": "data.eval_files"}
        faults: list[Fault] = []
        # By where each really is: a file that two names lead to is one file.
        real: dict[Split, dict[Path, Path]] = {"train": {}, "eval": {}}
        for split, patterns in sides.items():
            for pattern in listed(patterns):
                matched = matches(pattern, launch, self.suffix)
                for path in matched:
                    real[split].setdefault(path.resolve(), path)
                if not matched:
                    faults.append(not_found(keys[split], pattern, launch, self.suffix))
        both = [path for place, path in real["eval"].items() if place in real["train"]]
        if both:
            faults.append(held_out_twice(both[0]))
        if faults:
            raise UserError(*faults)
        return {split: list(paths.values()) for split, paths in real.items()}

    def faults(self, launch: Path) -> Sequence[Fault]:
        """What is wrong with the paths, before anything starts."""
        try:
            self.found(launch)
        except UserError as error:
            return error.faults
        return ()

    def stamp(self, launch: Path) -> str:
        """Changes when a file comes, goes or is written; reads no content."""
        return FileSource(self, launch).stamp

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        return pipeline.load_source(
            FileSource(self, Path.cwd()),
            options=self.options(seq_len=seq_len),
            tokenizer=self.tokenizer,
            cache=cache,
            strict=self.on_bad == "error",
        )


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Which fields of a record are read; see `runner.data.records.Fields`."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None

    @property
    def fields(self) -> Fields:
        """The fields that are read; raises ValueError for some that do not go together."""
        return Fields(
            text=self.text,
            prompt=self.prompt,
            completion=self.completion,
            messages=self.messages,
        )


@dataclass(frozen=True, kw_only=True)
class FieldFiles(FieldNames, Files):
    """Files whose records have fields."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.fields


class FileSource:
    """The rows of found files, in the order of the files."""

    def __init__(self, part: Files, launch: Path) -> None:
        self.part = part
        self.paths = part.found(launch)
        self.stamp = self._stamp()
        self._digest: str | None = None

    def _stamp(self) -> str:
        try:
            written = [[str(path), *store.written(path)] for _, path in self.every()]
        except OSError as error:
            raise unreadable(Path(str(error.filename)), error) from error
        reading = self.reading()
        return f"{type(self.part).__name__.lower()}-{store.text_digest([written, reading])}"

    def every(self) -> list[tuple[Split, Path]]:
        """Every file with its side."""
        return [(split, path) for split, paths in self.paths.items() for path in paths]

    def reading(self) -> dict[str, Any]:
        """How the files are read: all that decides the rows besides their bytes."""
        part = self.part
        own = {"separator": getattr(part, "separator", None), "rows": getattr(part, "rows", None)}
        fields = [
            part.fields.text,
            part.fields.prompt,
            part.fields.completion,
            part.fields.messages,
        ]
        return {"format": part.suffix, "fields": fields, "on_bad": part.on_bad, **own}

    def digest(self) -> str:
        """Digest of every byte of the files, and of how they are read."""
        if self._digest is None:
            try:
                files = [[split, store.file_digest(path)] for split, path in self.every()]
            except OSError as error:
                raise unreadable(Path(str(error.filename)), error) from error
            self._digest = store.text_digest([files, self.reading()])
        return self._digest

    def sample_digest(self) -> str:
        """Digest for files too large to be read as a whole before they are trained on: sizes,
        times of writing, first and last MiB. A copy of a file is therefore another corpus."""
        try:
            files = [[split, path.stat().st_mtime_ns, sample(path)] for split, path in self.every()]
        except OSError as error:
            raise unreadable(Path(str(error.filename)), error) from error
        return store.text_digest([files, self.reading()])

    def rows(self, dropped: Counter[str]) -> Iterator[Sided]:
        """See `runner.data.pipeline.Source`. Raises UserError when a file was changed meanwhile,
        and at the first bad record unless they are to be skipped."""
        for split, path in self.every():
            for block in self.blocks(path):
                yield from self.block_rows(split, block, dropped)
        if self._stamp() != self.stamp:
            raise UserError(
                Fault(
                    key="data.files",
                    given="a file that was changed while it was read",
                    allowed="files that stay as they are while they are prepared",
                    next_step="start again when nothing writes them any more",
                )
            )

    def blocks(self, path: Path) -> Sequence[Block]:
        """The blocks of a file; raises UserError when it cannot be read."""
        try:
            return self.part.blocks(path)
        except OSError as error:
            raise unreadable(path, error) from error

    def block_rows(self, split: Split, block: Block, dropped: Counter[str]) -> Iterator[Sided]:
        """The rows of one block."""
        forced = split if self.paths["eval"] else None
        fields, strict = self.part.fields, self.part.on_bad == "error"
        try:
            for number, record in self.part.records(block):
                row = fields.row(record)
                if not isinstance(row, Bad):
                    yield Sided(row, forced)
                elif strict:
                    raise self.fault(block, number, row)
                else:
                    dropped[row.reason] += 1
        except OSError as error:
            raise unreadable(block.path, error) from error

    def fault(self, block: Block, number: int, bad: Bad) -> UserError:
        """The error that names file, line and field."""
        detail = bad.detail
        found = broken_byte(block.path) if bad.reason == "not_utf8" else None
        if found:
            detail += f" (byte 0x{found[1]:02x} at byte offset {found[0]} of the file)"
        if found or bad.reason in ("broken", "missing"):
            detail += hint(block.path, self.part.suffix, text=not found)
        place = f"{self.part.unit} {self.part.place(block, number)}"
        return UserError(
            Fault(
                key="data.files",
                given=f"{block.path} {place}: {detail}",
                allowed="records with the fields that are read, as text: "
                + ", ".join(self.part.fields.columns),
                next_step="correct it, name other fields (data.text=FIELD), or leave such rows "
                "out, counted by reason: data.on_bad=skip",
            )
        )


def sample(path: Path) -> str:
    """Digest of the size, the first and the last MiB of a file."""
    with path.open("rb") as file:
        size = path.stat().st_size
        found = hashlib.sha256(size.to_bytes(8, "big") + file.read(2**20))
        file.seek(max(0, size - 2**20))
        found.update(file.read())
    return found.hexdigest()


def hint(path: Path, suffix: str, *, text: bool) -> str:
    """What a file may be that does not read as it should; nothing for one that is text in UTF-8
    and begins as nothing else, and for Parquet read as such."""
    if suffix == ".parquet":
        return ""
    with path.open("rb") as file:
        start = file.read(max(map(len, STARTS)))
    for known, words in STARTS.items():
        if start.startswith(known):
            return f"; {words}"
    return "" if text else "; convert it, with iconv -f latin1 -t utf-8 for example"


def listed(patterns: Any) -> list[Any]:
    """One path or several as a list."""
    if isinstance(patterns, list | tuple):
        return list(patterns)
    return [patterns]


def matches(pattern: str, launch: Path, suffix: str) -> list[Path]:
    """Files of a path, a folder (those with the suffix in it) or a glob, sorted."""
    path = launch / Path(pattern).expanduser()
    if path.is_dir():
        return sorted(found for found in path.rglob(f"*{suffix}") if found.is_file())
    if path.is_file():
        return [path]
    named = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 - takes absolute ones
    return sorted(found for found in named if found.is_file())


def not_found(key: str, pattern: str, launch: Path, suffix: str) -> Fault:
    """A path that leads to no file."""
    path = launch / Path(pattern).expanduser()
    what = f"a folder without *{suffix}" if path.is_dir() else "no such file"
    if path.exists() and not path.is_dir():
        what = "no regular file"
    return Fault(
        key=key,
        given=f"{path}: {what}",
        allowed=f"a file, a glob, or a folder with *{suffix} files in it",
        next_step=f"correct the path; a relative one counts from {launch}",
    )


def held_out_twice(path: Path) -> Fault:
    """A file that would be trained on and held out."""
    return Fault(
        key="data.eval_files",
        given=f"{path}, which data.files names too",
        allowed="files that are not trained on",
        next_step="leave it out of one of the two",
    )


def unreadable(path: Path, error: OSError) -> UserError:
    """A file that cannot be read."""
    return UserError(
        Fault(
            key="data.files",
            given=f"{path}: {error.strerror or ' '.join(str(error).split())}",
            allowed="a file that can be read, in the format that data= names",
            next_step="correct the path, its permissions or data=FORMAT",
        )
    )
