"""The data types and the small protocols that every part stands on.

Nothing here imports torch: the edge, the comparison and the help use these types too. Tensors
appear in annotations only.

Shapes are written with these letters: `rows` tensor rows of a micro-batch, `length` positions of
a row, `d` hidden width, `vocab` rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from models.documents import Documents
    from runner.largest import Largest

Numerics = Literal["same", "close"]
"""What a part does to the loss curve: `same` up to float rounding, `close` within the margin."""

LiveObjects = Literal[
    "parameters", "gradients", "optimizer_state", "saved_activations", "scores", "logits"
]
"""Live objects that a memory lever can make smaller. `scores`: attention-score-like tensors, of
(length, length); `logits`: what head and loss make of every token; `saved_activations`: what else
is kept for the backward pass."""

Split = Literal["train", "eval"]

IGNORE = -100
"""Target value of a position that contributes no loss."""


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake in a command, in the four parts a user needs.

    key: the full configuration key, as typed on the command line.
    given: what was given, as text.
    allowed: what would have been accepted, as text.
    next_step: something to type or to do.
    """

    key: str
    given: str
    allowed: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.key}: given {self.given}; allowed: {self.allowed}; next: {self.next_step}"


class UserError(Exception):
    """A mistake that the user can mend; carries its faults and prints no traceback."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults


class Unsupported(Exception):
    """This device or installation cannot do what the job asks; never a reason to do less."""


# --- data -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One tokenized sequence.

    ids: (n,) token ids, prompt and end-of-text token included.
    loss: (n,) True where the token is to be predicted. Position 0 is never predicted, whatever
        `loss[0]` says.
    """

    ids: NDArray[np.integer[Any]]
    loss: NDArray[np.bool_]

    @property
    def length(self) -> int:
        """Real tokens of the example."""
        return len(self.ids)

    @property
    def useful(self) -> int:
        """Target positions that contribute to the loss (after the causal shift)."""
        return int(self.loss[1:].sum())


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Token counts on one definition each, see the words of the design.

    useful: target positions that contribute to the loss, after shift and mask.
    nonpad: input positions that hold a real token, prompt included.
    slots: positions of the processed tensors, padding included.
    """

    useful: int = 0
    nonpad: int = 0
    slots: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            useful=self.useful + other.useful,
            nonpad=self.nonpad + other.nonpad,
            slots=self.slots + other.slots,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The examples of one forward and backward pass.

    input_ids: (rows, length) int64.
    targets: (rows, length) int64; `targets[r, t]` is the token that follows position t in the
        same document, or IGNORE. Already shifted: models and losses never shift again.
    positions: (rows, length) int64 position of each token in its document, or None when every
        row is one document that starts at position 0.
    segments: (rows, length) int64 document number within the row, -1 on padding; or `Documents`,
        where the micro-batch is a single row of documents without padding; or None when every row
        is one document followed by padding only. Attention never crosses segments.
    weights: (rows, length) float32 weight of each target in the summed loss, or None for 1.
    sequence: (rows, length) int64 number of the example within the micro-batch, -1 on padding;
        None when row r is example r.
    places: (n,) int64 places, in the flattened (rows, length), that the head is applied at: those
        of all targets; None for everywhere.
    lengths: real tokens of each document, in order.
    counts: token counts of this micro-batch, counted on the host by the collator.
    ready: event that a CUDA stream has to wait for before it reads the tensors, which another
        stream copies; None when there is nothing to wait for.
    """

    input_ids: Tensor
    targets: Tensor
    positions: Tensor | None = None
    segments: Tensor | Documents | None = None
    weights: Tensor | None = None
    sequence: Tensor | None = None
    places: Tensor | None = None
    lengths: tuple[int, ...]
    counts: Counts
    ready: Any = None

    @property
    def examples(self) -> int:
        """Examples in this micro-batch."""
        return len(self.lengths)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of this micro-batch."""
        found: list[Any] = []

        def note(held: Any) -> Any:
            found.append(getattr(held, "bounds", held))
            return held

        self.moved(note)
        return found

    def moved(self, move: Callable[[Any], Any]) -> MicroBatch:
        """The same with `move` applied to everything that holds a tensor."""
        names = ("input_ids", "targets", "positions", "segments", "weights", "sequence", "places")
        held = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: move(value) for name, value in held.items()})


@runtime_checkable
class Data(Protocol):
    """A corpus, split and tokenized.

    setup_keys: settings that a comparison may vary, since they change no example. A part may have
    more: `place_keys`, settings that only say where files lie (their content is in the
    fingerprint); `faults(launch)`, what is wrong with them before anything starts;
    `stamp(launch)`, which changes with the files; `conflicts(job)`, as a lever has it;
    `workers` and `prefetch`, see `runner.data.feeding`.
    """

    setup_keys: ClassVar[frozenset[str]]

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """Read, tokenize (or take from `cache`) and split; examples longer than `seq_len` are
        cut on the right. Raises UserError when nothing usable is left."""


class Place(NamedTuple):
    """Where a stream stands: what it takes to go on from there.

    epoch: from 0. block: place of a block in the epoch's order of blocks. offset: examples of that
    block before the window of the shuffle that is being handed out. taken: examples of that
    window that were handed out.
    """

    epoch: int = 0
    block: int = 0
    offset: int = 0
    taken: int = 0


START = Place()


class Stream(Protocol):
    """A training split that is read and tokenized while it is trained on.

    truncated, dropped: examples cut and left out, as far as the pass that was begun last has read
    the first epoch.
    """

    @property
    def truncated(self) -> int: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...

    def updates(
        self, *, batch: int, seed: int, place: Place = START, workers: int = 0, prefetch: int = 2
    ) -> Iterator[StreamDraw]:
        """The examples of update after update from a place on, without end. The order is fixed by
        seed, blocks and buffer, whatever the number of workers. With `workers`, processes read
        ahead by `prefetch` blocks each."""


class StreamDraw(NamedTuple):
    """The examples of one update of a stream.

    after: the place behind them. seconds: what preparing the blocks that were read for them took,
    in whichever process.
    """

    examples: Sequence[Example]
    after: Place
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """What a data part delivers.

    train, eval: examples, addressable by index; loading one may touch a file.
    fingerprint: hex digest over source, tokenizer, split and every preprocessing option.
    vocab: number of token ids in use; every id is below it.
    pad_id: id written into padding (never a target).
    truncated: examples cut to `seq_len`, both splits.
    dropped: examples left out, by reason, both splits.
    prepared_s: seconds spent on preparing (tokenizing or reading the cache).
    tokens: real tokens of the training split; None where nobody counted them.
    whole_updates: whether fewer training examples than one update asks for are a mistake.
    stream: in place of `train`, which is then empty, for a corpus that is not prepared first.
    """

    train: Sequence[Example]
    eval: Sequence[Example]
    fingerprint: str
    vocab: int
    pad_id: int
    truncated: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    prepared_s: float = 0.0
    tokens: int | None = None
    whole_updates: bool = False
    stream: Stream | None = None


@runtime_checkable
class Batching(Protocol):
    """Turns the examples of one update into micro-batches of `size` examples.

    One that decides which examples an update has says so with `rearranges = True` and has
    `arrange(order, length)`: the order it makes of the plain one (see `runner.data.order`), given
    the length of an example by its index. Settings that make other work of it are named in its
    `workload_keys`.
    """

    @property
    def numerics(self) -> Numerics: ...

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """All micro-batches of one update; every example appears in exactly one of them."""


# --- objective and loss -----------------------------------------------------------------------


@runtime_checkable
class Objective(Protocol):
    """Defines what one update minimises: a sum over targets divided by one denominator."""

    def weights(self, micro: MicroBatch) -> Tensor | None:
        """(rows, length) float32 weight of each target, on the host; None means 1."""

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        """The divisor of the whole update, counted on the host; 0 when nothing is valid."""


@runtime_checkable
class LossLever(Protocol):
    """Computes the summed loss from the hidden states."""

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Scalar float32: sum over targets other than IGNORE of weight * cross-entropy (nats)."""


# --- model ------------------------------------------------------------------------------------


@runtime_checkable
class Attention(Protocol):
    """The one seam through which every model attends."""

    def plan(self, segments: Tensor | Documents | None, like: Tensor) -> Any:
        """What `attend` needs to know about documents; made once per forward pass. `like` is a
        tensor of the model's device and format. `Documents.segments()` is the tensor for an
        attention that works with masks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
        """Causal attention. q (rows, heads, length, dh); k, v (rows, kv_heads, length, dh)."""


class Description(Protocol):
    """Shapes of a model, without torch: what plan, FLOPs and checks need to know.

    Read-only attributes; `matmul_params` counts the elements of every matrix that each token is
    multiplied with, head included, embedding look-ups excluded; `params` counts each unique
    (tied) parameter once; `frozen_matmul_params` those of `matmul_params` that get no gradient.
    """

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def params(self) -> int: ...
    @property
    def matmul_params(self) -> int: ...
    @property
    def frozen_matmul_params(self) -> int: ...


class Model(Protocol):
    """A decoder, as an `nn.Module` with these names."""

    blocks: nn.ModuleList
    attention: Attention
    description: Description

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        segments: Tensor | Documents | None,
    ) -> Tensor:
        """(rows, length, d) final hidden states, ready for the head."""

    @property
    def head_weight(self) -> Tensor:
        """(vocab, d) weight of the head (the tied embedding where tied)."""


class ModelSpec(Protocol):
    """The configured part that builds a model: shapes checked without torch, then the module."""

    def describe(self) -> Description:
        """Shapes, without building anything."""

    def build(self, seed: int) -> nn.Module:
        """A freshly initialised Model on the CPU in fp32; the same weights for the same seed."""


# --- recipe -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a recipe needs of the device.

    cuda: whether only a CUDA device can run it.
    capability: lowest CUDA compute capability, as (major, minor); None for any.
    modules: Python modules that must be importable, for example `transformer_engine`.
    """

    cuda: bool = False
    capability: tuple[int, int] | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScalePolicy:
    """Dynamic loss scaling (specification equation 7.5).

    The scale starts at `init`, is multiplied by `growth` after `interval` updates in a row that
    were applied, and by `backoff` after each update that was skipped for a non-finite gradient.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


class Recipe:
    """A precision choice. A recipe overrides what it needs; the defaults are plain FP32.

    formats: declared formats by role: `storage`, `compute`, `accumulate`, `state`.
    may_round_away: whether whole tensors may stay as they are because their updates are too small
        for the format that they are stored in. Elsewhere a tensor that nothing changes is a fault.
    """

    numerics: ClassVar[Numerics] = "close"
    may_round_away: ClassVar[bool] = False
    requirements: ClassVar[Requirements] = Requirements()
    formats: ClassVar[Mapping[str, str]]

    def controls(self) -> Mapping[str, str | bool]:
        """Backend controls to set, by dotted name under `torch.backends`: FP32 products as IEEE
        has them, and every sum of a product in FP32 (torch's own defaults add partial sums of
        FP16 and BF16 products in those formats)."""
        return {
            "cuda.matmul.fp32_precision": "ieee",
            "cudnn.fp32_precision": "ieee",
            "mkldnn.matmul.fp32_precision": "ieee",
            "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
            "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
            "cuda.matmul.allow_fp16_accumulation": False,
        }

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model's storage or layers, once, before the optimizer is built."""
        return model

    def compute(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context of each forward pass of training."""
        return nullcontext()

    def scaler(self) -> ScalePolicy | None:
        """Loss-scaling policy, or None for no scaling."""
        return None

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which `model` computes in fp32 on its trained weights."""
        return nullcontext()

    def optimizer(self) -> OptimizerBuilder | None:
        """How the optimizer is built, if this recipe decides it; asked without torch."""
        return None

    def emulation(self) -> Recipe | None:
        """The recipe that does this one's arithmetic by rounding, on any device; None without."""
        return None


# --- levers -----------------------------------------------------------------------------------


class Seen(Protocol):
    """What of an untimed update's evidence a lever is held against.

    attention_operators: names of the attention kernels that ran, `math` for separate products.
    recomputed: FLOPs of products that were computed again in a backward pass.
    """

    @property
    def attention_operators(self) -> Sequence[str]: ...
    @property
    def recomputed(self) -> int: ...


class Lever:
    """A choice that changes live memory. A lever overrides the hooks it needs.

    libraries: large ones that are imported when it is applied, and not before.
    """

    numerics: ClassVar[Numerics] = "same"
    libraries: ClassVar[tuple[str, ...]] = ()

    def reduces(self) -> Sequence[LiveObjects]:
        """What this lever makes smaller (specification table 7.2); nothing when it is not pulled.
        The advice names a lever for these objects only."""
        return ()

    def leaves(self, found: Largest) -> float:
        """What this lever leaves live at the peak of objects like the one that was found: a share
        of what there would be without any lever of its group. One that says no more than
        `reduces` is taken to leave nothing of those kinds."""
        return 0.0 if found.kind in self.reduces() else 1.0

    def period(self) -> int:
        """Number of blocks after which what this lever does to them repeats; a plan extrapolates
        from a few blocks to all of them in steps of it."""
        return 1

    def in_host_memory(self, category: str, operation: str) -> bool:
        """Whether on CUDA this lever keeps in host memory what an operation of that name made, in
        that category of the memory account. A plan for a GPU traces everything in one memory."""
        return False

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Faults of this lever against the rest of the resolved config; no torch."""
        return ()

    def apply(self, model: nn.Module) -> None:
        """Change the model, once, after the recipe prepared it and before the optimizer."""

    def described(self, description: Description, model: nn.Module) -> Description:
        """The shapes of the model, as `apply` has left it."""
        return description

    def merged(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        """The trained weights by the names of the plain architecture, if they are not the
        model's own."""
        return None

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """Why this device cannot do it for such a model, tried out where need be; else None."""
        return None

    def contradiction(self, seen: Seen) -> str | None:
        """Why what ran is not what this lever declares, or None."""
        return None

    def forward(self) -> AbstractContextManager[Any] | None:
        """Context around each forward pass, or None."""
        return None

    def backward(self) -> AbstractContextManager[Any] | None:
        """Context around each backward pass, or None."""
        return None

    def clear_gradients(self) -> Callable[[torch.optim.Optimizer], None] | None:
        """How gradients are cleared before an update, if this lever decides it."""
        return None

    def optimizer(self) -> OptimizerBuilder | None:
        """How the optimizer is built, if this lever decides it; asked without torch."""
        return None


# --- optimizer and schedule -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltOptimizer:
    """An optimizer, and what the update must know of it.

    skips_on_device: whether `step` obeys a `found_inf` tensor and every group's `lr` is a tensor
        on the device. Otherwise the host reads one flag before it steps.
    masters: by name of a model's parameter, the tensor that `step` changes in its stead. Who
        builds it brings each gradient there during the backward pass and the new value back in
        `step`; the update unscales, measures and clips the masters' gradients.
    """

    optimizer: torch.optim.Optimizer
    skips_on_device: bool = False
    masters: Mapping[str, Tensor] = field(default_factory=dict)


OptimizerBuilder = Callable[["OptimizerPart", "nn.Module", "torch.device"], BuiltOptimizer]
"""From the optimizer part and the prepared model on its device. One part of a job at most, recipe
or lever, may have one; without any, the optimizer part's own `build` is used."""


class OptimizerPart(Protocol):
    """Algorithm, hyper-parameters and implementation of the parameter update."""

    setup_keys: ClassVar[frozenset[str]]
    lr: float

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """An optimizer over every unique trainable parameter, each in exactly one group."""

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` obeys a `found_inf` tensor and takes a tensor learning rate."""


class Schedule(Protocol):
    """Learning-rate factor by applied update."""

    def factors(self, updates: int) -> list[float]:
        """`factors[i]` multiplies the base rate in the update after i applied ones; length
        `updates`."""


# --- helpers that every side may use ----------------------------------------------------------


def entered(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """One context that enters several in order and leaves them in reverse."""
    if len(contexts) > 1:
        return _nested(contexts)
    return contexts[0] if contexts else nullcontext()


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with contexts[0], entered(contexts[1:]):
        yield
