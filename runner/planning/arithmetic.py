"""What CUDA does otherwise than a CPU, put on top of a trace of CPU tensors.

Fake CUDA tensors cannot go through autograd on a machine without a GPU; fake CPU tensors can. So a
plan for a GPU traces CPU tensors and changes two things: which operations autocast runs in FP32,
and which attention kernel runs. Unverified on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from runner.contracts import Unsupported

HALF = (torch.bfloat16, torch.float16)

IN_FP32 = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "__pow__",
        "softplus",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        "cosine_similarity",
        "nll_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "cdist",
        "renorm",
        "logsumexp",
        "norm",
    ]
)
"""Operations that CUDA's autocast gives FP32 copies of their operands, by torch's own list
(`AT_FORALL_FP32` in ATen/autocast_mode.h of torch 2.13)."""
TO_FP32 = frozenset(
    ["prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "sum"]
)
"""Operations that it makes return FP32 without copying their operand
(`AT_FORALL_FP32_SET_OPT_DTYPE`)."""


CHANGED = IN_FP32 | TO_FP32


class CudaArithmetic(TorchFunctionMode):
    """Runs operations on CPU tensors in the formats, and attention by the kernel, of CUDA."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one call of torch's interface."""
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return attended(func, *args, **(kwargs or {}))
        if name not in CHANGED:
            return func(*args, **(kwargs or {}))
        given = dict(kwargs or {})
        if torch.is_autocast_enabled("cpu"):
            if name in IN_FP32:
                args, given = widened(args), {k: widened(v) for k, v in given.items()}
            elif is_half(args[:1]) and given.get("dtype") is None:
                given["dtype"] = torch.float32
        return func(*args, **given)


def again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block, under CUDA's arithmetic also where it is computed again: torch's
    modes do not hold inside a backward pass."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return forward(*args, **kwargs)
        with CudaArithmetic():
            return forward(*args, **kwargs)

    return run


def is_half(args: Sequence[Any]) -> bool:
    """Whether the first argument is a tensor of 16 bits."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].dtype in HALF


def widened(value: Any) -> Any:
    """16-bit tensors as FP32, in nested tuples and lists."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, tuple | list):
        return type(value)(widened(item) for item in value)
    return value


def attended(
    func: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that CUDA would take: a fused one where the format, the mask and
    the kernels that are allowed admit it. Raises Unsupported where none does."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(half) if x.is_floating_point() else x for x in (q, k, v))
    cuda: Any = torch.backends.cuda
    aten = torch.ops.aten
    fused = cuda.flash_sdp_enabled() or cuda.cudnn_sdp_enabled()
    if fused and q.dtype in HALF and attn_mask is None:
        found: Tensor = aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
        return found
    if cuda.mem_efficient_sdp_enabled() and q.dtype != torch.float64 and not enable_gqa:
        bias = None if attn_mask is None else attn_mask.to(q.dtype)
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        efficient: Tensor = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return efficient
    if not cuda.math_sdp_enabled():
        masked = "with" if attn_mask is not None else "without"
        raise Unsupported(
            f"no attention kernel that is allowed takes {str(q.dtype).removeprefix('torch.')} "
            f"{masked} a mask on CUDA"
        )
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = func(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out
