"""Low-rank adapters beside a frozen base: fewer trainable tensors, so fewer gradients and less
optimizer state, not fewer activations (specification 7.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from runner.compiling import OFF
from runner.config import build
from runner.contracts import Description, Fault, Lever, LiveObjects, Numerics, Recipe
from runner.memory.installed import absent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from runner.largest import Largest

KEY = "memory/adapter"
BASES = MappingProxyType({"nf4": 4, "int8": 8, "int4": 4, "bf16": 16})
"""Formats of a frozen base, with their bits."""


@dataclass(frozen=True, kw_only=True)
class LoRA(Lever):
    """Trains B A * alpha / rank beside each target matrix; everything else is frozen (Hu et al.
    2021, arXiv:2106.09685), through peft.

    rank: rows of A and columns of B. dropout: of what enters A. targets: which matrices of each
    block, by consecutive parts of their dotted names (`attn`, `attn.q`, `mlp.up`); each must name
    at least one. B starts at zero, so the first update starts from the base as it is. The weights
    that a run leaves are the merged ones, of the plain architecture.
    """

    numerics: ClassVar[Numerics] = "close"
    libraries: ClassVar[tuple[str, ...]] = ("peft",)
    freezes: ClassVar[bool] = True  # every matrix that was there: it gets no gradient

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("attn", "mlp")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: given {self.rank}; allowed: a whole number from 1 up")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha: given {self.alpha}; allowed: a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: given {self.dropout}; allowed: from 0 to below 1")
        if not self.targets:
            raise ValueError("targets: given []; allowed: parts of the names of matrices")

    def reduces(self) -> Sequence[LiveObjects]:
        """The base has neither gradients nor optimizer state."""
        return ("gradients", "optimizer_state")

    def leaves(self, found: Largest) -> float:
        """Nothing of the base's; those of the adapters are there with every adapter."""
        return 0.0 if found.kind in LoRA.reduces(self) and ".lora_" not in found.name else 1.0

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """It adapts trained weights, in a recipe that leaves FP32 parameters to AdamW and SGD."""
        return tuple(self._faults(job))

    def _faults(self, job: Mapping[str, Any]) -> Iterator[Fault]:
        if begins_random(job["model"]):
            yield Fault(
                key="model.init",
                given=f"none with {KEY}: adapters of random weights",
                allowed="trained weights to adapt: a run's final ones, or those of model=hf",
                next_step="model.init=RUN_FOLDER",
            )
        recipe = build(job["precision"], key="precision", allow=job["allow"])
        if recipe.formats["storage"] != "fp32" or recipe.optimizer() is not None:
            yield Fault(
                key="precision",
                given=f"a recipe that stores trained weights in its own way, with {KEY}",
                allowed="a recipe over FP32 parameters: adapters are few and stay in FP32, and the "
                "frozen base has a format of its own",
                next_step=f"precision=bf16 with {KEY}=qlora memory.adapter.base=bf16",
            )

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """peft must be here."""
        return absent(KEY, "adapters", *self.libraries)

    def apply(self, model: nn.Module) -> None:
        """Freezes the model and puts adapters beside its target matrices, in place."""
        from runner.memory.lowrank import inject

        inject(model, self)

    def described(self, description: Description, model: nn.Module) -> Description:
        """Adapters add their elements; the matrices that were there get no gradient."""
        from runner.memory.lowrank import described

        return described(description, model)

    def merged(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Every weight of the plain architecture, the adapters added to their matrices."""
        from runner.memory.lowrank import merged

        return merged(model)


def begins_random(model: Mapping[str, Any]) -> bool:
    """Whether a model's configuration names no trained weights, though it could: those of a run
    (`init`), or with `random_init=false` those that it came with."""
    return "init" in model and model["init"] is None and model.get("random_init", True)


@dataclass(frozen=True, kw_only=True)
class QLoRA(LoRA):
    """LoRA beside a base whose matrices are stored in few bits and widened for each product
    (Dettmers et al. 2023, arXiv:2305.14314).

    base: `nf4` through bitsandbytes (blocks of `block` weights share a scale; with `double`
    the scales are 8-bit codes themselves); `int8` with one scale for each row; `int4` with one
    for each `block` weights; `bf16` rounds them and has no codes. All matrices of the blocks are
    stored so, targets or not; embeddings and head stay as they are.
    """

    base: str = "nf4"
    block: int = 64
    double: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base not in BASES:
            raise ValueError(f"base: given {self.base}; allowed: {', '.join(BASES)}")
        if self.block not in (32, 64, 128, 256, 512):
            raise ValueError(f"block: given {self.block}; allowed: 32, 64, 128, 256, 512")

    def reduces(self) -> Sequence[LiveObjects]:
        """The frozen base is stored in fewer bits, besides."""
        return ("parameters", *LoRA.reduces(self))

    def leaves(self, found: Largest) -> float:
        """The bits of a block's matrix over those of FP32, scales apart."""
        if found.kind == "parameters" and found.of_a_block and ".lora_" not in found.name:
            return BASES[self.base] / 32 if len(found.shape) > 1 else 1.0
        return super().leaves(found)

    def _faults(self, job: Mapping[str, Any]) -> Iterator[Fault]:
        yield from super()._faults(job)
        if job["compile"] != OFF:
            yield Fault(
                key=KEY,
                given=f"qlora with compile={job['compile']}",
                allowed="qlora in eager mode: the compiler cannot see into the quantized products",
                next_step=f"{KEY}=lora, or compile=off",
            )

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """So must bitsandbytes, for its format."""
        kernels = ("bitsandbytes",) if self.base == "nf4" else ()
        return absent(KEY, "adapters", *self.libraries, *kernels)

    def apply(self, model: nn.Module) -> None:
        """Quantizes the blocks' matrices, then as LoRA."""
        from runner.memory.frozen import freeze

        freeze(model, base=self.base, block=self.block, double=self.double)
        super().apply(model)
