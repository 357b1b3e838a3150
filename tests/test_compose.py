"""Tests of runner/compose.py: whole commands, before anything is started or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.compose import Command, command_of
from runner.contracts import Fault, UserError
from runner.door import parser


def composed(*words: str, launch: Path = Path("/tmp/nowhere")) -> Command:
    return command_of(parser().parse_args(list(words)), launch)


def faults(*words: str, launch: Path = Path("/tmp/nowhere")) -> list[Fault]:
    with pytest.raises(UserError) as caught:
        composed(*words, launch=launch)
    return list(caught.value.faults)


def fault(*words: str) -> Fault:
    (only,) = faults(*words)
    return only


def test_one_job_has_its_overrides_in_its_config_and_its_name() -> None:
    (plan,) = composed("precision=bf16", "accum=4").jobs
    assert plan.config["precision"]["dtype"] == "bfloat16"
    assert (plan.config["accum"], plan.config["batch"]) == (4, 16)
    assert plan.setup == "precision=bf16 accum=4"


def test_a_setup_always_has_a_name_and_the_seed_is_no_part_of_it() -> None:
    assert composed().jobs[0].setup == "precision=fp32"
    assert composed("seed=3", "tracking=off").jobs[0].setup == "precision=fp32"


def test_seeds_are_the_outer_loop_so_that_repeats_interleave() -> None:
    command = composed("-m", "precision=fp32,bf16", "seed=0,1", "updates=3")
    order = [(plan.config["seed"], plan.setup) for plan in command.jobs]
    names = ["precision=fp32 updates=3", "precision=bf16 updates=3"]
    assert order == [(seed, name) for seed in (0, 1) for name in names]
    assert list(command.axes) == ["precision", "seed"]
    assert command.axes["precision"] == ["fp32", "bf16"]


def test_jobs_of_a_sweep_have_folders_of_their_own() -> None:
    command = composed("-m", "accum=1,2,4")
    assert len({plan.folder for plan in command.jobs}) == 3
    assert composed().folder != composed().folder  # two commands in the same second


def test_a_sweep_over_two_lists_has_two_jobs_not_five() -> None:
    command = composed("-m", "allow=[a,b],[c]")
    assert [plan.config["allow"] for plan in command.jobs] == [["a", "b"], ["c"]]


def test_a_nested_lever_can_be_swept() -> None:
    command = composed("-m", "memory/gradients=none,zero")
    assert [p.config["memory"]["gradients"]["clear"] for p in command.jobs] == ["none", "zero"]
    assert command.jobs[1].setup == "memory/gradients=zero"


def test_one_message_per_fault_of_a_whole_sweep() -> None:
    found = fault("-m", "precision=fp32,fp16", "accum=1,3", "batch=16")
    assert found.key == "accum"
    assert found.given == "3 (in 2 of 4 jobs)"
    assert found.allowed == "a divisor of batch=16 (1, 2, 4, 8, 16)"


def test_faults_of_all_kinds_come_together() -> None:
    keys = {f.key for f in faults("accum=3", "optimizer.lr=fast", "device=tpu", "seq_len=9999")}
    assert keys == {"accum", "optimizer.lr", "device"}  # shapes need parts that can be built
    assert {f.key for f in faults("accum=3", "seq_len=9999")} == {"accum", "seq_len"}


@pytest.mark.parametrize(
    ("word", "key", "part"),
    [
        ("precision=bf61", "precision", "bf16 (nearest)"),
        ("acum=4", "acum", "accum"),
        ("+acum=4", "acum", "accum"),
        ("+optimizer.lrr=1", "optimizer.lrr", "lr (nearest)"),
        ("optimizer.lrr=1", "optimizer.lrr", "optimizer.lr"),
        ("accum=two", "accum", "int"),
        ("accum=true", "accum", "integer"),
        ("accum=0", "accum", "1"),
        ("batch=-4", "batch", "from 1"),
        ("model.vocab=???", "model.vocab", "a value"),
        ("updates=null", "updates, epochs", "exactly one"),
        ("epochs=2", "updates, epochs", "exactly one"),
        ("model.width=31", "model.width", "multiple of heads"),
        ("clip=0", "clip", "positive"),
        ("quality.confidence=1", "quality.confidence", "below 1"),
        ("process=thread", "process", "fresh, inline"),
        ("~memory/gradients", "memory/gradients", "exactly one"),
        ("+memory.extra=1", "memory.extra", "_target_"),
    ],
)
def test_a_mistake_names_its_key_and_what_is_allowed(word: str, key: str, part: str) -> None:
    found = fault(word)
    assert found.key == key
    assert part in found.allowed
    assert found.next_step


def test_keys_of_the_chosen_option_are_no_mistake_beside_one_that_is() -> None:
    """`data.files` is there with data=jsonl only, and so is the key that was meant."""
    good = ["data=jsonl", "data/tokenizer=bpe", "data.tokenizer.size=300", "data.files=x"]
    (found,) = faults(*good, "data.fils=y", "data.on_bad=skip")
    assert (found.key, found.given) == ("data.fils", "data.fils=y")
    assert found.allowed.startswith("data.files")
    (found,) = faults("data=csv", "data.files=x", "data.streaming=true")
    assert found.key == "data.streaming"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("precision=null", "precision: given null; allowed: another value (Config group override"),
        ("optimizer=5", "optimizer: given 5; allowed: another value (Config group override"),
        ("=3", ": given =3; allowed: Hydra's override grammar (there is no key)"),
        ("cache=null", "cache: given null; allowed: another value (field 'cache' is not Optional)"),
        ("cache=", "cache: given ''; allowed: a folder"),
        ("~batch", "batch: given ~batch, which removes it; allowed: a value"),
        ("~compare", "compare: given ~compare, which removes it"),
        ("~eval.examples", "eval.examples: given ~eval.examples; allowed: another value (EvalCon"),
        ("seed=9223372036854775808", "seed: given 9223372036854775808; allowed: up to 922337203"),
        ("batch=99999999999999999999", "batch: given 99999999999999999999; allowed: up to 21474"),
        ("model.init=5", "model.init: given /tmp/nowhere/5; allowed: a run folder"),
    ],
)
def test_what_once_ended_in_a_traceback_or_passed_is_one_message(word: str, said: str) -> None:
    assert str(fault(word)).startswith(said)


def test_a_sweep_without_its_flag_is_refused_with_the_flag() -> None:
    assert "-m" in fault("seed=1,2").next_step


@pytest.mark.parametrize("value", ["a=b", "#x", "~/data", "café", "漢字", "a b", "[q"])
def test_values_that_need_quotes_are_refused_with_help_never_taken_wrongly(value: str) -> None:
    try:
        command = composed(f"cache={value}")
    except UserError as error:
        (found,) = error.faults
        assert found.key == "cache"
        assert "quote" in found.next_step
    else:
        assert command.jobs[0].config["cache"] == value


@pytest.mark.parametrize(
    "value", ["ckpt/epoch=3-step=7.pt", "a,b", "a b", "#x", "~/data", "café", "漢字", "[q,v]"]
)
def test_quoted_values_arrive_unchanged(value: str) -> None:
    (plan,) = composed(f"cache='{value}'").jobs
    assert plan.config["cache"] == value


def test_an_experiment_file_with_a_mistyped_key_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "precision"
    folder.mkdir()
    (folder / "mine.yaml").write_text("_target_: runner.precision.autocast.Autocast\ndtpye: x\n")
    found = faults(f"--config-dir={tmp_path}", "precision=mine")
    assert {f.key for f in found} == {"precision.dtpye", "precision.dtype"}


def test_numbers_in_yaml_files_are_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "optimizer"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "_target_: runner.optimizer.AdamW\nlr: 1e-4\nbetas: [9e-1, 0.999]\neps: 1E-8\n"
    )
    (plan,) = composed(f"--config-dir={tmp_path}", "optimizer=mine").jobs
    node = plan.config["optimizer"]
    assert (node["lr"], node["betas"], node["eps"]) == (0.0001, [0.9, 0.999], 1e-8)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "job.yaml").write_text("taken")
    (found,) = faults("hydra.run.dir=here", launch=tmp_path)
    assert found.key == "hydra.run.dir"
    assert "holds no run" in found.allowed


def test_a_constant_sweep_folder_is_refused() -> None:
    found = fault("-m", "accum=1,2", "hydra.sweep.subdir=same")
    assert found.key == "hydra.sweep.subdir"
    assert "another folder for each job" in found.allowed


def test_a_folder_name_too_long_for_the_file_system_is_refused() -> None:
    assert "255 bytes" in fault(f"hydra.run.dir=runs/{'x' * 300}").allowed


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["hydra.run.dir=taken/by/a/file"], "hydra.run.dir"),
        (["-m", "accum=1,2", "hydra.sweep.dir=taken/by/a/file"], "hydra.sweep.dir"),
    ],
)
def test_a_place_where_no_folder_can_be_made_is_refused_once(
    words: list[str], key: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    (found,) = faults(*words, launch=tmp_path)
    assert found.key == key and found.given.startswith(f"{tmp_path}/taken, which cannot be written")


def test_other_sweepers_are_refused_since_their_jobs_cannot_be_checked_first() -> None:
    found = fault("-m", "accum=1,2", "hydra.sweeper._target_=other.Sweeper")
    assert found.key == "hydra.sweeper"


def test_nothing_is_written_by_composing(tmp_path: Path) -> None:
    composed("-m", "accum=1,2", launch=tmp_path)
    faults("-m", "accum=1,3", launch=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["+eval.evry=3", "+quality.margn=1", "+foo.bar=1"])
def test_keys_added_where_the_schema_has_none_are_refused(word: str) -> None:
    assert fault(word).given == "an unknown key"


def test_a_named_experiment_takes_typed_values_over_its_own_and_needs_the_flag() -> None:
    command = composed("-m", "experiment=accumulation", "accum=1,8", "batch=16")
    assert command.axes == {"seed": ["0", "1", "2"], "accum": ["1", "8"]}
    assert [p.config["accum"] for p in command.jobs] == [1, 8] * 3
    assert fault("experiment=accumulation").next_step == "add -m"


def test_files_that_do_not_compose_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - nothing: here\n")
    found = faults(f"--config-path={tmp_path}")
    assert found[0].allowed.startswith("a configuration that composes")


def test_of_a_key_typed_twice_the_last_value_runs_and_names_the_setup() -> None:
    (plan,) = composed("batch=8", "batch=2").jobs
    assert plan.config["batch"] == 2
    assert plan.setup == "batch=2"
