"""Texts to a Corpus: split, tokenized once, cached on disk, read back memory-mapped."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.contracts import Corpus, Example, Fault, UserError
from runner.data import cache as store
from runner.data.examples import OVERLONG, encode, pieces, stored
from runner.data.texts import Text, Texts, side
from runner.data.tokenizer import Tokenizer, exact_ids, id_type

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1
"""Version of everything here that decides the content of a cached corpus; raise it on change."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything besides source and tokenizer that decides the examples.

    name: the corpus. seq_len: most tokens of an example. eval_share: expected share of texts
    held out. overlong: one of OVERLONG.
    """

    name: str
    seq_len: int
    eval_share: float
    overlong: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name: given {self.name!r}; allowed: letters, digits and _")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share: given {self.eval_share}; allowed: above 0, below 1")
        if self.overlong not in OVERLONG:
            raise ValueError(f"overlong: given {self.overlong!r}; allowed: {', '.join(OVERLONG)}")


def fingerprint(source: str, options: Options, tokenizer: Tokenizer) -> str:
    """Hex sha256 over all that decides the examples, `source` being the digest of the texts."""
    return store.text_digest(
        {
            "format": FORMAT,
            "python": platform.python_version(),
            "source": source,
            "split": "sha256(prompt+completion)[:8] < eval_share",
            "tokenizer": [tokenizer.identity, tokenizer.vocab, tokenizer.eos_id],
            **asdict(options),
        }
    )


def load(
    read: Callable[[], Texts], *, stamp: str, options: Options, tokenizer: Tokenizer, cache: str
) -> Corpus:
    """The corpus of the texts that `read` returns, from the folder `cache` where it is there.

    stamp: changes whenever `read` could return something else; as long as it is known and the
        corpus is cached, `read` is not called.
    Raises UserError when either split holds no usable example.
    """
    started = time.perf_counter()
    check_limit(options.seq_len)
    root = Path(cache).expanduser()
    texts: Texts | None = None
    source = store.remembered(root / "sources", stamp)
    if source is None:
        texts = read()
        source = texts.digest
    place = folder(root, source, options, tokenizer)
    facts = store.facts_at(place)
    if facts is None:
        texts = texts or read()
        place = folder(root, texts.digest, options, tokenizer)
        facts = built(place, texts, options, tokenizer)
    if texts is not None:
        store.remember(root / "sources", stamp, texts.digest)
    return opened(place, facts, tokenizer, started)


def built(place: Path, texts: Texts, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts of the corpus at `place`, prepared unless another job did so meanwhile."""
    with suppress(store.Damaged):
        return store.verified(place)
    store.build(place, lambda made: prepare(made, texts, options, tokenizer))
    return store.verified(place)


def check_limit(seq_len: int) -> None:
    """A row of one token has no target."""
    if seq_len < 2:
        raise UserError(
            Fault(key="seq_len", given=str(seq_len), allowed="2 or more", next_step="seq_len=256")
        )


def folder(root: Path, source: str, options: Options, tokenizer: Tokenizer) -> Path:
    """Where the corpus lies in the cache."""
    return root / f"{options.name}-{fingerprint(source, options, tokenizer)}"


def prepare(made: Path, texts: Texts, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenize and split into two datasets below `made`; returns the facts of the manifest."""
    check_usable(texts, {"train": len(texts.rows), "eval": len(texts.rows)}, options)
    with quiet_datasets():
        examples = tokenized(texts, options, tokenizer)
        usable = np.asarray(examples["useful"]) > 0
        held_out = np.asarray(examples["held_out"])
        chosen = {"train": usable & ~held_out, "eval": usable & held_out}
        check_usable(texts, {split: int(rows.sum()) for split, rows in chosen.items()}, options)
        for split, rows in chosen.items():
            columns = examples.select_columns(["ids", "loss"])
            columns.select(np.flatnonzero(rows)).save_to_disk(made / split)
    truncated = int((np.asarray(examples["truncated"]) & usable).sum())
    return {"truncated": truncated, "dropped": all_dropped(texts, int((~usable).sum()))}


def all_dropped(texts: Texts, no_targets: int) -> dict[str, int]:
    """Examples left out by reason, with a warning about those that lost every target."""
    if no_targets:
        warnings.warn(
            f"{no_targets} examples have no target within the length limit and are left out",
            stacklevel=2,
        )
    return {**texts.dropped, **({"no_targets": no_targets} if no_targets else {})}


def check_usable(texts: Texts, usable: Mapping[str, int], options: Options) -> None:
    """Raise UserError unless each split holds an example."""
    if all(usable.values()):
        return
    found = ", ".join(f"{count} usable for {split}" for split, count in usable.items())
    raise UserError(
        Fault(
            key="data",
            given=f"{options.name}: {len(texts.rows)} rows after dropping {dict(texts.dropped)}, "
            f"{found} at seq_len={options.seq_len}, eval_share={options.eval_share}",
            allowed="at least 1 usable example for train and 1 for eval",
            next_step="use a larger corpus, a larger seq_len, or another data.eval_share",
        )
    )


def tokenized(texts: Texts, options: Options, tokenizer: Tokenizer) -> Dataset:
    """One row per example, in the order of the texts, kept in memory.

    Columns: `ids` and `loss` (lists of one length), `useful` (targets), `truncated`, `held_out`.
    """
    from datasets import Dataset, Features, List, Value

    rows = Dataset.from_dict(
        {
            "prompt": [row.prompt for row in texts.rows],
            "completion": [row.completion for row in texts.rows],
        }
    )
    columns = {"useful": Value("int64"), "truncated": Value("bool"), "held_out": Value("bool")}
    types = {"ids": List(Value(id_type(tokenizer.vocab).name)), "loss": List(Value("uint8"))}
    return rows.map(
        lambda batch: tokenize_batch(batch, options, tokenizer),
        batched=True,
        remove_columns=["prompt", "completion"],
        features=Features({**types, **columns}),
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint=fingerprint(texts.digest, options, tokenizer),
    )


def tokenize_batch(
    batch: Mapping[str, Sequence[str]], options: Options, tokenizer: Tokenizer
) -> dict[str, list[Any]]:
    """The columns of `tokenized` for some rows; each row gives one example or several."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("ids", "loss", "useful", "truncated", "held_out")
    }
    for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True):
        whole = encode(Text(prompt=prompt, completion=completion), tokenizer)
        parts = pieces(whole, limit=options.seq_len, overlong=options.overlong)
        held_out = side(prompt, completion, eval_share=options.eval_share) == "eval"
        lost = sum(part.length for part in parts) < whole.length
        for part in parts:
            columns["ids"].append(exact_ids(part.ids, tokenizer.vocab))
            columns["loss"].append(part.loss.view(np.uint8))
            columns["useful"].append(part.useful)
            columns["truncated"].append(lost)
            columns["held_out"].append(held_out)
    return columns


def opened(place: Path, facts: Mapping[str, Any], tokenizer: Tokenizer, started: float) -> Corpus:
    """The corpus of an intact cache folder; its arrays are memory-mapped."""
    return Corpus(
        train=read_split(place / "train"),
        eval=read_split(place / "eval"),
        fingerprint=place.name.rpartition("-")[2],
        vocab=tokenizer.vocab,
        pad_id=tokenizer.pad_id,
        truncated=facts["truncated"],
        dropped=facts["dropped"],
        prepared_s=time.perf_counter() - started,
    )


def read_split(place: Path) -> Sequence[Example]:
    """Memory-map a saved dataset."""
    from datasets import Dataset

    with quiet_datasets():
        return stored(Dataset.load_from_disk(str(place), keep_in_memory=False))


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
