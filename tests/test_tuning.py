"""Tests of runner/comparison/tuning.py: each setup gets its best of the same grid."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from runner.compare import main, parse, qualities, tune_of
from runner.comparison.judge import compare
from runner.comparison.results import Comparison
from runner.comparison.runs import ComparedRun
from runner.contracts import UserError
from tests.compared import CONFIG, run
from tests.test_checks import config, refused

KEYS = ["optimizer.lr"]


def trained(
    adapter: str, lr: str, losses: Mapping[int, float | None], status: str = "ok", **changes: Any
) -> list[ComparedRun]:
    """Runs of one adapter and one rate, by seed."""
    optimizer = {**CONFIG["optimizer"], "lr": float(lr)}
    memory = {**CONFIG["memory"], "adapter": {"_target_": "runner.memory.nothing.Nothing"}}
    if adapter == "lora":
        memory["adapter"] = {"_target_": "runner.memory.adapter.LoRA"}
    words = f"memory/adapter={adapter} optimizer.lr={lr}"
    settings = {"optimizer": optimizer, "memory": memory, **changes}
    return [
        run(words, seed, loss, status=status, config=deepcopy(settings), swept=swept(words, seed))
        for seed, loss in losses.items()
    ]


def swept(words: str, seed: int) -> dict[str, str]:
    pairs = dict(word.split("=") for word in words.split())
    return {**pairs, "seed": str(seed)}


def three(*losses: float) -> dict[int, float | None]:
    return dict(enumerate(losses))


# Plain training is best at 0.01, the adapter at 0.1; at one rate either would look worse.
PLAIN = [
    *trained("none", "0.01", three(3.0, 3.1, 2.9)),
    *trained("none", "0.1", three(3.5, 3.6, 3.4)),
]
ADAPTED = [
    *trained("lora", "0.01", three(3.4, 3.5, 3.3)),
    *trained("lora", "0.1", three(3.002, 3.103, 2.901)),
]


def tuned(runs: list[ComparedRun], **changes: Any) -> Comparison:
    return compare(runs, tune=KEYS, **changes)


def test_the_best_of_each_side_is_compared_across_different_values() -> None:
    found = tuned([*PLAIN, *ADAPTED])
    assert found.baseline == "memory/adapter=none optimizer.lr=0.01"
    (contrast,) = found.contrasts
    assert contrast.setup == "memory/adapter=lora optimizer.lr=0.1"
    assert contrast.verdict.word == "passed"
    assert dict(contrast.values) == pytest.approx({0: 0.002, 1: 0.003, 2: 0.001})
    assert [row.name for row in found.setups] == [found.baseline, contrast.setup]
    assert not found.pairs


def test_grid_chosen_value_and_number_tried_are_said_and_kept() -> None:
    found = tuned([*PLAIN, *ADAPTED])
    assert [dict(row.chosen) for row in found.tuning] == [
        {"optimizer.lr": "0.01"},
        {"optimizer.lr": "0.1"},
    ]
    assert dict(found.tuning[0].tried) == pytest.approx({"0.01": 3.0, "0.1": 3.5})
    text = "\n".join(found.notes)
    assert (
        "memory/adapter=none optimizer.lr=0.01: optimizer.lr=0.01 is the best of 2 tried by "
        "held-out loss (0.01: 3.0000, 0.1: 3.5000); that is the smallest optimizer.lr"
    ) in text
    assert "chosen on the same held-out examples" in text
    assert not any("no run is known" in note for note in found.notes)


def test_without_tuning_different_rates_are_different_work() -> None:
    found = compare([*PLAIN, *ADAPTED])
    words = {c.setup: c.verdict.word for c in found.contrasts}
    assert words["memory/adapter=lora optimizer.lr=0.1"] == "incomparable"
    assert not found.tuning


def test_the_configuration_of_the_runs_says_what_is_tuned() -> None:
    stated = {"compare": {"tune": ["optimizer.lr", "not.swept"]}}
    runs = [
        *trained("none", "0.01", three(3.0, 3.1), **stated),
        *trained("lora", "0.01", three(3.0, 3.1), **stated),
    ]
    assert len(compare(runs).tuning) == 2
    assert not compare(runs, tune=[]).tuning


def test_a_side_that_tried_another_grid_is_incomparable() -> None:
    runs = [*PLAIN, *ADAPTED, *trained("lora", "1.0", three(2.5, 2.5, 2.5))]
    (contrast,) = tuned(runs).contrasts
    assert contrast.verdict.word == "incomparable"
    assert "another grid than the baseline: 0.01, 0.1, 1.0 against 0.01, 0.1" in (
        contrast.verdict.reason
    )


def test_whatever_else_differs_is_still_other_work() -> None:
    batch = [
        *trained("lora", "0.01", three(3.0, 3.1, 2.9), batch=16),
        *trained("lora", "0.1", three(3.0, 3.1, 2.9), batch=16),
    ]
    (contrast,) = tuned([*PLAIN, *batch]).contrasts
    assert contrast.verdict.word == "incomparable"
    assert "batch: 16 against 8" in contrast.verdict.reason
    assert "optimizer.lr" not in contrast.verdict.reason


def test_a_value_with_a_run_that_failed_is_tried_but_never_chosen() -> None:
    diverged = trained("lora", "0.1", {1: None}, status="diverged")
    lucky = trained("lora", "0.1", {0: 1.0, 2: 1.0})
    slow = trained("lora", "0.01", three(3.4, 3.5, 3.3))
    found = tuned([*PLAIN, *slow, *lucky, *diverged])
    row = found.tuning[1]
    assert dict(row.chosen) == {"optimizer.lr": "0.01"}
    assert row.tried["0.1"] is None
    assert "0.1: failed" in "\n".join(found.notes)
    assert found.contrasts[0].verdict.word == "failed"


def test_values_are_ranked_over_the_seeds_that_all_share() -> None:
    # seed 1 is a hard one: over all own seeds 0.01 would look better than 0.1
    easy = trained("none", "0.01", {0: 3.0, 2: 3.0})
    both = trained("none", "0.1", {0: 2.9, 1: 9.0, 2: 2.9})
    found = tuned([*easy, *both])
    assert dict(found.tuning[0].chosen) == {"optimizer.lr": "0.1"}
    assert dict(found.tuning[0].tried) == pytest.approx({"0.01": 3.0, "0.1": 2.9})


def test_equal_numerics_at_different_rates_are_judged_by_the_margin() -> None:
    # Both sides declare the lever `same`, as recomputation does: at one rate the curves would
    # have to agree to 1e-4, at two rates they cannot.
    same = {"numerics": {"memory.adapter": "same"}}
    exact = [
        run(
            r.setup,
            r.seed,
            r.record.summary["eval_loss"],
            config=r.record.config,
            swept=r.swept,
            evidence=same,
        )
        for r in [*PLAIN, *ADAPTED]
    ]
    (contrast,) = tuned(exact).contrasts
    assert "nats over 3 seeds" in contrast.verdict.reason
    alike = [r for r in exact if r.swept["optimizer.lr"] == "0.01"]
    (contrast,) = tuned(alike).contrasts
    assert "nothing but rounding" in contrast.verdict.reason


def test_a_key_that_was_not_swept_is_refused_before_and_after() -> None:
    with pytest.raises(UserError, match=r"compare\.tune: given clip; allowed: swept keys"):
        compare(PLAIN, tune=["clip"])
    (fault,) = refused("-m", "optimizer.lr=1e-3,1e-2", "compare.tune=[clip]")
    assert (fault.key, fault.next_step) == ("compare.tune", "sweep it: clip=VALUE,VALUE")
    (fault,) = refused("compare.tune=[optimizer.lr]")
    assert fault.allowed == "swept keys (none)"
    assert config("-m", "optimizer.lr=1e-3,1e-2", "compare.tune=[optimizer.lr]")


def test_runs_of_values_that_were_not_chosen_are_tagged_unchecked() -> None:
    named = [
        run(r.setup, r.seed, r.record.summary["eval_loss"], config=r.record.config, swept=r.swept)
        for r in [*PLAIN, *ADAPTED]
    ]
    tags = qualities(tuned(named))
    assert len(tags) == len({r.run_id for r in named})
    by_setup = {r.setup: tags[r.run_id] for r in named}
    assert by_setup == {
        "memory/adapter=none optimizer.lr=0.01": "baseline",
        "memory/adapter=none optimizer.lr=0.1": "unchecked",
        "memory/adapter=lora optimizer.lr=0.01": "unchecked",
        "memory/adapter=lora optimizer.lr=0.1": "passed",
    }


def test_the_command_takes_keys_with_or_without_brackets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune_of(parse(["compare.tune=[optimizer.lr, clip]"])) == ["optimizer.lr", "clip"]
    assert tune_of(parse(["compare.tune=optimizer.lr"])) == KEYS
    assert tune_of(parse(["sweep=latest"])) is None
    assert main(["--help"]) == 0
    assert "compare.tune" in capsys.readouterr().out
