"""Whether two setups may be held against each other: equal work, and nothing undeclared varied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner import checks
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup
from runner.contracts import UserError
from runner.forwarding.names import flatten


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Flattened keys whose values differ, with both values as text; `absent` for none."""
    first, second = dict(flatten(one)), dict(flatten(other))
    return {
        key: (first.get(key, "absent"), second.get(key, "absent"))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    }


def workload_faults(base: ComparedRun, run: ComparedRun, tuned: Collection[str] = ()) -> list[str]:
    """What of the work differs, in words, keys that were tuned apart; empty for comparable runs."""
    if base.record.workload_id == run.record.workload_id:
        return _length_faults(base, run)
    try:
        fixed = [checks.workload_of(r.record.config) for r in (base, run)]
    except UserError:  # a part is not installed here: compare everything but the setup
        skipped = (*checks.SETUP_KEYS, *checks.NEITHER)
        fixed = [
            {key: value for key, value in r.record.config.items() if key not in skipped}
            for r in (base, run)
        ]
    differing = differing_keys(*fixed)
    found = [
        f"{key}: {own} against {b}"
        for key, (b, own) in differing.items()
        if not _explained([key], tuple(name.replace("/", ".") for name in tuned))
    ]
    corpora = [str(r.evidence("corpus_fingerprint"))[:12] for r in (base, run)]
    if corpora[0] != corpora[1] or not differing:
        found.append(f"corpus: {corpora[1]} against {corpora[0]}")
    return found or _length_faults(base, run)


def _length_faults(base: ComparedRun, run: ComparedRun) -> list[str]:
    applied = [r.record.summary.get("updates_applied") for r in (base, run)]
    if None in applied or applied[0] == applied[1]:
        return []
    return [f"applied updates with seed {run.seed}: {applied[1]:.0f} against {applied[0]:.0f}"]


# --- confounding ------------------------------------------------------------------------------


KERNELS = ("flash", "efficient", "cudnn", "math")
"""Words that name the kind of an attention operator."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Evidence that must be equal, unless a key that explains it is declared to vary.

    read: the evidence of a run, None where it has none. advice: how to hold it fixed.
    """

    what: str
    read: Callable[[ComparedRun], Any]
    explained_by: tuple[str, ...] = ()
    advice: str = ""


def _noted(name: str) -> Callable[[ComparedRun], Any]:
    return lambda run: run.evidence(name)


def _sized(name: str) -> Callable[[ComparedRun], Any]:
    return lambda run: run.record.sizes.get(name)


def _operands(run: ComparedRun) -> Any:
    """Operand formats of the matrix products, whatever their share."""
    return sorted(run.evidence("product_flops_by_operands") or ()) or None


def _kernels(run: ComparedRun) -> Any:
    """Kinds of attention kernel that ran: rows of documents enter the same kernel elsewhere."""
    operators = run.evidence("attention_operators")
    if operators is None:
        return None
    return sorted({next((k for k in KERNELS if k in name), name) for name in operators})


def _packages(run: ComparedRun) -> Any:
    return run.record.environment.get("packages", {}).get("torch")


def _device(run: ComparedRun) -> Any:
    device = run.record.environment.get("device") or {}
    return {key: device[key] for key in ("type", "name", "threads") if key in device} or None


RULES = (
    Rule(
        what="attention operator",
        read=_kernels,
        explained_by=("memory.attention",),
        advice="give both the same memory/attention, one that is not auto",
    ),
    Rule(
        what="backend controls (TF32 and reduced sums)",
        read=_noted("controls"),
        explained_by=("precision",),
    ),
    Rule(
        what="formats of the matrix products",
        read=_operands,
        explained_by=("precision", "memory.adapter"),
    ),
    Rule(
        what="formats of the parameters",
        read=_noted("parameter_dtypes"),
        explained_by=("precision", "memory.adapter"),
    ),
    Rule(
        what="fused optimizer",
        read=_noted("optimizer_fused"),
        explained_by=("optimizer", "memory.optimizer_state", "memory.offload", "memory.adapter"),
    ),
    Rule(
        what="trainable parameters",
        read=_sized("params_trainable"),
        explained_by=("memory.adapter", "precision"),
    ),
    Rule(what="initial weights", read=_noted("initial_weights")),
    Rule(what="global batch", read=_sized("global_batch")),
    Rule(
        what="held-out tokens (counting rule)",
        read=lambda run: run.record.evaluation.get("tokens"),
    ),
    Rule(what="device", read=_device),
    Rule(what="torch version", read=_packages),
)


def declared(base: Setup, setup: Setup) -> list[str]:
    """Flattened keys of the setup that differ from the baseline's."""
    recorded = [s.first.record.config for s in (base, setup)]
    if not all(recorded):
        return []
    # A record of an earlier program lacks keys that were added since: null there.
    configs = [{"allow": [], **dict.fromkeys(checks.SETUP_KEYS), **c} for c in recorded]
    try:
        nodes = [checks.setup_of(config) for config in configs]
    except UserError:  # a part is not installed here: every differing key counts as declared
        nodes = [dict(config) for config in configs]
    return list(differing_keys(*nodes))


def _explained(keys: Sequence[str], roots: tuple[str, ...]) -> bool:
    return any(key == root or key.startswith(f"{root}.") for key in keys for root in roots)


def confounding(base: Setup, setup: Setup) -> list[str]:
    """What differs between the two beyond what is declared to vary, in words."""
    keys = declared(base, setup)
    found: dict[str, None] = {}
    for seed, run in setup.runs.items():
        other = base.runs.get(seed, base.first)
        for rule in RULES:
            own, reference = rule.read(run), rule.read(other)
            known = own is not None and reference is not None
            if known and own != reference and not _explained(keys, rule.explained_by):
                advice = f" ({rule.advice})" if rule.advice else ""
                found[f"{rule.what}: {_words(own, reference)}{advice}"] = None
        if seed in base.runs:
            found |= dict.fromkeys(_token_faults(other, run))
    return list(found)


def _words(own: Any, reference: Any) -> str:
    if isinstance(own, Mapping) and isinstance(reference, Mapping):
        keys = [k for k in {**reference, **own} if own.get(k) != reference.get(k)]
        return "; ".join(f"{k} {own.get(k)} against {reference.get(k)}" for k in keys)
    if isinstance(own, Sequence) and isinstance(reference, Sequence):
        return f"{_listed(own)} against {_listed(reference)}"
    return f"{own} against {reference}"


def _listed(value: Sequence[Any]) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"


def _token_faults(base: ComparedRun, run: ComparedRun) -> list[str]:
    """Attempts of one seed draw the same examples and count the same tokens in them.

    A batching that declares to reorder examples across updates (`close`) draws as many examples
    in each, but others: then only their number is held fixed.
    """
    reordered = "close" in (_batching_numerics(base), _batching_numerics(run))
    for reference, own in zip(base.updates, run.updates, strict=False):
        pairs = {"examples": (own.examples, reference.examples)}
        if not reordered:
            pairs["useful tokens"] = (own.tokens.useful, reference.tokens.useful)
            pairs["non-pad tokens"] = (own.tokens.nonpad, reference.tokens.nonpad)
        for what, (mine, theirs) in pairs.items():
            if mine != theirs:
                where = f"attempt {own.attempt}, seed {run.seed}"
                return [f"counting rule: {mine} {what} against {theirs} ({where})"]
    return []


def _batching_numerics(run: ComparedRun) -> Any:
    return (run.evidence("numerics") or {}).get("batching")
