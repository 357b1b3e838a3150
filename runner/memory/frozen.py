"""Linear layers with a frozen weight in few bits, widened for each product and thrown away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from runner.contracts import Fault, UserError

OUTER_BLOCK = 256
"""Scales that share a scale of their own, in bitsandbytes' double quantization."""


class FrozenLinear(nn.Linear):
    """A linear layer that holds codes and scales; neither weight nor bias gets a gradient.

    weight: the codes, so that what looks for a weight finds its device and that
    it is no number (a buffer). scales: what the codes are multiplied by, where it is not said else.
    The weight is widened to the format of the product in each forward pass, and again in each
    backward pass, instead of being kept between them. Subclasses say how.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, source: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = source.in_features
        self.out_features = source.out_features
        bias = source.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out, in) the weight that the codes stand for."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, in the format of autocast where that is on, else of `x`."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        apply: Callable[..., Tensor] = Product.apply
        return apply(x.to(dtype), self.dense, bias)


class Product(torch.autograd.Function):
    """x W^T + b for a W that is made when it is needed. Saves no tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dense: Callable[[torch.dtype], Tensor], bias: Tensor | None
    ) -> Tensor:
        """(..., in) to (..., out)."""
        ctx.dense = dense
        return linear(x, dense(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x alone."""
        return gradient @ ctx.dense(gradient.dtype), None, None


class Nf4Linear(FrozenLinear):
    """4-bit NormalFloat codes through bitsandbytes.

    values: what the 16 codes stand for. offset, outer_scales, outer_values: of the scales, where
    those are 8-bit codes themselves.
    """

    values: Tensor
    offset: Tensor
    outer_scales: Tensor
    outer_values: Tensor

    def __init__(self, source: nn.Linear, block: int, double: bool) -> None:
        super().__init__(source)
        self.block, self.nested = block, double
        fake = isinstance(source.weight, FakeTensor)
        found = nf4_shapes(source, block, double) if fake else nf4_codes(source, block, double)
        for name, tensor in found.items():
            self.register_buffer(name, tensor)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out, in) through bitsandbytes' kernel, which knows no float64."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        outer: dict[str, Any] = {}
        if self.nested:
            inner = QuantState(
                absmax=self.outer_scales,
                code=self.outer_values,
                blocksize=OUTER_BLOCK,
                dtype=torch.float32,
            )
            outer = {"offset": self.offset, "state2": inner}
        made = torch.float32 if dtype == torch.float64 else dtype
        state = QuantState(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.values,
            blocksize=self.block,
            quant_type="nf4",
            dtype=made,
            **outer,
        )
        found: Tensor = dequantize_4bit(self.weight, state)
        return found.to(dtype)


def nf4_codes(source: nn.Linear, block: int, double: bool) -> dict[str, Tensor]:
    """The buffers of a layer, through bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(
        source.weight.detach().contiguous(),
        blocksize=block,
        compress_statistics=double,
        quant_type="nf4",
    )
    found = {"weight": codes, "scales": state.absmax, "values": state.code}
    if double:
        assert state.state2.blocksize == OUTER_BLOCK
        outer = {"outer_scales": state.state2.absmax, "outer_values": state.state2.code}
        found |= {"offset": state.offset, **outer}
    return found


def nf4_shapes(source: nn.Linear, block: int, double: bool) -> dict[str, Tensor]:
    """The same buffers without values: bitsandbytes keeps tables of its own, which do not mix
    with fake tensors."""
    elements = source.weight.numel()
    blocks = -(-elements // block)
    device = source.weight.device

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    found = {
        "weight": made((elements + 1) // 2, 1, dtype=torch.uint8),
        "scales": made(blocks, dtype=torch.uint8 if double else torch.float32),
        "values": made(16),
    }
    if double:
        outer = {"outer_scales": made(-(-blocks // OUTER_BLOCK)), "outer_values": made(256)}
        found |= {"offset": made(), **outer}
    return found


class Int8Linear(FrozenLinear):
    """8-bit codes, one scale for each row: w = code * scale, codes from -127 to 127."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        codes, scales = symmetric(source.weight.detach(), source.in_features, 127)
        self.register_buffer("weight", codes.view(self.out_features, self.in_features))
        self.register_buffer("scales", scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out, in) codes times scales."""
        return self.weight.to(dtype).mul_(self.scales)


class Int4Linear(FrozenLinear):
    """4-bit codes from -7 to 7, two in a byte, one scale for each `block` of weights in order."""

    def __init__(self, source: nn.Linear, block: int) -> None:
        super().__init__(source)
        self.block = block
        codes, scales = symmetric(source.weight.detach(), block, 7)
        pairs = (codes + 8).to(torch.uint8).view(-1, 2)
        self.register_buffer("weight", pairs[..., 0] | (pairs[..., 1] << 4))
        self.register_buffer("scales", scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out, in) codes times scales."""
        codes = torch.stack([self.weight & 15, self.weight >> 4], dim=-1).to(dtype).sub_(8)
        blocks = codes.view(-1, self.block).mul_(self.scales)
        return blocks.view(self.out_features, self.in_features)


class Bf16Linear(FrozenLinear):
    """The weight rounded to BF16, and widened where the product is in another format."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.register_buffer("weight", source.weight.detach().to(torch.bfloat16))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out, in)."""
        return self.weight.to(dtype)


def symmetric(weight: Tensor, block: int, largest: int) -> tuple[Tensor, Tensor]:
    """Codes from -largest to largest, (blocks, block) int8, and scales, (blocks, 1) float32: the
    largest magnitude of a block gets the largest code."""
    blocks = weight.float().reshape(-1, block)
    scales = blocks.abs().amax(dim=1, keepdim=True) / largest
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return codes.to(torch.int8), scales


def freeze(model: nn.Module, *, base: str, block: int, double: bool) -> None:
    """Replace every matrix of the model's blocks in place. Raises UserError."""
    make: dict[str, Callable[[nn.Linear], FrozenLinear]] = {
        "nf4": lambda source: Nf4Linear(source, block, double),
        "int8": Int8Linear,
        "bf16": Bf16Linear,
        "int4": lambda source: Int4Linear(source, block),
    }
    for name, module in list(model.blocks.named_modules()):  # type: ignore[union-attr]
        if not isinstance(module, nn.Linear):
            continue
        if type(module) is not nn.Linear or module.weight.dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
        ):
            raise UserError(not_plain(name, module))
        if base == "int4" and module.weight.numel() % block:
            raise UserError(uneven(name, module, block))
        owner, _, own = name.rpartition(".")
        setattr(model.blocks.get_submodule(owner), own, make[base](module))  # type: ignore[union-attr]


def not_plain(name: str, module: nn.Module) -> Fault:
    """A layer that the recipe has put its own class in."""
    return Fault(
        key="memory/adapter",
        given=f"qlora over {type(module).__name__} ({name}), which the recipe put there",
        allowed="plain linear layers: a quantized base has a format of its own",
        next_step="precision=bf16, or memory/adapter=lora",
    )


def uneven(name: str, module: nn.Linear, block: int) -> Fault:
    """A matrix that is no whole number of blocks."""
    return Fault(
        key="memory.adapter.block",
        given=f"{block} for {name} with {module.weight.numel()} weights",
        allowed="a divisor of every matrix's number of weights",
        next_step="memory.adapter.block=32, or memory.adapter.base=int8",
    )
