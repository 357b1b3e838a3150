"""The examples of CONTRIBUTING.md, extracted as they stand, train and do what they say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from runner.assemble import Job, assemble, load_corpus
from runner.checks import build_parts
from runner.compose import Command, command_of
from runner.contracts import UserError
from runner.door import parser
from runner.measure.account import MemoryAccount
from runner.measure.probe import probe
from runner.records import RunRecord, read_journal, updates_of
from runner.step import Outcome, measured_update
from tests.support import Quiet, example
from tests.test_cli import run

PAGE = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
]
OWN = ("--config-dir=my_conf", "allow=[my_parts]")
GPT = ("model.layers=1", "model.width=16", "model.heads=2", "model.positions=64")
SMALL = ("data=pydocs", "seq_len=32", "batch=8", "updates=4", "eval.examples=8")
PAIRS = "2+2=\t4\nfirst\ta\nsecond\tbb\nthird\tccc\nempty\t \nfirst\ta\n"
"""Four rows that can be used, one that predicts nothing and one that is there twice."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a user who typed the examples."""
    folder = tmp_path_factory.mktemp("contributing")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "pairs.tsv").write_text(PAIRS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        yield folder


def composed(*words: str) -> Command:
    return command_of(parser().parse_intermixed_args(list(words)), Path.cwd())


def job_of(corpora: Path, *words: str) -> Job:
    config = composed(*OWN, f"cache='{corpora}'", *SMALL, *words).jobs[0].config
    parts = build_parts(config)
    return assemble(config, parts, torch.device("cpu"), load_corpus(config, parts))


def outcomes(job: Job, updates: int = 3) -> list[Outcome]:
    draws = job.feed.draws()
    return [measured_update(job.training, lambda: next(draws), Quiet()) for _ in range(updates)]


def losses(job: Job, updates: int = 3) -> list[float]:
    return [outcome.figures.tolist()[0] for outcome in outcomes(job, updates)]


def test_the_page_has_an_example_of_each_kind_with_its_module() -> None:
    options = {name for name in FILES if name.endswith(".yaml")}
    groups = {str(Path(name).parent.relative_to("my_conf")) for name in options}
    assert groups == {"precision", "memory/saved", "model", "data", "batching"}
    for name in options:
        module, _, cls = yaml.safe_load(FILES[name])["_target_"].rpartition(".")
        assert f"class {cls}" in FILES[f"{module.replace('.', '/')}.py"]


def test_every_command_of_the_page_is_accepted(written: Path) -> None:
    assert len(COMMANDS) == 6
    for line in COMMANDS:
        program, words = shlex.split(line)[:3], shlex.split(line)[3:]
        assert program == ["python", "-m", "runner"]
        jobs = composed(*words).jobs
        assert len(jobs) == (6 if "-m" in words else 1)
        assert any("my_parts." in str(plan.config) for plan in jobs)


# --- recipe -----------------------------------------------------------------------------------


def test_the_recipe_rounds_to_significant_bits(written: Path) -> None:
    from my_parts.rounded import Rounded

    # Two bits: 1.3 is 0.65 * 2, nearest of 2/4, 3/4, 4/4: 3/4 * 2. 5 lies between 4 and 6; the
    # even one wins.
    given = torch.tensor([1.3, -0.7, 5.0, 0.0, 96.0], requires_grad=True)
    (rounded,) = Rounded(bits=2)._round(torch.nn.Identity(), (given,))
    assert rounded.tolist() == [1.5, -0.75, 4.0, 0.0, 96.0]
    rounded.sum().backward()
    assert given.grad.tolist() == [1.0] * 5


def test_the_recipe_with_all_bits_of_fp32_trains_as_fp32_and_with_two_does_not(
    written: Path, corpora: Path
) -> None:
    plain = losses(job_of(corpora, *GPT, "precision=fp32"))
    full = losses(job_of(corpora, *GPT, "precision=rounded", "precision.bits=24"))
    two = losses(job_of(corpora, *GPT, "precision=rounded", "precision.bits=2"))
    assert full == plain
    assert all(a != b for a, b in zip(two, plain, strict=True))
    assert two == pytest.approx(plain, abs=0.2)


def test_the_recipe_is_out_of_the_way_of_the_held_out_loss(written: Path, corpora: Path) -> None:
    jobs = [job_of(corpora, *GPT, f"precision={name}") for name in ("fp32", "rounded")]
    fp32, rounded = (job.evaluation.run(job.training.model, 0).eval_loss for job in jobs)
    assert fp32 == rounded


def test_the_recipe_refuses_a_setting_by_its_full_key(written: Path) -> None:
    with pytest.raises(UserError, match=r"precision\.bits: given 25; allowed: 1 to 24"):
        composed(*OWN, "precision=rounded", "precision.bits=25")


# --- lever ------------------------------------------------------------------------------------


def waiting(account: MemoryAccount) -> set[tuple[tuple[int, ...], str, int]]:
    """Shape, dtype and bytes of the largest objects that wait for the backward pass."""
    kept = [o for o in account.largest if o.category == "saved_activations"]
    return {(o.shape, o.dtype, o.bytes) for o in kept}


def test_the_lever_halves_what_waits_for_the_backward_pass(written: Path, corpora: Path) -> None:
    words = ("model.layers=4", "model.width=64", "batching=padded_max")
    jobs = job_of(corpora, *words), job_of(corpora, *words, "+memory/saved=half")
    plain, lever = (probe(job.training, job.feed.probes(1))[0] for job in jobs)
    # What GELU saves: 8 examples of 32 slots, 4 * 64 wide.
    assert ((8, 32, 256), "float32", 8 * 32 * 256 * 4) in waiting(plain)
    assert ((8, 32, 256), "bfloat16", 8 * 32 * 256 * 2) in waiting(lever)
    assert not any(dtype == "float32" for _, dtype, _ in waiting(lever))
    kept = plain.at_peak["saved_activations"]
    assert lever.at_peak["saved_activations"] < 0.65 * kept
    assert lever.peak_bytes < plain.peak_bytes - 0.2 * kept
    assert lever.at_peak["parameters"] == plain.at_peak["parameters"]


def test_the_lever_changes_gradients_a_little_and_the_first_loss_not_at_all(
    written: Path, corpora: Path
) -> None:
    plain = losses(job_of(corpora, *GPT))
    lever = losses(job_of(corpora, *GPT, "+memory/saved=half"))
    assert lever[0] == plain[0]
    assert lever[1:] != plain[1:]
    assert lever == pytest.approx(plain, abs=1e-3)


# --- model ------------------------------------------------------------------------------------


def test_the_model_has_the_parameters_that_it_describes(written: Path, corpora: Path) -> None:
    job = job_of(corpora, "model=averages")
    # By hand: 272 * 32 embedding, 12 * 32^2 matrices, 7 * 32 in the block's vectors, 2 * 32 last.
    assert 272 * 32 + 12 * 32**2 + 7 * 32 + 2 * 32 == 21_280
    assert job.parts.model.describe().params == 21_280
    assert sum(p.numel() for p in job.training.model.parameters()) == 21_280
    matrices = [p for p in job.training.model.parameters() if p.ndim == 2]
    assert job.parts.model.describe().matmul_params == sum(p.numel() for p in matrices)


def test_the_model_sees_neither_the_future_nor_another_document(
    written: Path, corpora: Path
) -> None:
    model = job_of(corpora, "model=averages").training.model
    ids = torch.from_numpy(example(12).ids.astype("int64"))[None]
    changed = ids.clone()
    changed[0, 7] = 1
    whole = model.hidden(ids, None, None)
    torch.testing.assert_close(model.hidden(changed, None, None)[:, :7], whole[:, :7])
    assert not torch.allclose(model.hidden(changed, None, None)[:, 8:], whole[:, 8:])
    segments = torch.tensor([[0] * 8 + [1] * 4])
    apart = model.hidden(changed, None, segments)
    torch.testing.assert_close(apart[:, 8:], model.hidden(ids[:, 8:], None, None))


def test_the_model_learns(written: Path, corpora: Path) -> None:
    curve = losses(job_of(corpora, "model=averages", "updates=30", "schedule=constant"), 30)
    assert curve[0] == pytest.approx(5.6, abs=0.3)  # ln 272 = 5.6
    assert curve[-1] < 4


# --- data and batching ------------------------------------------------------------------------


def test_the_pipeline_predicts_completions_and_counts_what_it_leaves_out(
    written: Path, corpora: Path
) -> None:
    words = ("data=pairs", f"data.path='{written}/pairs.tsv'", "data.eval_share=0.5")
    corpus = job_of(corpora, *words).corpus
    found = sorted([*corpus.train, *corpus.eval], key=lambda one: (one.useful, one.length))
    # Of each row the completion's bytes and the end of text are predicted, nothing of the prompt.
    assert [one.useful for one in found] == [2, 2, 3, 4]
    assert [one.length for one in found] == [4 + 2, 5 + 2, 6 + 3, 5 + 4]
    assert bytes(found[0].ids[:-1].tolist()) == b"2+2=4"
    assert dict(corpus.dropped) == {"empty": 1, "duplicates": 1}


def test_the_pipeline_refuses_a_missing_file_and_a_line_without_a_tab(
    written: Path, corpora: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"data\.path: given .*/none.tsv"):
        job_of(corpora, "data=pairs", f"data.path='{tmp_path}/none.tsv'")
    (tmp_path / "bad.tsv").write_text("a\tb\nno tab\n")
    with pytest.raises(UserError, match="given line 2 without a tab"):
        job_of(corpora, "data=pairs", f"data.path='{tmp_path}/bad.tsv'")


@pytest.mark.parametrize("model", ["gpt_tiny", "averages"])
def test_the_batching_gives_the_curve_of_padding_without_a_padded_slot(
    written: Path, corpora: Path, model: str
) -> None:
    lines = (f"{i} {'p' * (i % 7)}\t{'c' * (i % 13 + 1)}" for i in range(64))
    (written / "uneven.tsv").write_text("\n".join(lines))
    words = (f"model={model}", "data=pairs", f"data.path='{written}/uneven.tsv'", "accum=2")
    padded, joined = (
        outcomes(job_of(corpora, *words, f"batching={name}")) for name in ("padded", "joined")
    )
    assert [o.counts.useful for o in joined] == [o.counts.useful for o in padded]
    assert [o.counts.slots for o in joined] == [o.counts.nonpad for o in padded]
    assert sum(o.counts.slots for o in padded) > sum(o.counts.slots for o in joined)
    curves = [[o.figures.tolist()[0] for o in found] for found in (padded, joined)]
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)


# --- all together -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_of_a_user_s_own_parts_runs_from_the_command_line(
    written: Path, corpora: Path
) -> None:
    words = ("data=pairs", "data.path=pairs.tsv", "data.eval_share=0.5", "batching=joined")
    parts = ("model=averages", "precision=rounded", "+memory/saved=half", "tracking=off")
    done = run(written, corpora, *OWN, *SMALL, *words, *parts, "batch=2", "accum=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = [path.parent for path in written.rglob("record.json")]
    record = RunRecord.read(folder)
    assert record is not None
    assert (record.status, record.summary["updates_applied"]) == ("ok", 4)
    assert record.evidence["formats"]["value"]["compute"] == "fp32, inputs rounded"
    updates = updates_of(read_journal(folder / "journal.jsonl"))
    assert all(u.tokens.slots == u.tokens.nonpad for u in updates)
