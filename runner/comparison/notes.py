"""What a comparison says in words beside its verdicts: places, work, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.comparison.quality import has_diverged
from runner.comparison.rows import examples_of
from runner.comparison.setups import Setup, is_emulated, is_narrow_and_eager
from runner.records import finite


def device_of(setups: Sequence[Setup]) -> str:
    """The devices of the runs, in words."""
    found: dict[str, None] = {}
    for setup in setups:
        for run in setup.runs.values():
            device = run.record.environment.get("device")
            if device:
                found[_device_words(device)] = None
    return "; ".join(found) or "unknown device"


def _device_words(device: Mapping[str, Any]) -> str:
    count = device.get("threads")
    threads = f", {count} thread{'s' if count > 1 else ''}" if count else ""
    return f"{'CPU' if device['type'] == 'cpu' else 'GPU'}: {device['name']}{threads}"


def workload_of(setup: Setup) -> dict[str, Any]:
    """What is held fixed, for the report's head."""
    record = setup.first.record
    config, sizes = record.config, record.sizes
    model = config.get("model", {})
    found = {
        "model": str(model.get("_target_", "")).rpartition(".")[2],
        "parameters": sizes.get("params"),
        "data": config.get("data", {}).get("name"),
        "seq_len": config.get("seq_len"),
        "global_batch": config.get("batch"),
        "updates": config.get("updates"),
        "epochs": config.get("epochs"),
        "workload_id": record.workload_id,
    }
    return {key: value for key, value in found.items() if value}


def notes_of(
    setups: Sequence[Setup], base: Setup | None, axes: Mapping[str, Sequence[str]]
) -> list[str]:
    """What a reader must know beside the verdicts."""
    notes = []
    devices = {
        (run.record.environment.get("device") or {}).get("type")
        for setup in setups
        for run in setup.runs.values()
    }
    if "cpu" in devices:
        notes.append("Times are of a CPU: they say nothing about a GPU.")
    if any(is_emulated(setup) for setup in setups):
        notes.append(
            "Emulated setups have no time and no ratio of memory: an emulation is slower and "
            "larger than what it stands for."
        )
    if any(is_narrow_and_eager(setup) and not is_emulated(setup) for setup in setups):
        notes.append(
            "Beside a ratio, `eager` means FP8 or narrower products without compilation: there "
            "rounding and scaling are operations of their own, and they usually lose to BF16. "
            "compile=default is what such recipes are made for."
        )
    if all((examples := examples_of(setup)) and examples.whole for setup in setups):
        notes.append("No example was cut to seq_len or left out.")
    for setup in setups:
        notes.extend(f"{setup.name}: {text}" for text in _seed_notes(setup, base))
    for missing in _absent(setups, axes):
        notes.append(f"{missing}: no run is known (not supported, or not started).")
    return notes


def _seed_notes(setup: Setup, base: Setup | None) -> list[str]:
    notes = []
    if setup.repeated:
        seeds = ", ".join(map(str, setup.repeated))
        notes.append(f"seed {seeds} ran more than once; the last run counts.")
    if setup is base:
        lost = [run.seed for run in setup.runs.values() if has_diverged(run)]
        broken = [r.seed for r in setup.with_status("error", "oom", "unsupported")]
        for lacking, word in ((lost, "diverged"), (broken, "failed")):
            if lacking:
                named = ", ".join(map(str, lacking))
                message = setup.runs[lacking[0]].record.message
                reason = f" ({message})" if message else ""
                notes.append(f"the baseline {word} with seed {named}{reason}; no pair there.")
    notes.extend(_nonfinite_notes(setup))
    killed = [run.seed for run in setup.with_status("killed")]
    if killed:
        notes.append(f"seed {', '.join(map(str, killed))} did not finish and counts nowhere.")
    if base is not None and setup is not base:
        unpaired = sorted(set(setup.runs) ^ set(base.runs))
        if unpaired:
            named = ", ".join(map(str, unpaired))
            notes.append(f"seed {named} is there on one side only and counts in no difference.")
    return notes


def _nonfinite_notes(setup: Setup) -> list[str]:
    for seed, run in setup.runs.items():
        bad = [u.attempt for u in run.updates if u.loss is not None and finite(u.loss) is None]
        if bad:
            count = f"{len(bad)} attempt{'s' if len(bad) > 1 else ''} with seed {seed}"
            return [f"{count} had a loss that is not finite, the first number {bad[0]}."]
    return []


def _absent(setups: Sequence[Setup], axes: Mapping[str, Sequence[str]]) -> list[str]:
    """Values of an axis that no setup has."""
    return [
        f"{key}={value}"
        for key, values in axes.items()
        if key != "seed"
        for value in values
        if not any(setup.swept.get(key) == value for setup in setups)
    ]
