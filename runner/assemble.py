"""From a checked config to a Training, a Feed and an Evaluation on one device."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checks import Parts, optimizer_builders, optimizer_fault, vocab_fault
from runner.compiling import OFF, compiled
from runner.contracts import (
    BuiltOptimizer,
    Corpus,
    Description,
    Fault,
    Lever,
    LossLever,
    MicroBatch,
    Recipe,
    Unsupported,
    UserError,
)
from runner.data.order import updates_per_epoch
from runner.evaluation import Evaluation
from runner.feed import Feed
from runner.precision.scaling import LossScaler
from runner.step import Training
from runner.weights import load_weights

CPP_COMPILERS = ("g++", "clang++")


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Everything that one job runs with.

    description: shapes of the model as the levers left it. initial_weights: digest of
    stored ones.
    """

    config: Mapping[str, Any]
    parts: Parts
    device: torch.device
    corpus: Corpus
    training: Training
    feed: Feed
    evaluation: Evaluation
    updates: int
    description: Description
    initial_weights: str | None = None


def choose_device(name: str) -> torch.device:
    """The device a job asks for; `auto` is CUDA where there is one. Raises Unsupported."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise Unsupported(f"device={name}: torch {torch.__version__} sees no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            raise Unsupported(f"device={name}: there are {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def compiles(config: Mapping[str, Any]) -> bool:
    """Whether anything of the job is compiled by torch."""
    implementation = config["optimizer"].get("implementation")
    return bool(config["compile"] != OFF or implementation == "compiled")


def check_device(config: Mapping[str, Any], device: torch.device) -> None:
    """Raise Unsupported when the job needs what the machine lacks, its recipe apart."""
    if compiles(config) and device.type == "cpu" and not any(map(shutil.which, CPP_COMPILERS)):
        raise Unsupported(
            f"compiling for a CPU needs a C++ compiler ({' or '.join(CPP_COMPILERS)}); none is here"
        )


def lacking(recipe: Recipe, device: torch.device) -> str | None:
    """Why this device or installation has no native arithmetic for a recipe, or None."""
    needs = recipe.requirements
    name = type(recipe).__name__
    if needs.cuda and device.type != "cuda":
        return f"precision: {name} needs a CUDA device; this job runs on {device}"
    if needs.capability and device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have < needs.capability:
            return (
                f"precision: {name} needs compute capability {needs.capability}; "
                f"{torch.cuda.get_device_name(device)} has {have}"
            )
    absent = [module for module in needs.modules if find_spec(module) is None]
    if absent:
        return f"precision: {name} needs {' and '.join(absent)}, which is not installed"
    return None


def realised(
    config: Mapping[str, Any], parts: Parts, device: torch.device
) -> tuple[Parts, str | None]:
    """The parts as this device runs them, and why their recipe is emulated; None: it is native.

    Raises Unsupported when the device lacks the recipe's arithmetic and no emulation is asked for.
    """
    reason = lacking(parts.precision, device)
    if reason is None:
        return parts, None
    stand_in = parts.precision.emulation()
    if stand_in is None:
        raise Unsupported(reason)
    if not config["emulate"]:
        raise Unsupported(f"{reason}; emulate=true runs its rounding here, for its quality alone")
    if config["compile"] != OFF:
        raise Unsupported(f"{reason}; its emulation runs eagerly: compile=off with emulate=true")
    return replace(parts, precision=stand_in), reason


def load_corpus(config: Mapping[str, Any], parts: Parts) -> Corpus:
    """The corpus; raises UserError when the model cannot hold its token ids."""
    cache = Path(config["cache"]).expanduser()
    corpus: Corpus = parts.data.load(seq_len=config["seq_len"], cache=str(cache))
    rows = parts.model.describe().vocab
    if corpus.vocab > rows:
        raise UserError(vocab_fault(corpus.vocab, rows))
    if corpus.stream is not None and getattr(parts.batching, "rearranges", False):
        raise UserError(stream_fault(type(parts.batching).__name__))
    prepared = corpus.stream is None  # of a stream, its first update will tell
    if prepared and corpus.whole_updates and len(corpus.train) < config["batch"]:
        raise UserError(short_fault(corpus, config["batch"]))
    return corpus


def stream_fault(name: str) -> Fault:
    """A batching that looks ahead in the order of examples, over a stream, which has none."""
    return Fault(
        key="batching",
        given=f"{name} choosing the examples of an update, with data.streaming=true",
        allowed="a batching that takes the examples of an update as they come",
        next_step="batching.window=1, batching=packed, or data.streaming=false",
    )


def short_fault(corpus: Corpus, batch: int) -> Fault:
    """Fewer training examples than one update asks for."""
    count = len(corpus.train)
    return Fault(
        key="batch",
        given=f"{batch} examples per update; there are {count} to train on, of {corpus.tokens} "
        f"tokens, and {len(corpus.eval)} held out",
        allowed=f"1 to {count}",
        next_step=f"batch={count}, more data, or data.on_bad=skip for updates that are shorter",
    )


def assemble(config: Mapping[str, Any], parts: Parts, device: torch.device, corpus: Corpus) -> Job:
    """Build and connect everything. The same seed gives the same weights and order."""
    torch.manual_seed(config["seed"])
    model: nn.Module = parts.model.build(config["seed"])
    init = getattr(parts.model, "init", None)
    initial = load_weights(model, Path(init)) if init else getattr(model, "initial_weights", None)
    model = parts.precision.prepare(model)
    description: Description = parts.model.describe()
    for lever in parts.levers.values():
        refused = lever.refusal(parts.model.describe(), parts.precision, device)
        if refused:
            raise Unsupported(refused)
        lever.apply(model)
        description = lever.described(description, model)
    model.to(device).train()
    feed = replace(feed_of(config, parts, corpus), pin=device.type == "cuda")
    updates = planned_updates(config, len(corpus.train))
    training = training_of(config, parts, device, model, updates)
    evaluation = Evaluation(
        micros=evaluation_micros(config, corpus, feed),
        loss=training.loss,
        recipe=parts.precision,
        device=device,
    )
    return Job(
        config=config,
        parts=parts,
        device=device,
        corpus=corpus,
        training=training,
        feed=feed,
        evaluation=evaluation,
        updates=updates,
        description=description,
        initial_weights=initial,
    )


def feed_of(config: Mapping[str, Any], parts: Parts, corpus: Corpus) -> Feed:
    """Draws the job's updates from the corpus."""
    return Feed(
        examples=corpus.train,
        batching=parts.batching,
        objective=parts.objective,
        pad_id=corpus.pad_id,
        seq_len=config["seq_len"],
        batch=config["batch"],
        micro=config["batch"] // config["accum"],
        seed=config["seed"],
        stream=corpus.stream,
        whole_updates=corpus.stream is not None and corpus.whole_updates,
        workers=getattr(parts.data, "workers", 0),
        prefetch=getattr(parts.data, "prefetch", 2),
    )


def planned_updates(config: Mapping[str, Any], examples: int) -> int:
    """Applied updates to reach, from `updates` or from `epochs`."""
    if config["updates"] is not None:
        return int(config["updates"])
    return int(config["epochs"]) * updates_per_epoch(examples, config["batch"])


def evaluation_micros(
    config: Mapping[str, Any], corpus: Corpus, feed: Feed
) -> Sequence[MicroBatch]:
    """The held-out micro-batches: the first `eval.examples` of the split, sorted by length so
    that little is padded. Raises UserError when they hold no target."""
    count = min(config["eval"]["examples"], len(corpus.eval))
    chosen = sorted((corpus.eval[i] for i in range(count)), key=lambda example: example.length)
    micros = feed.batching.micro_batches(
        chosen, size=feed.micro, pad_id=feed.pad_id, seq_len=feed.seq_len
    )
    if not sum(micro.counts.useful for micro in micros):
        raise UserError(
            Fault(
                key="data",
                given=f"a held-out split of {count} examples without one target",
                allowed="at least one held-out target",
                next_step="hold out more, or raise seq_len",
            )
        )
    return micros


def training_of(
    config: Mapping[str, Any],
    parts: Parts,
    device: torch.device,
    model: nn.Module,
    updates: int,
) -> Training:
    """What an update touches, around a model that recipe and levers have prepared."""
    built = build_optimizer(parts, model, device)
    policy = parts.precision.scaler()
    if policy is not None:
        _refuse_fp16_weights(model, built)
    levers = tuple(parts.levers.values())
    loss: LossLever = _one(levers, lambda part: isinstance(part, LossLever), "memory/loss")
    if config["compile"] != OFF:
        loss = compiled(model, loss, config["compile"])
    factors = torch.tensor(parts.schedule.factors(updates), dtype=torch.float32, device=device)
    return Training(
        model=model,
        optimizer=built.optimizer,
        masters=built.masters,
        objective=parts.objective,
        loss=loss,
        device=device,
        base_lr=parts.optimizer.lr,
        lr_factors=factors,
        scaler=LossScaler(policy, device) if policy is not None else None,
        clip=config["clip"],
        # On a CPU the host has the flag at once, and an optimizer that obeys it walks through
        # every tensor's step count: 1 % of a small model's update.
        skips_on_device=built.skips_on_device and device.type == "cuda",
        clear_gradients=_one(
            levers, lambda part: part.clear_gradients() is not None, "memory/gradients"
        ).clear_gradients(),
        forward_contexts=_contexts(
            [
                *(partial(make, device) for make in _own(Recipe, "compute", parts.precision)),
                *_own(Lever, "forward", *levers),
            ]
        ),
        backward_contexts=_contexts(_own(Lever, "backward", *levers)),
        applied=torch.zeros((), dtype=torch.int64, device=device),
    )


def build_optimizer(parts: Parts, model: nn.Module, device: torch.device) -> BuiltOptimizer:
    """The optimizer of a job, by the recipe or the lever that decides it, else by its own part.

    Raises UserError when several parts would decide it.
    """
    builders = optimizer_builders(parts)
    if len(builders) > 1:
        raise UserError(optimizer_fault(list(builders)))
    for build in builders.values():
        return build(parts.optimizer, model, device)
    part = parts.optimizer
    return BuiltOptimizer(optimizer=part.build(model, device), skips_on_device=part.skips_on_device)


def _own(base: type[Any], hook: str, *parts: Any) -> list[Callable[..., Any]]:
    """The hooks of the parts that do not leave it as `base` has it: there are many levers, and
    few take part in every pass."""
    return [getattr(p, hook) for p in parts if getattr(type(p), hook) is not getattr(base, hook)]


def _contexts(
    makers: Sequence[Callable[[], AbstractContextManager[Any] | None]],
) -> Callable[[], list[AbstractContextManager[Any]]]:
    """Makes the contexts of one pass; a maker may have none for it."""
    return lambda: [context for make in makers if (context := make()) is not None]


def _one(levers: Sequence[Any], wanted: Callable[[Any], bool], key: str) -> Any:
    """The one lever that plays a role which must be played exactly once."""
    found = [lever for lever in levers if wanted(lever)]
    if len(found) != 1:
        raise UserError(
            Fault(
                key=key,
                given=f"{len(found)} parts that do this",
                allowed="exactly one",
                next_step=f"choose one option of {key}",
            )
        )
    return found[0]


def _refuse_fp16_weights(model: nn.Module, built: BuiltOptimizer) -> None:
    """FP16 gradients cannot be unscaled where they are: they need an FP32 master to go to."""
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and built.masters.get(name, parameter).dtype == torch.float16
    ]
    if names:
        raise UserError(
            Fault(
                key="precision",
                given=f"loss scaling over FP16 parameters ({names[0]} and {len(names) - 1} more)",
                allowed="loss scaling over FP32 parameters: FP16 gradients cannot be unscaled",
                next_step="precision=fp16_master, whose FP32 masters take the gradients",
            )
        )
