"""The training loops that are timed: this runner's and three others.

All of them do the same arithmetic on the same weights and examples in the same order: four
micro-batches an update whose summed losses are divided by the targets of all four, gradient norm,
clipping, fused AdamW, a constant rate, the loss read once an update. Each takes its updates from
a `Gate`, which tells them when it is their turn and notes when they asked.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from runner.assemble import assemble
from runner.checks import Parts, build_parts
from runner.compiling import Compilations
from runner.contracts import IGNORE, Corpus, Example, MicroBatch
from runner.feed import Feed
from runner.journal import Journal
from runner.loop import Loop
from runner.measure.clock import clock_for
from runner.optimizer import parameter_groups
from runner.records import JOURNAL
from scripts.overhead.figures import Turn

EXAMPLES = 4096
HELD_OUT = 8


class Over(Exception):
    """There are no more turns."""


class Gate:
    """Hands out the micro-batches of one update after another, when it is the contestant's turn.

    The time between two requests is one whole update, whatever a contestant does in between and
    however far it reads ahead. The pipe brings the number of updates of each turn (0: raise
    Over) and takes the `Turn`; garbage is collected before each turn, outside its time.

    settle: finishes, within the time of a turn's last update, what a contestant put off.
    """

    def __init__(self, pipe: Connection, draws: Iterator[list[MicroBatch]]) -> None:
        self._pipe = pipe
        self._draws = draws
        self._left = 0
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self.kept: list[float] = []
        self.losses: Callable[[], Sequence[float]] = lambda: self.kept
        self.settle: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._left:
            self.settle()
        self._note()
        if not self._left:
            self._next_turn()
        self._left -= 1
        return next(self._draws)

    def _note(self) -> None:
        self._wall.append(perf_counter())
        self._cpu.append(process_time())

    def _next_turn(self) -> None:
        if len(self._wall) > 1:
            wall, cpu = np.diff(self._wall).tolist(), np.diff(self._cpu).tolist()
            self._pipe.send(Turn(wall=wall, cpu=cpu, losses=list(self.losses())))
        self._wall, self._cpu = [], []
        gc.collect()
        self._left = self._pipe.recv()
        if not self._left:
            raise Over
        self._note()


# --- what all of them train on ----------------------------------------------------------------


def corpus_of(config: Mapping[str, Any], vocab: int) -> Corpus:
    """Random sequences of `seq_len` tokens, of which up to half are a prompt without loss: the
    micro-batches of an update differ in their number of targets."""
    length = config["seq_len"]
    draw = np.random.default_rng(0)
    made = [
        Example(
            ids=draw.integers(0, vocab, length, dtype=np.int32),
            loss=np.arange(length) >= draw.integers(0, length // 2),
        )
        for _ in range(EXAMPLES + HELD_OUT)
    ]
    return Corpus(
        train=made[:EXAMPLES], eval=made[EXAMPLES:], fingerprint="random", vocab=vocab, pad_id=0
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """The same for every contestant."""

    config: Mapping[str, Any]
    parts: Parts
    corpus: Corpus
    folder: Path

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Material:
        """From a job's config."""
        parts = build_parts(config)
        corpus = corpus_of(config, parts.model.describe().vocab)
        return cls(config=config, parts=parts, corpus=corpus, folder=folder)

    def feed(self) -> Feed:
        """The runner's own order and collation."""
        return Feed(
            examples=self.corpus.train,
            batching=self.parts.batching,
            objective=self.parts.objective,
            pad_id=self.corpus.pad_id,
            seq_len=self.config["seq_len"],
            batch=self.config["batch"],
            micro=self.config["batch"] // self.config["accum"],
            seed=self.config["seed"],
        )

    def model(self) -> nn.Module:
        """The network with its initial weights, from ids to logits."""
        return Logits(self.parts.model.build(self.config["seed"])).train()

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """torch's fused AdamW as one writes it by hand, and a constant schedule."""
        part = self.parts.optimizer
        groups = parameter_groups(model, part.weight_decay)
        optimizer = torch.optim.AdamW(
            groups, lr=part.lr, betas=part.betas, eps=part.eps, fused=True
        )
        return optimizer, LambdaLR(optimizer, lambda update: 1.0)


class Logits(nn.Module):
    """A model with its head, as the other frameworks want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """(rows, length) ids to (rows, length, vocab) logits."""
        return linear(self.model(input_ids), self.model.head_weight)  # type: ignore[arg-type]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the targets."""
    flat = logits.flatten(0, 1)
    return cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def targets_of(micros: Sequence[MicroBatch]) -> int:
    """Targets of a whole update."""
    return sum(micro.counts.useful for micro in micros)


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The micro-batches as dictionaries, for the frameworks' data loaders.

    counted: whether each one carries the number of targets of its whole update.
    """

    def __init__(self, gate: Gate, *, counted: bool) -> None:
        self._gate = gate
        self._counted = counted

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for micros in self._gate:
            more = {"count": targets_of(micros)} if self._counted else {}
            for micro in micros:
                yield {"input_ids": micro.input_ids, "labels": micro.targets, **more}


# --- the contestants --------------------------------------------------------------------------


def bare(material: Material, gate: Gate) -> None:
    """What one writes by hand, with nothing around it."""
    model = material.model()
    optimizer, schedule = material.optimizer(model)
    norms = []
    for micros in gate:
        count = targets_of(micros)
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in micros:
            loss = summed_loss(model(micro.input_ids), micro.targets) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), material.config["clip"])
        optimizer.step()
        schedule.step()
        gate.kept.append(total.item())
        norms.append(norm.item())


def ours(material: Material, gate: Gate) -> None:
    """This runner's worker: real loop, clock and journal, parts from the real configuration."""
    config, device = material.config, torch.device("cpu")
    job = assemble(config, material.parts, device, material.corpus)
    journal = Journal(material.folder / JOURNAL)
    with closing(journal), Compilations() as compilations:
        loop = Loop(
            training=job.training,
            draws=gate,
            clock=clock_for(device),
            journal=journal,
            evaluation=job.evaluation,
            updates=material.config["updates"],
            warmup=config["warmup"],
            eval_every=config["eval"]["every"],
            stop=lambda: False,
            compiled=lambda: compilations.graphs,
        )
        gate.settle = journal.flush
        gate.losses = lambda: [math.nan if r.loss is None else r.loss for r in loop.records]
        loop.run()


def trainer(material: Material, gate: Gate) -> None:
    """Hugging Face's Trainer at its lightest: no reports, no bar, no checkpoints."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Keep(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
            if "loss" in logs:
                gate.kept.append(logs["loss"])

    class Streaming(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=None)
            return self.accelerator.prepare(loader)

    def loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return summed_loss(logits, labels) / num_items_in_batch

    arguments = TrainingArguments(
        output_dir=str(material.folder / "trainer"),
        max_steps=material.config["updates"],
        per_device_train_batch_size=material.config["batch"] // material.config["accum"],
        gradient_accumulation_steps=material.config["accum"],
        max_grad_norm=material.config["clip"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    model = material.model()
    made = Streaming(
        model=model,
        args=arguments,
        train_dataset=Stream(gate, counted=False),
        compute_loss_func=loss,
        optimizers=material.optimizer(model),
        callbacks=[Keep()],
    )
    made.remove_callback(PrinterCallback)
    made.train()


def lightning(material: Material, gate: Gate) -> None:
    """Lightning's Trainer at its lightest: no logger, no bar, no checkpoints, no summary."""
    from lightning.pytorch import LightningModule, Trainer

    accum = material.config["accum"]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = material.model()
            self.total = torch.zeros(())

        def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
            # Lightning divides by `accum`, however many targets a micro-batch has.
            share = accum / batch["count"]
            loss = summed_loss(self.inner(batch["input_ids"]), batch["labels"]) * share
            self.total += loss.detach()
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *more: Any, **named: Any) -> None:
            clip_grad_norm_(self.inner.parameters(), material.config["clip"])
            gate.kept.append(self.total.item() / accum)
            self.total = torch.zeros(())

        def configure_optimizers(self) -> Any:
            optimizer, schedule = material.optimizer(self.inner)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    made = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=material.config["updates"],
        accumulate_grad_batches=accum,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=material.folder,
    )
    stream = Stream(gate, counted=True)
    made.fit(Module(), torch.utils.data.DataLoader(stream, batch_size=None))


CONTESTANTS: Mapping[str, Callable[[Material, Gate], None]] = {
    "bare": bare,
    "again": bare,
    "runner": ours,
    "trainer": trainer,
    "lightning": lightning,
}


def compete(
    name: str, config: Mapping[str, Any], folder: Path, pipe: Connection, threads: int
) -> None:
    """Train as the named contestant, in this process, until there are no more turns."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    material = Material.of(config, folder)
    with suppress(Over):
        CONTESTANTS[name](material, Gate(pipe, material.feed().draws()))
