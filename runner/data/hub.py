"""Corpora of the Hugging Face hub, by name, or from a folder in the hub's layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.contracts import Corpus, Fault, Split, UserError
from runner.data import cache as store
from runner.data import pipeline
from runner.data.files import FieldNames, Rows
from runner.data.prepare import Sided
from runner.data.records import Bad
from runner.data.streamed import stream_conflicts

BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Hub(FieldNames, Rows):
    """A dataset by the name it has on the hub, read by `datasets`.

    name: on the hub (`owner/name`), or a folder in the hub's layout (a relative one counts from
        the launch folder). config, revision: which of its configurations and commits. split: what
        is trained on, or divided; eval_split: what is held out, for datasets that have it apart.
    streaming, buffer, held_out: see `runner.data.streamed.Streamed`.
    """

    setup_keys: ClassVar[frozenset[str]] = Rows.setup_keys
    name: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    eval_split: str | None = None
    streaming: bool = False
    buffer: int = 4096
    held_out: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.fields
        if self.streaming and self.workers:
            raise ValueError(f"workers: given {self.workers}; allowed: 0 with streaming=true")
        for key in ("buffer", "held_out"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: given {getattr(self, key)}; allowed: 1 or more")

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Epochs of a stream; a finished job on data that may have changed since."""
        faults = list(stream_conflicts(self.streaming, job))
        if job["skip_finished"] and self.revision is None:
            fault = Fault(
                key="skip_finished",
                given="true, with a dataset that may have changed since",
                allowed="true with a data.revision",
                next_step="name the commit: data.revision=COMMIT",
            )
            faults.append(fault)
        return faults

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        options = self.options(seq_len=seq_len)
        source = HubSource(self)
        if self.streaming:
            from runner.data.stream import open_stream

            return open_stream(
                source,
                source,
                options=options,
                part=self.tokenizer,
                cache=cache,
                buffer=self.buffer,
                held_out=self.held_out,
                strict=self.on_bad == "error",
            )
        return pipeline.load_source(
            source,
            options=options,
            tokenizer=self.tokenizer,
            cache=cache,
            strict=self.on_bad == "error",
        )


class HubSource:
    """The rows of a dataset, split by split; and its shards, as the blocks of a stream."""

    def __init__(self, part: Hub) -> None:
        self.part = part
        self.where = located(part.name)
        names: dict[Split, str | None] = {"train": part.split, "eval": part.eval_split}
        self.splits: dict[Split, Any] = {
            side: opened(part, self.where, name) for side, name in names.items() if name
        }

    def reading(self) -> list[Any]:
        """How the rows are read: all that decides them besides what `datasets` delivers."""
        fields = self.part.fields
        named = [fields.text, fields.prompt, fields.completion, fields.messages]
        return [named, self.part.on_bad, self.part.split, self.part.eval_split]

    def files(self) -> list[Path]:
        """The Arrow files that `datasets` made of the dataset."""
        return [
            Path(file["filename"]) for data in self.splits.values() for file in data.cache_files
        ]

    @property
    def stamp(self) -> str:
        """Changes with the Arrow files."""
        written = [[str(path), *store.written(path)] for path in self.files()]
        return f"hub-{store.text_digest([written, self.reading()])}"

    def digest(self) -> str:
        """Digest of the Arrow files and of how they are read."""
        return store.text_digest([[*map(store.file_digest, self.files())], self.reading()])

    def sample_digest(self) -> str:
        """Digest for a stream: the dataset's commit, or the folder's files with their times."""
        folder = Path(self.where)
        if folder.is_dir():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            facts: Any = [[path.relative_to(folder).as_posix(), *written(path)] for path in files]
        else:
            facts = commit(self.where, self.part.revision)
        return store.text_digest([self.part.config, facts, self.reading()])

    def rows(self, dropped: Counter[str]) -> Iterator[Sided]:
        """See `runner.data.pipeline.Source`."""
        for side, data in self.splits.items():
            yield from self._rows(data, side, dropped)

    def _rows(
        self, data: Any, side: Split, dropped: Counter[str], shard: str = ""
    ) -> Iterator[Sided]:
        forced = side if "eval" in self.splits else None
        fields = self.part.fields
        number = 0
        for batch in data.iter(BATCH_ROWS):
            known = [name for name in fields.columns if name in batch] or list(batch)
            for values in zip(*(batch[name] for name in known), strict=True):
                number += 1
                record = dict(zip(known, values, strict=True))
                row = fields.row(record if known == fields.columns else dict.fromkeys(batch))
                if not isinstance(row, Bad):
                    yield Sided(row, forced)
                elif self.part.on_bad == "error":
                    raise self._fault(side, shard, number, row)
                else:
                    dropped[row.reason] += 1

    def _fault(self, side: Split, shard: str, number: int, bad: Bad) -> UserError:
        split = self.part.split if side == "train" else self.part.eval_split
        return UserError(
            Fault(
                key="data.name",
                given=f"{self.where}, split {split}{shard}, row {number}: {bad.detail}",
                allowed="rows with the fields that are read, as text: "
                + ", ".join(self.part.fields.columns),
                next_step="name other fields (data.text=FIELD), or leave such rows out, counted "
                "by reason: data.on_bad=skip",
            )
        )

    # --- as the blocks of a stream ---

    def __len__(self) -> int:
        return int(self.splits["train"].num_shards)

    def read(self, number: int, dropped: Counter[str]) -> Iterator[Sided]:
        """The rows of a shard of what is trained on."""
        data = self.splits["train"].shard(num_shards=len(self), index=number)
        return self._rows(data, "train", dropped, f", shard {number + 1} of {len(self)}")

    def held_out(self, dropped: Counter[str]) -> Iterator[Sided]:
        """Rows that may be held out."""
        side: Split = "eval" if "eval" in self.splits else "train"
        return self._rows(self.splits[side], side, dropped)


def located(name: str) -> str:
    """The folder that a name means, where there is one, else the name."""
    folder = Path(name).expanduser().absolute()
    return str(folder) if folder.is_dir() else name


def written(path: Path) -> list[int]:
    """Size and time of writing."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def opened(part: Hub, where: str, split: str) -> Any:
    """A split of the dataset; raises UserError where `datasets` cannot open it."""
    from datasets import load_dataset

    try:
        with quiet_datasets():
            return load_dataset(
                where, part.config, split=split, revision=part.revision, streaming=part.streaming
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            Fault(
                key="data.name",
                given=f"{where}, split {split}: {reason}",
                allowed="a dataset on the hub, or a folder in its layout, that has this split",
                next_step="correct data.name, data.config, data.split or data.revision",
            )
        ) from error


def commit(name: str, revision: str | None) -> str:
    """The commit that a revision of a dataset on the hub is; raises UserError without an answer."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:
        raise UserError(
            Fault(
                key="data.name",
                given=f"{name}: its commit cannot be asked for ({type(error).__name__}: {error})",
                allowed="a dataset on the hub that can be reached",
                next_step="correct data.name, or the network",
            )
        ) from error


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars of `datasets` within; as it was afterwards."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
