"""A linear layer that hands its product to a library's kernels.

Written from the libraries' documentation; what runs on a CPU is tested there, the rest is
unverified on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NativeLinear(nn.Linear):
    """Another layer's parameters under their own names, its product by `kernel`.

    kernel: (rows, in) to (rows, out), over the same weight; it is no submodule, so no name
    changes. multiple: rows are filled up with zeros to a multiple of it, which the product of
    the weight's gradient sums over: no batch, however odd, is refused. The bias is added here.
    In evaluation mode the layer is an ordinary one.
    """

    def __init__(
        self, linear: nn.Linear, kernel: Callable[[Tensor], Tensor], *, multiple: int
    ) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.bias = linear.bias
        self.multiple = multiple
        self._kernel = (kernel,)  # a tuple hides a module from the modules of the model

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rows = x.reshape(-1, x.shape[-1])
        filled = F.pad(rows, (0, 0, 0, -len(rows) % self.multiple))
        out = self._kernel[0](filled)[: len(rows)]
        out = out.reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def sharing(linear: nn.Linear, make: Callable[[int, int], nn.Module]) -> nn.Module:
    """A library's layer without a bias over the very weight of `linear`."""
    layer = make(linear.in_features, linear.out_features)
    layer.weight = linear.weight
    return layer
