"""What a run leaves behind: one journal line per update, one record at the end.

Both are versioned JSON. Numbers that are not finite are written as null beside a marker, so the
files are valid JSON everywhere; unknown is null or absent, never 0 or -1. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

import orjson

from runner.contracts import Counts

SCHEMA_VERSION = 1
"""1: first version."""

JOURNAL = "journal.jsonl"
RECORD = "record.json"
PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
"""Phases of an update; with `communication` (always 0 on one device) they sum to the total."""

CLOCKED = ("time", "host")
"""Entries of an update's line that a clock gives; null for an emulated run."""

STATUSES = ("ok", "diverged", "oom", "error", "killed", "unsupported")


MISREAD = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What reading a file raises that cannot be read or holds something else than was written."""


class Unreadable(ValueError):
    """A file of a run folder does not hold what this program writes. Says which, and why."""

    def __init__(self, path: Path, error: BaseException | str) -> None:
        kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
        self.name = path.name
        self.reason = kind + str(error).partition("\n")[0]
        super().__init__(f"{path}: {self.reason}")


def nonfinite(value: float | None) -> str | None:
    """`nan`, `+inf` or `-inf` for a value that is not finite, else None."""
    if value is None or math.isfinite(value):
        return None
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite."""
    return None if value is None or not math.isfinite(value) else value


def restore(value: float | None, marker: str | None) -> float | None:
    """The number that `finite` and `nonfinite` took apart."""
    return float(marker) if marker is not None else value


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One attempted update.

    update: applied updates including this one, if it was applied; the curve's abscissa.
    attempt: number of this attempt, from 1.
    applied: whether the parameters were changed.
    skipped_reason: `nonfinite_gradient`, `nothing_valid`, or None when applied.
    loss: summed loss over the denominator of the update (nats), before the update.
    grad_norm: 2-norm of the unscaled gradient before clipping.
    lr: learning rate used; loss_scale: scale used, or None without scaling.
    tokens, examples: counts over all micro-batches of the update.
    time: seconds exposed, by phase; host: seconds the host worked on a phase, exposed or not.
    memory: on CUDA, most bytes `allocated`, `requested`, `reserved` and `inactive_split` during it,
        `retries` and `ooms` of the allocator since the update before, where it counts them, and
        `over_account`: bytes over the memory account, only where these are more than 3 % of it;
        None on a CPU.
    marks: why this update is left out of step-time statistics; empty when it counts.
    """

    update: int
    attempt: int
    applied: bool
    skipped_reason: str | None
    loss: float | None
    grad_norm: float | None
    lr: float
    loss_scale: float | None
    tokens: Counts
    examples: int
    time: Mapping[str, float]
    total: float
    host: Mapping[str, float]
    memory: Mapping[str, int] | None
    marks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The journal's object: nested as the design's contract says."""
        marker = nonfinite(self.loss)
        norm_marker = nonfinite(self.grad_norm)
        return {
            "update": self.update,
            "attempt": self.attempt,
            "applied": self.applied,
            "skipped_reason": self.skipped_reason,
            "loss": finite(self.loss),
            "nonfinite": marker,
            "grad_norm": finite(self.grad_norm),
            **({"grad_norm_nonfinite": norm_marker} if norm_marker else {}),
            "lr": self.lr,
            "loss_scale": self.loss_scale,
            "tokens": {**vars(self.tokens)},
            "examples": self.examples,
            "time": {"total": self.total, **self.time, "communication": 0.0},
            "host": dict(self.host),
            "memory": None if self.memory is None else dict(self.memory),
            "marks": list(self.marks),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> UpdateRecord:
        """Read a journal object back; non-finite values come back as floats.

        Times that the journal does not tell come back as NaN, so that no figure can come of them.
        """
        seconds = line["time"] or dict.fromkeys(("total", *PHASES), math.nan)
        # A comparison reads hundreds of thousands of these: filling the objects directly takes a
        # third of the time that a frozen dataclass's own `__init__` takes.
        tokens = line["tokens"]
        counts = object.__new__(Counts)
        counts.__dict__.update(
            useful=tokens["useful"], nonpad=tokens["nonpad"], slots=tokens["slots"]
        )
        found = object.__new__(cls)
        found.__dict__.update(
            update=line["update"],
            attempt=line["attempt"],
            applied=line["applied"],
            skipped_reason=line["skipped_reason"],
            loss=restore(line["loss"], line.get("nonfinite")),
            grad_norm=restore(line["grad_norm"], line.get("grad_norm_nonfinite")),
            lr=line["lr"],
            loss_scale=line["loss_scale"],
            tokens=counts,
            examples=line["examples"],
            time={phase: seconds[phase] for phase in PHASES},
            total=seconds["total"],
            host=line["host"] or {},
            memory=line["memory"],
            marks=tuple(line["marks"]),
        )
        return found


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Held-out loss after `update` applied updates.

    eval_loss: summed cross-entropy over targets, in nats per target, computed in fp32.
    eval_tokens: number of targets it is over.
    """

    update: int
    eval_loss: float
    eval_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The journal's evaluation line."""
        return {
            "update": self.update,
            "eval_loss": finite(self.eval_loss),
            "nonfinite": nonfinite(self.eval_loss),
            "eval_tokens": self.eval_tokens,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> EvaluationRecord:
        """Read an evaluation line back."""
        loss = restore(line["eval_loss"], line.get("nonfinite"))
        assert loss is not None
        return cls(update=line["update"], eval_loss=loss, eval_tokens=line["eval_tokens"])


@dataclass(frozen=True, kw_only=True)
class NumericsRecord:
    """What rounding did around applied update `update`.

    values: figures by their name without `numerics/`; NaN where there is no figure because a norm
        that it is relative to is 0 or something in it is not finite.
    """

    update: int
    values: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The journal's line; `nonfinite` says which figures were what instead of a number."""
        known = {name: finite(value) for name, value in self.values.items()}
        markers = {name: mark for name, v in self.values.items() if (mark := nonfinite(v))}
        return {"update": self.update, "numerics": known, **_if_any("nonfinite", markers)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> NumericsRecord:
        """Read a line back; non-finite figures come back as floats."""
        values, markers = dict(line["numerics"]), line.get("nonfinite", {})
        values |= {name: float(mark) for name, mark in markers.items()}
        return cls(update=line["update"], values=values)


def _if_any(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found} if found else {}


JournalLine = UpdateRecord | EvaluationRecord | NumericsRecord


def parse_line(line: str) -> JournalLine:
    """One journal line as its record."""
    return line_of(json.loads(line))


def line_of(data: Mapping[str, Any]) -> JournalLine:
    """A journal object as its record."""
    if "numerics" in data:
        return NumericsRecord.from_json(data)
    return (EvaluationRecord if "eval_loss" in data else UpdateRecord).from_json(data)


def read_journal(path: Path) -> list[JournalLine]:
    """Every complete line of a journal; a last line that was cut by a kill is left out.

    All lines are parsed in one go, which takes half the time of parsing them one by one.
    Raises Unreadable, with the number of the line, where one is no journal line.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(path, error) from error
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        return [line_of(entry) for entry in orjson.loads(b"[" + b",".join(lines) + b"]")]
    except MISREAD:
        return [_numbered_line(path, number, line) for number, line in enumerate(lines, 1)]


def _numbered_line(path: Path, number: int, line: bytes) -> JournalLine:
    try:
        return line_of(orjson.loads(line))
    except MISREAD as error:
        raise Unreadable(path, f"line {number} is no journal line") from error


def follow_journal(path: Path, offset: int) -> Iterator[tuple[JournalLine, int]]:
    """Complete lines from byte `offset` on, each with the offset behind it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            yield parse_line(raw.decode()), offset


def updates_of(lines: Sequence[JournalLine]) -> list[UpdateRecord]:
    """The update records of a journal, in order."""
    return [line for line in lines if isinstance(line, UpdateRecord)]


def evaluations_of(lines: Sequence[JournalLine]) -> list[EvaluationRecord]:
    """The evaluation records of a journal, in order."""
    return [line for line in lines if isinstance(line, EvaluationRecord)]


def dumps(value: Any) -> str:
    """Strict JSON on one line: a non-finite number that reached here is a mistake and raises."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, also where
    several threads write it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run as a whole; `record.json`.

    status: one of STATUSES; message: what happened, in words, for every status but ok.
    command: the command that repeats this job. config: resolved, nested.
    summary: figures by their MLflow name without `summary/`; absent means unknown.
    sizes: counts of examples, tokens, parameters, micro-batches.
    evidence: items of `{value, how}`, where how is `observed`, `read_back` or `declared`.
    numerics, evaluation, diagnosis, memory, environment: objects as the design names them.
    job: where the run stands among others: `setup`, `swept`, `axes`, `sweep_id`; empty for a
        record of an earlier program.
    """

    status: str
    message: str
    command: Sequence[str]
    workload_id: str | None
    setup_id: str | None
    config: Mapping[str, Any]
    summary: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Sequence[Mapping[str, Any]] = field(default_factory=list)
    job: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {STATUSES}")

    def write(self, folder: Path) -> None:
        """Write `record.json` into the run folder, atomically."""
        text = json.dumps(asdict(self), allow_nan=False, indent=1)
        write_atomically(folder / RECORD, text)

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """The record of a run folder, or None where there is none.

        Raises Unreadable for a damaged one, and for a record of a later schema version.
        """
        path = folder / RECORD
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema_version"] <= SCHEMA_VERSION:
                return cls(**data)
        except MISREAD as error:
            raise Unreadable(path, error) from error
        raise Unreadable(
            path,
            f"schema version {data['schema_version']}; this program reads up to {SCHEMA_VERSION}",
        )


def read_run(folder: Path) -> tuple[RunRecord | None, list[JournalLine]]:
    """The record of a run folder and its whole journal.

    Raises Unreadable for what is damaged, and for a journal that lacks updates which the record
    of a run to its end counts: its curve would pass for the whole one.
    """
    record, journal = RunRecord.read(folder), read_journal(folder / JOURNAL)
    if record is not None and record.status in ("ok", "diverged"):
        counted = int(record.summary.get("updates_attempted", 0))
        found = len(updates_of(journal))
        if found < counted:
            raise Unreadable(
                folder / JOURNAL, f"it has {found} of the {counted} updates that {RECORD} counts"
            )
    return record, journal
