"""Which layers a recipe converts, which it leaves, and why; what their products then multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.contracts import Fault, UserError

if TYPE_CHECKING:
    from torch import nn

ROLES = ("output", "grad_input", "grad_weight")
"""The three products of a linear layer in training."""
AT_HOME = "conversion"
"""Attribute of a model that holds its Conversion."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a recipe did to a model's layers.

    converted: (out, in) features by name. left: why a layer was left, by name.
    products: by role, the declared formats of the two operands, as evidence names them.
    visible: whether these products pass torch's dispatcher, where evidence sees them.
    """

    converted: Mapping[str, tuple[int, int]]
    left: Mapping[str, str]
    products: Mapping[str, tuple[str, str]]
    visible: bool = True

    def expected(self, slots: int, *, frozen: Iterable[str] = ()) -> dict[str, int]:
        """FLOPs of the converted layers by operand formats, worked out from shapes.

        slots: positions that one update computes, padding included. frozen: converted layers
        whose weight has no gradient. 2 FLOPs a multiply-add.
        """
        found: dict[str, int] = {}
        still = set(frozen)
        for name, (rows, columns) in self.converted.items():
            for role, operands in self.products.items():
                if role != "grad_weight" or name not in still:
                    key = operands_key(*operands)
                    found[key] = found.get(key, 0) + 2 * rows * columns * slots
        return found

    def to_json(self) -> dict[str, Any]:
        """Counts first, then names."""
        return {
            "count": len(self.converted),
            "of": len(self.converted) + len(self.left),
            "converted": list(self.converted),
            "left": dict(self.left),
            "products": {role: operands_key(*pair) for role, pair in self.products.items()},
        }


def operands_key(*formats: str) -> str:
    """The operands of a product as evidence writes them; which is which does not matter."""
    return " x ".join(sorted(formats))


def conversion_of(model: nn.Module) -> Conversion | None:
    """What a recipe converted in a model, or None."""
    found: Conversion | None = getattr(model, AT_HOME, None)
    return found


def frozen_of(model: nn.Module, conversion: Conversion) -> list[str]:
    """Converted layers whose weight has no gradient."""
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    return [name for name in conversion.converted if f"{name}.weight" not in trainable]


def converted_flops(model: nn.Module, slots: int) -> dict[str, int]:
    """FLOPs that evidence must show of a model's converted layers, by operand formats; nothing
    where there are none, or none that it could see."""
    conversion = conversion_of(model)
    if conversion is None or not conversion.visible:
        return {}
    return conversion.expected(slots, frozen=frozen_of(model, conversion))


def convert(
    model: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    *,
    multiple: int,
    products: Mapping[str, tuple[str, str]],
    visible: bool = True,
) -> nn.Module:
    """Replace the linear layers of a model's blocks by what `make` gives, in place.

    Embedding and head stay as they are, and so do layers with a dimension that is no multiple of
    `multiple`, which the kernels refuse. The model holds its Conversion. Raises UserError when no
    layer can be converted.
    """
    from torch import nn

    converted: dict[str, tuple[int, int]] = {}
    left: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            left[name] = "an embedding is looked up, not multiplied"
        if type(module) is not nn.Linear:
            continue
        shape = (module.out_features, module.in_features)
        odd = [size for size in shape if size % multiple]
        if not name.startswith("blocks."):
            left[name] = "the head's logits keep their format"
        elif odd:
            left[name] = f"{odd[0]} is not a multiple of {multiple}"
        else:
            converted[name] = shape
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, make(module))
    if not converted:
        raise UserError(_nothing(left, multiple))
    done = Conversion(converted=converted, left=left, products=products, visible=visible)
    object.__setattr__(model, AT_HOME, done)
    return model


def _nothing(left: Mapping[str, str], multiple: int) -> Fault:
    refused = {name: why for name, why in left.items() if "multiple" in why} or left
    reasons = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:2])
    return Fault(
        key="precision",
        given=f"a recipe that converts none of this model's layers ({reasons})",
        allowed=f"a model with linear layers whose dimensions are multiples of {multiple}",
        next_step="change model.width, or choose another precision",
    )
