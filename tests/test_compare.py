"""Tests for ../runner/comparison: groups, baselines, verdicts, ratios, on runs with known answers.

Three seeds: t(0.95, 2) = 2.91999 and t(0.975, 2) = 4.30265, as in the tables.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from runner.comparison.judge import compare
from runner.comparison.results import Comparison, Contrast, Quality
from runner.comparison.runs import ComparedRun
from runner.contracts import Counts, UserError
from runner.records import dumps
from runner.reporting.tables import speed_table
from tests.compared import BF16, COMMAND, FP32_FORMATS, evaluation, pairs, run, update

BASE = (3.0, 3.1, 2.9)


def only(comparison: Comparison) -> Contrast:
    (found,) = comparison.contrasts
    return found


def shifted(*by: float) -> list[float]:
    return [loss + d for loss, d in zip(BASE, by, strict=True)]


def against(variant: list[float | None], **changes: Any) -> Contrast:
    """bf16 runs with these losses against fp32 runs with the losses of BASE."""
    return only(compare(pairs(BASE, variant, **changes)))  # type: ignore[arg-type]


# --- quality ----------------------------------------------------------------------------------


def test_a_small_difference_passes_and_the_reason_states_bound_and_margin() -> None:
    found = against(shifted(0.001, 0.002, 0.003))
    assert found.verdict.word == "passed"
    assert "+0.0020 nats over 3 seeds" in found.verdict.reason
    assert "at most +0.0037 at 95%, margin 0.01" in found.verdict.reason
    assert found.difference is not None
    assert found.difference.upper == pytest.approx(0.002 + 2.91999 * 0.001 / math.sqrt(3))
    assert dict(found.values) == pytest.approx({0: 0.001, 1: 0.002, 2: 0.003})


def test_a_large_difference_fails() -> None:
    found = against(shifted(0.030, 0.031, 0.032))
    assert found.verdict.word == "failed"
    # 0.031 - 2.91999 * 0.001 / sqrt(3) = 0.029314
    assert "at least +0.0293 at 95%" in found.verdict.reason


def test_a_better_loss_passes() -> None:
    assert against(shifted(-0.5, -0.5, -0.501)).verdict.word == "passed"


def test_a_wide_spread_is_unknown_with_the_seeds_and_the_command_that_settle_it() -> None:
    found = against(shifted(-0.010, 0.0, 0.010))
    # Bounds 0 +- 2.91999 * 0.01 / sqrt(3) = 0.016859 hold the margin.
    assert found.verdict.word == "unknown"
    assert (
        "the bounds -0.0169 and +0.0169 (95% each) enclose the margin 0.01" in found.verdict.reason
    )
    assert found.verdict.seeds is not None and found.verdict.seeds > 3
    assert list(found.verdict.commands) == [
        f"python -m runner -m precision=fp32,bf16 batch=8 'seed=range(3,{found.verdict.seeds})'"
    ]


def test_one_seed_is_unknown_and_asks_for_three() -> None:
    found = only(compare(pairs([3.0], [3.0])))
    assert found.verdict.word == "unknown"
    assert "one seed has no spread" in found.verdict.reason
    assert found.verdict.seeds == 3
    assert found.verdict.commands[0].endswith("seed=1,2")
    assert {r.outcome for r in found.ratios.values()} == {"one seed"}
    assert all(r.low is None for r in found.ratios.values())


def test_a_margin_of_the_command_replaces_the_default() -> None:
    runs = pairs(BASE, shifted(0.030, 0.031, 0.032))
    assert only(compare(runs, quality={"margin": 0.05})).verdict.word == "passed"


def test_the_rule_comes_from_the_baselines_configuration() -> None:
    rule = {"quality": {"margin": 0.05, "confidence": 0.9, "min_effect": 0.02}}
    runs = [
        *(run("precision=fp32", s, loss, config=rule) for s, loss in enumerate(BASE)),
        *(run("precision=bf16", s, loss + 0.03, config=BF16) for s, loss in enumerate(BASE)),
    ]
    found = compare(runs)
    assert found.quality == Quality(margin=0.05, confidence=0.9, min_effect=0.02)
    assert only(found).verdict.word == "passed"


def test_equal_differences_are_judged_by_their_value() -> None:
    assert against(shifted(0.0, 0.0, 0.0)).verdict.word == "passed"
    exact = only(compare(pairs([2.0, 2.25, 2.5], [2.25, 2.5, 2.75])))
    assert exact.difference is not None and exact.difference.stdev == 0.0
    assert exact.verdict.word == "failed"


def test_seeds_that_repeat_one_run_are_no_repeats() -> None:
    found = only(compare(pairs([3.0, 3.0, 3.0], [3.001, 3.001, 3.001])))
    assert found.verdict.word == "unknown"
    assert "no repeats" in found.verdict.reason


def test_only_seeds_of_both_sides_are_paired_and_the_rest_is_named() -> None:
    comparison = compare(pairs(BASE, [3.001, 3.102]))
    found = only(comparison)
    assert found.difference is not None and found.difference.count == 2
    assert any("seed 2 is there on one side only" in note for note in comparison.notes)


def test_no_common_seed_is_unknown_with_the_seeds_that_are_missing() -> None:
    runs = [run("precision=fp32", 0), run("precision=bf16", 1, config=BF16)]
    found = only(compare(runs))
    assert found.verdict.word == "unknown"
    assert "baseline seed 0, this setup seed 1" in found.verdict.reason
    assert found.verdict.commands[0].endswith("seed=0,1,2")


# --- runs that did not end well ---------------------------------------------------------------


def test_one_diverged_seed_makes_the_setup_diverged_whatever_the_others_say() -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    runs[-1] = run(
        "precision=bf16", 2, None, status="diverged", message="loss not finite", config=BF16
    )
    found = only(compare(runs))
    assert found.verdict.word == "diverged"
    assert found.verdict.reason == "seed 2: loss not finite"
    assert not found.ratios


def test_a_held_out_loss_that_is_no_number_is_diverged_although_the_run_ended_ok() -> None:
    lost = {"evaluation": {"last": None, "last_nonfinite": "nan", "tokens": 500}}
    assert against([3.0, 3.1, None], **lost).verdict.word == "diverged"


@pytest.mark.parametrize(
    ("status", "words"),
    [("error", "error: it broke"), ("oom", "out of memory: it broke")],
)
def test_a_failed_seed_is_an_error_with_its_message(status: str, words: str) -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    runs[-1] = run("precision=bf16", 2, None, status=status, message="it broke", config=BF16)
    found = only(compare(runs))
    assert found.verdict.word == "error"
    assert found.verdict.reason == f"{words} (seed 2)"
    assert not any(r.outcome == "win" for r in found.ratios.values())


def test_a_run_that_failed_before_its_workload_was_known_joins_its_setup() -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    runs[-1] = replace(
        runs[-1],
        record=replace(runs[-1].record, status="error", message="no data", workload_id=None),
    )
    comparison = compare(runs)
    assert [len(s.runs) for s in comparison.setups] == [3, 3]
    assert only(comparison).verdict.reason == "error: no data (seed 2)"


def test_a_killed_seed_counts_nowhere_and_is_named() -> None:
    runs = pairs(BASE, shifted(0.001, 0.002, 0))
    runs[-1] = run("precision=bf16", 2, None, status="killed", message="SIGTERM", config=BF16)
    comparison = compare(runs)
    found = only(comparison)
    assert found.difference is not None and found.difference.count == 2
    assert any("seed 2 did not finish" in note for note in comparison.notes)


def test_a_run_without_an_evaluation_is_unchecked() -> None:
    assert against([None, None, None]).verdict.word == "unchecked"


def test_a_failed_baseline_judges_nobody() -> None:
    runs = [
        run("precision=fp32", 0, None, status="error", message="it broke"),
        run("precision=bf16", 0, config=BF16),
    ]
    comparison = compare(runs)
    assert only(comparison).verdict.word == "unchecked"
    assert not only(comparison).ratios
    assert any("the baseline failed with seed 0" in note for note in comparison.notes)


def test_a_seed_that_ran_again_counts_once_with_its_last_run() -> None:
    runs = pairs(BASE, shifted(0.001, 0.002, 0.003))
    runs.append(run("precision=bf16", 0, 3.5, config=BF16))
    comparison = compare(runs)
    assert dict(only(comparison).values)[0] == pytest.approx(0.5)
    assert any("ran more than once" in note for note in comparison.notes)


def test_a_loss_that_is_not_finite_is_named_although_the_run_went_on() -> None:
    bad = [update(1), update(2, loss=math.nan), update(3), update(4)]
    comparison = compare(pairs(BASE, shifted(0, 0, 0), journal=bad))
    assert any("1 attempt with seed 0 had a loss that is not finite" in n for n in comparison.notes)
    curve = comparison.setups[1].train
    assert curve is not None and None in curve.mean
    json.loads(dumps(asdict(comparison)))


# --- comparability ----------------------------------------------------------------------------


def test_other_work_is_incomparable_and_the_keys_that_differ_are_named() -> None:
    found = against(shifted(0, 0, 0), config={"updates": 5, "seq_len": 64})
    assert found.verdict.word == "incomparable"
    assert "seq_len: 64 against 32" in found.verdict.reason
    assert "updates: 5 against 4" in found.verdict.reason
    assert found.difference is None and not found.ratios and not found.values


def test_another_corpus_is_incomparable_although_the_configuration_is_equal() -> None:
    found = against(shifted(0, 0, 0), corpus="badcafe")
    assert found.verdict.word == "incomparable"
    assert "corpus: badcafe against c0ffee" in found.verdict.reason


def test_fewer_applied_updates_are_incomparable() -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    short = {**runs[-1].record.summary, "updates_applied": 3.0}
    runs[-1] = replace(runs[-1], record=replace(runs[-1].record, summary=short))
    found = only(compare(runs))
    assert found.verdict.word == "incomparable"
    assert "applied updates with seed 2: 3 against 4" in found.verdict.reason


def confounded(what: str, found: Contrast) -> bool:
    assert found.verdict.word == "confounded", found.verdict
    assert not found.ratios and found.difference is None
    return what in found.verdict.reason


def test_another_attention_operator_than_declared_is_confounded() -> None:
    runs = [
        *(
            run("accum=1", s, x, evidence={"attention_operators": ["flash"]})
            for s, x in enumerate(BASE)
        ),
        *(
            run("accum=2", s, x, config={"accum": 2}, evidence={"attention_operators": ["math"]})
            for s, x in enumerate(BASE)
        ),
    ]
    assert confounded("attention operator: math against flash", only(compare(runs)))


def test_an_attention_operator_that_is_declared_to_vary_is_not_confounded() -> None:
    memory = {"memory": {"attention": {"_target_": "runner.memory.loss.Full", "kernel": "math"}}}
    runs = [
        *(
            run("a=1", s, x, evidence={"attention_operators": ["flash"]})
            for s, x in enumerate(BASE)
        ),
        *(
            run("a=2", s, x, config=memory, evidence={"attention_operators": ["math"]})
            for s, x in enumerate(BASE)
        ),
    ]
    assert only(compare(runs)).verdict.word == "passed"


def test_other_operands_or_initial_weights_than_declared_are_confounded() -> None:
    def against_accum(**noted: Any) -> Contrast:
        own = {name: value for name, (_, value) in noted.items()}
        other = {name: value for name, (value, _) in noted.items()}
        return only(
            compare(
                [
                    run("accum=1", 0, 3.0, evidence=other),
                    run("accum=2", 0, 3.0, config={"accum": 2}, evidence=own),
                ]
            )
        )

    half, full = {"bfloat16 x bfloat16": 10}, {"float32 x float32": 10}
    found = against_accum(product_flops_by_operands=(full, half))
    assert confounded("products: bfloat16 x bfloat16 against float32 x float32", found)
    more = {"float32 x float32": 20}
    assert against_accum(product_flops_by_operands=(full, more)).verdict.word == "passed"
    assert confounded("initial weights: b against a", against_accum(initial_weights=("a", "b")))


def test_tf32_that_no_recipe_declares_is_confounded_and_with_a_recipe_it_is_not() -> None:
    tf32 = {"controls": {"cuda.matmul.fp32_precision": "tf32"}}
    assert against(shifted(0, 0, 0), evidence=tf32).verdict.word == "passed"
    runs = [
        *(run("accum=1", s, x) for s, x in enumerate(BASE)),
        *(run("accum=2", s, x, config={"accum": 2}, evidence=tf32) for s, x in enumerate(BASE)),
    ]
    reason = "cuda.matmul.fp32_precision tf32 against ieee"
    assert confounded(reason, only(compare(runs)))


def test_another_effective_batch_than_declared_is_confounded() -> None:
    found = against(shifted(0, 0, 0), sizes={"global_batch": 4})
    assert confounded("global batch: 4 against 8", found)


def test_another_count_of_the_same_tokens_is_confounded() -> None:
    journal = [update(1), update(2, tokens=Counts(useful=101, nonpad=108, slots=120))]
    found = against(shifted(0, 0, 0), journal=journal)
    assert confounded("101 useful tokens against 100 (attempt 2, seed 0)", found)


def test_other_examples_in_an_update_are_confounded() -> None:
    found = against(shifted(0, 0, 0), journal=[update(1, examples=7)])
    assert confounded("7 examples against 8 (attempt 1, seed 0)", found)


def test_a_batching_that_declares_to_reorder_may_draw_other_tokens_but_as_many_examples() -> None:
    other = [update(1, tokens=Counts(useful=90, nonpad=99, slots=99))]
    close = {"numerics": {"batching": "close"}}
    assert against(shifted(0, 0, 0), journal=other, evidence=close).verdict.word == "passed"
    fewer = [replace(other[0], examples=7)]
    found = against(shifted(0, 0, 0), journal=fewer, evidence=close)
    assert confounded("7 examples against 8", found)


def test_more_padding_is_not_another_counting_rule() -> None:
    padded = [update(n, tokens=Counts(useful=100, nonpad=108, slots=200)) for n in range(1, 5)]
    assert against(shifted(0, 0, 0), journal=padded).verdict.word == "passed"


def test_another_device_is_confounded() -> None:
    device = {"type": "cpu", "name": "Test CPU", "threads": 1}
    found = against(
        shifted(0, 0, 0), environment={"packages": {"torch": "2.13.0"}, "device": device}
    )
    assert confounded("device: threads 1 against 2", found)


# --- speed and memory -------------------------------------------------------------------------


def timed(
    steps: tuple[float, ...], *, losses: tuple[float, ...] = BASE, peak: float = 1e9
) -> Contrast:
    """bf16 runs of these step times against fp32 runs of 0.1 s and 1e9 bytes."""
    runs = [run("precision=fp32", s, x) for s, x in enumerate(BASE)]
    for seed, (step, loss) in enumerate(zip(steps, losses, strict=True)):
        runs.append(run("precision=bf16", seed, loss, step=step, peak=peak, config=BF16))
    return only(compare(runs))


def test_a_clear_speed_up_of_a_passed_setup_is_a_win_with_its_interval() -> None:
    found = timed((0.050, 0.0505, 0.051)).ratios
    ratio = found["step_s_median"]
    logs = [math.log(x) for x in (0.5, 0.505, 0.51)]
    mean = sum(logs) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert ratio.value == pytest.approx(math.exp(mean))
    assert ratio.outcome == "win" and found["useful_tokens_per_s"].outcome == "win"
    # Three ratios; memory (no difference at all, p = 1) comes last. Step time and rate have
    # equal p values, so the first is held to 0.05 / 3: t(1 - 0.05 / 6, 2) = 7.6488.
    assert ratio.level == pytest.approx(1 - 0.05 / 3)
    assert ratio.low == pytest.approx(math.exp(mean - 7.6488 * error), rel=1e-4)
    assert ratio.high == pytest.approx(math.exp(mean + 7.6488 * error), rel=1e-4)
    assert found["useful_tokens_per_s"].value == pytest.approx(1 / ratio.value)


def test_the_same_speed_up_without_passed_quality_is_a_figure_and_no_win() -> None:
    found = timed((0.050, 0.0505, 0.051), losses=(3.03, 3.131, 2.932))
    assert found.verdict.word == "failed"
    assert found.ratios["step_s_median"].outcome == "better"
    assert found.ratios["step_s_median"].value == pytest.approx(0.505, rel=1e-3)


def test_a_clear_slow_down_is_worse() -> None:
    found = timed((0.2, 0.202, 0.204)).ratios
    assert found["step_s_median"].outcome == "worse"
    assert found["useful_tokens_per_s"].outcome == "worse"


def test_noise_is_not_distinguishable() -> None:
    found = timed((0.05, 0.1, 0.2)).ratios["step_s_median"]
    assert found.low is not None and found.high is not None
    assert found.low < 1 < found.high
    assert found.outcome == "not distinguishable"


def test_eight_bytes_less_memory_are_no_win_although_the_interval_is_clear_of_one() -> None:
    found = timed((0.1, 0.1, 0.1), peak=1e9 - 8).ratios["peak_allocated_bytes"]
    assert found.high is not None and found.high < 1
    assert found.outcome == "not distinguishable"


def test_half_the_memory_without_any_spread_is_a_win() -> None:
    found = timed((0.1, 0.1, 0.1), peak=0.5e9).ratios["peak_allocated_bytes"]
    assert found.value == pytest.approx(0.5)
    assert found.outcome == "win"


def test_more_setups_need_stronger_evidence_for_the_same_win() -> None:
    # Logs -0.1054, -0.0998, -0.0726: t = 9.2. Alone the step time is held to 0.05 / 3, which is
    # t = 7.65; first of 8 setups x 3 figures, to 0.05 / 24, t = 21.9.
    steps = (0.0900, 0.0905, 0.0930)
    alone = timed(steps).ratios["step_s_median"]
    assert alone.outcome == "win"
    runs = [run("precision=fp32", s, x) for s, x in enumerate(BASE)]
    for option in range(8):
        config = {"precision": {**BF16["precision"], "dtype": f"other{option}"}}
        for seed, loss in enumerate(BASE):
            step = steps[seed] if option == 0 else (0.1, 0.099, 0.101)[(seed + option) % 3]
            runs.append(run(f"precision=p{option}", seed, loss, step=step, config=config))
    many = compare(runs).contrasts[0].ratios["step_s_median"]
    assert many.value == pytest.approx(alone.value)
    assert many.outcome == "not distinguishable"


def test_an_emulated_setup_has_no_time_and_no_ratio_of_times() -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    for place in (3, 4, 5):
        record = runs[place].record
        config = {**record.config, "emulate": True}
        runs[place] = replace(runs[place], record=replace(record, config=config))
    comparison = compare(runs)
    assert not only(comparison).ratios
    assert any("no time and no ratio of memory" in note for note in comparison.notes)
    assert only(comparison).reach is None
    row = comparison.setups[1]
    assert row.emulated and not row.phases
    assert not {"step_s_median", "useful_tokens_per_s"} & set(row.figures)
    assert "step_s_median" not in row.runs[0].figures
    assert row.figures["peak_allocated_bytes"] == 1e9
    assert row.train is not None and not row.train.seconds


def test_a_recipe_that_ignored_emulate_keeps_its_times() -> None:
    runs = pairs(BASE, shifted(0, 0, 0))
    for place in (3, 4, 5):
        record = runs[place].record
        config = {**record.config, "emulate": True}
        environment = {**record.environment, "emulated": False}
        record = replace(record, config=config, environment=environment)
        runs[place] = replace(runs[place], record=record)
    comparison = compare(runs)
    assert set(only(comparison).ratios) >= {"step_s_median", "peak_allocated_bytes"}
    assert not comparison.setups[1].emulated


@pytest.mark.parametrize(
    ("compiled", "compute", "note"),
    [("off", "fp8", "eager"), ("default", "fp8", ""), ("off", "bf16", ""), ("off", "fp4", "eager")],
)
def test_a_speed_ratio_of_narrow_products_from_an_eager_run_says_so(
    compiled: str, compute: str, note: str
) -> None:
    evidence = {"formats": {**FP32_FORMATS, "compute": compute}}
    runs = [run("precision=fp32", seed, loss) for seed, loss in enumerate(BASE)]
    config = {**BF16, "compile": compiled}
    runs += [
        run("precision=x", seed, loss, step=0.05, config=config, evidence=evidence)
        for seed, loss in enumerate(BASE)
    ]
    comparison = compare(runs, axes={"precision": ["fp32", "x"], "seed": ["0", "1", "2"]})
    ratios = only(comparison).ratios
    assert ratios["step_s_median"].note == ratios["useful_tokens_per_s"].note == note
    assert ratios["peak_allocated_bytes"].note == ""
    header, rows = speed_table(comparison)
    shown = dict(zip(header, rows[1], strict=True))["ratio (interval)"]
    assert shown.startswith("0.500×") and shown.endswith(" eager") == bool(note)
    assert any("`eager` means" in text for text in comparison.notes) == bool(note)


# --- same numerics ----------------------------------------------------------------------------


def accumulated(gap: float, at: int = 3, *, held_out: float = 0.0, **changes: Any) -> Contrast:
    """One seed of accum=2 whose loss differs by `gap` in one update, against accum=1."""
    journal = [update(n, loss=2.0 + gap * (n == at)) for n in range(1, 5)]
    two = {**changes.pop("config", {}), "accum": 2}
    runs = [
        run("accum=1", 0, 3.0, config=changes.pop("base", {}), **changes),
        run("accum=2", 0, 3.0 + held_out, config=two, journal=journal, **changes),
    ]
    return only(compare(runs))


def test_accumulation_in_fp32_passes_by_its_curve_with_one_seed() -> None:
    found = accumulated(0.9e-4)
    assert found.verdict.word == "passed"
    assert "9e-05 (update 3, seed 0); allowed 0.0001" in found.verdict.reason


def test_accumulation_in_fp32_fails_by_one_update_that_differs() -> None:
    found = accumulated(1.1e-4)
    assert found.verdict.word == "failed"
    assert "0.00011 (update 3, seed 0)" in found.verdict.reason


def test_an_equal_curve_with_another_held_out_loss_fails() -> None:
    found = accumulated(0.0, held_out=0.002)
    assert found.verdict.word == "failed"
    assert "0.002 (update 4, seed 0)" in found.verdict.reason


def test_accumulation_with_dropout_or_in_another_format_is_judged_by_the_margin() -> None:
    dropout = {"model": {"_target_": "models.gpt.GPT", "layers": 1, "dropout": 0.1}}
    assert accumulated(1.1e-4, base=dropout, config=dropout).verdict.word == "unknown"
    bf16 = {"formats": {"storage": "fp32", "compute": "bf16"}}
    assert accumulated(1.1e-4, evidence=bf16).verdict.word == "unknown"


@pytest.mark.parametrize(("numerics", "word"), [("same", "failed"), ("close", "passed")])
def test_a_lever_is_held_to_what_it_declares(numerics: str, word: str) -> None:
    memory = {"memory": {"loss": {"_target_": "runner.memory.loss.Full", "chunk": 2}}}
    noted = {"numerics": {"memory.loss": numerics}}
    journal = [update(n, loss=2.001) for n in range(1, 5)]
    runs = [
        *(run("chunk=1", s, x, evidence=noted) for s, x in enumerate(BASE)),
        *(
            run("chunk=2", s, x, config=memory, evidence=noted, journal=journal)
            for s, x in enumerate(BASE)
        ),
    ]
    assert only(compare(runs)).verdict.word == word


# --- setups, baselines, pairs -----------------------------------------------------------------


def test_the_baseline_is_the_first_value_typed_whatever_ran_first() -> None:
    runs = list(reversed(pairs(BASE, BASE)))
    axes = {"precision": ["fp32", "bf16"], "seed": ["0", "1", "2"]}
    comparison = compare(runs, axes=axes)
    assert comparison.baseline == "precision=fp32"
    assert [s.name for s in comparison.setups] == ["precision=fp32", "precision=bf16"]
    assert compare(runs).baseline == "precision=bf16"


def test_a_missing_default_baseline_is_not_replaced_by_another_setup() -> None:
    axes = {"precision": ["fp8", "fp32", "bf16"]}
    comparison = compare(pairs(BASE, BASE), axes=axes)
    assert comparison.baseline is None
    assert [c.verdict.word for c in comparison.contrasts] == ["unchecked", "unchecked"]
    assert "precision=fp8" in comparison.contrasts[0].verdict.reason
    assert any(note.startswith("precision=fp8: no run is known") for note in comparison.notes)


@pytest.mark.parametrize("words", ["precision=bf16", "precision.dtype=bfloat16"])
def test_another_baseline_can_be_named(words: str) -> None:
    comparison = compare(pairs(BASE, shifted(0.1, 0.1, 0.1)), baseline=words)
    assert comparison.baseline == "precision=bf16"
    found = only(comparison)
    assert found.setup == "precision=fp32"
    assert found.difference is not None and found.difference.mean == pytest.approx(-0.1)


def test_a_baseline_that_no_run_is_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        compare(pairs(BASE, BASE), baseline="precision=fp64")
    (fault,) = caught.value.faults
    assert fault.key == "baseline" and fault.given == "precision=fp64"
    assert fault.allowed == "precision=fp32; precision=bf16"


def grid() -> list[ComparedRun]:
    """precision x accum, three seeds; 4 setups."""
    return [
        run(
            f"precision={p} accum={a}",
            seed,
            loss,
            config={**(BF16 if p == "bf16" else {}), "accum": a},
        )
        for seed, loss in enumerate(BASE)
        for p in ("fp32", "bf16")
        for a in (1, 4)
    ]


def test_with_two_keys_pairs_that_differ_in_one_key_are_compared_too() -> None:
    comparison = compare(grid())
    assert comparison.baseline == "precision=fp32 accum=1"
    assert [c.setup for c in comparison.contrasts] == [
        "precision=fp32 accum=4",
        "precision=bf16 accum=1",
        "precision=bf16 accum=4",
    ]
    assert [(c.baseline, c.setup) for c in comparison.pairs] == [
        ("precision=fp32 accum=4", "precision=bf16 accum=4"),
        ("precision=bf16 accum=1", "precision=bf16 accum=4"),
    ]


def test_a_setup_that_differs_in_two_keys_gets_a_command_for_each_side() -> None:
    command = ("python", "-m", "runner", "-m", "precision=fp32,bf16", "accum=1,4", "seed=0")
    runs = [replace(r, record=replace(r.record, command=command)) for r in grid() if r.seed == 0]
    last = compare(runs).contrasts[-1].verdict
    assert list(last.commands) == [
        "python -m runner -m precision=fp32 accum=1 seed=1,2",
        "python -m runner -m precision=bf16 accum=4 seed=1,2",
    ]
    one = compare(runs).contrasts[1].verdict
    assert list(one.commands) == ["python -m runner -m precision=fp32,bf16 accum=1 seed=1,2"]


def test_one_setup_under_two_names_stays_two_setups() -> None:
    runs = [
        run(f"warmup={w}", seed, loss, config={"warmup": w})
        for w in (1, 2)
        for seed, loss in enumerate(BASE)
    ]
    found = only(compare(runs))
    assert (found.baseline, found.setup) == ("warmup=1", "warmup=2")
    assert found.verdict.word == "passed"


def test_runs_of_two_sweeps_of_one_setup_are_its_repeats() -> None:
    runs = [*pairs(BASE[:2], BASE[:2])]
    runs.append(run("precision=fp32 batch=8", 2, 2.9, swept={}))
    runs.append(run("precision=bf16 batch=8", 2, 2.9, swept={}, config=BF16))
    comparison = compare(runs)
    assert [[r.seed for r in s.runs] for s in comparison.setups] == [[0, 1, 2], [0, 1, 2]]


def test_names_hold_only_what_tells_setups_apart() -> None:
    runs = [
        run("batch=8 precision=fp32", 0, swept={}),
        run("batch=8 precision=bf16", 0, swept={}, config=BF16),
    ]
    assert [s.name for s in compare(runs).setups] == ["precision=fp32", "precision=bf16"]


def test_no_runs_are_refused() -> None:
    with pytest.raises(UserError, match="runs"):
        compare([])


# --- figures ----------------------------------------------------------------------------------


def test_a_rows_figures_are_medians_over_seeds_and_the_mean_of_losses() -> None:
    steps = (0.1, 0.2, 0.6)
    runs = [
        run("precision=fp32", s, x, step=step)
        for s, (x, step) in enumerate(zip(BASE, steps, strict=True))
    ]
    (row,) = compare(runs).setups
    assert row.figures["step_s_median"] == 0.2
    assert row.figures["eval_loss"] == pytest.approx(3.0)
    assert row.phases["forward"] == pytest.approx(0.3 / 6)
    assert row.conditions["global_batch"] == 8 and row.conditions["seq_len"] == 32


def test_the_time_to_the_baselines_loss_uses_training_loss_where_held_out_losses_are_few() -> None:
    base = [update(n, loss=loss) for n, loss in enumerate((4.0, 3.0, 2.0, 1.0), 1)]
    fast = [update(n, loss=x, total=0.05) for n, x in enumerate((4.0, 3.0, 2.0, 1.0), 1)]
    runs = [
        run("precision=fp32", 0, journal=base),
        run("precision=bf16", 0, config=BF16, journal=fast),
    ]
    found = only(compare(runs)).reach
    assert found is not None
    # The window of 20 holds the whole run: its only smoothed value is at update 4.
    assert (found.quantity, found.reached, found.seeds) == ("training loss", 1, 1)
    assert found.seconds == pytest.approx(0.2) and found.baseline_seconds == pytest.approx(0.4)


def test_the_time_to_the_baselines_loss_uses_held_out_losses_where_there_are_enough() -> None:
    def journal(losses: tuple[float, ...], total: float) -> list[Any]:
        lines: list[Any] = [evaluation(0, losses[0])]
        for n, loss in enumerate(losses[1:], 1):
            lines += [update(n, total=total), evaluation(n, loss)]
        return lines

    runs = [
        run("precision=fp32", 0, journal=journal((5, 4, 3, 2, 1.5), 0.1)),
        run("precision=bf16", 0, config=BF16, journal=journal((5, 3, 1.505, 1.2, 1.1), 0.2)),
    ]
    found = only(compare(runs)).reach
    assert found is not None and found.quantity == "held-out loss"
    assert found.baseline_seconds == pytest.approx(0.4)
    assert found.seconds == pytest.approx(0.4)  # 1.5 + 0.01 after two updates of 0.2 s


def test_a_setup_that_never_gets_to_the_baselines_loss_has_no_time() -> None:
    runs = [
        run("precision=fp32", 0, journal=[update(n, loss=1.0) for n in range(1, 5)]),
        run("precision=bf16", 0, config=BF16, journal=[update(n, loss=2.0) for n in range(1, 5)]),
    ]
    found = only(compare(runs)).reach
    assert found is not None and found.seconds is None and found.reached == 0


def test_a_training_curve_weighs_losses_by_useful_tokens_and_bands_over_seeds() -> None:
    def journal(shift: float) -> list[Any]:
        return [
            update(n, loss=n + shift, tokens=Counts(useful=n, nonpad=n, slots=n))
            for n in range(1, 31)
        ]

    runs = [run("precision=fp32", seed, journal=journal(float(seed))) for seed in (0, 1)]
    curve = compare(runs).setups[0].train
    assert curve is not None and curve.update[0] == 20 and curve.update[-1] == 30
    # sum n^2 / sum n over n = 1..20 is (2 * 20 + 1) / 3.
    assert curve.low[0] == pytest.approx(41 / 3)
    assert curve.high[0] == pytest.approx(41 / 3 + 1)
    assert curve.mean[0] == pytest.approx(41 / 3 + 0.5)
    assert curve.seconds[0] == pytest.approx(2.0)


def test_a_lost_loss_breaks_only_the_windows_that_hold_it() -> None:
    journal = [update(n, loss=math.nan if n == 5 else 2.0) for n in range(1, 31)]
    curve = compare([run("precision=fp32", 0, journal=journal)]).setups[0].train
    assert curve is not None
    # Windows of 20 end at updates 20 to 30; those up to 24 hold update 5.
    assert list(curve.update) == list(range(20, 31))
    assert list(curve.mean) == [None] * 5 + [2.0] * 6


def test_the_distance_from_the_baseline_is_paired_by_seed() -> None:
    runs = [
        run(f"precision={name}", seed, journal=[update(1, loss=seed + shift)], config=config)
        for name, config, shift in (("fp32", {}, 1.0), ("bf16", BF16, 1.25))
        for seed in (0, 1)
    ]
    gap = only(compare(runs)).gap
    assert gap is not None
    assert (list(gap.mean), list(gap.low), list(gap.high)) == ([0.25], [0.25], [0.25])


def test_the_whole_comparison_is_json() -> None:
    found = json.loads(dumps(asdict(compare(grid()))))
    assert found["schema_version"] == 1
    assert found["contrasts"][0]["verdict"]["word"] == "passed"
    assert COMMAND[0] == "python"
