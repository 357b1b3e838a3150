"""Texts to examples on disk, through a `datasets.Dataset`: tokenized, limited, split."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.contracts import Fault, UserError
from runner.data.examples import OVERLONG, encode, pieces
from runner.data.texts import Text, Texts, side
from runner.data.tokenizer import Tokenizer, exact_ids, id_type

if TYPE_CHECKING:
    from datasets import Dataset


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
        new_fingerprint=texts.digest,
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
