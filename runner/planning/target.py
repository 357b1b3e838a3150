"""The device that a plan is for: memory, rates, and what its allocator adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from runner.contracts import Fault, UserError
from runner.measure.live import CUDA_BLOCK
from runner.measure.peaks import peak_bytes_per_s, peak_flops_per_s

if TYPE_CHECKING:
    import torch

MIB = 2**20

WORKSPACE = 4096 * 2 * 1024 + 16 * 8 * 1024
"""Bytes of cuBLAS's workspace (torch's default `:4096:2:16:8`), which counts as allocated."""
WORKSPACE_HOPPER = 4096 * 8 * 1024
"""The same on compute capability 9.0."""
CONTEXT = 512 * MIB
"""Memory that CUDA's own context and kernels take beside what torch allocates: about as much;
it varies with driver and device."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that a plan is for.

    name: as typed. driver: the name its driver gives it, by which peaks are known; None: unknown.
    cuda: whether it is a CUDA device. memory: bytes it shows; None where not known. workspace:
    bytes that libraries keep allocated. context: bytes that are taken beside what is allocated.
    """

    name: str
    driver: str | None = None
    cuda: bool = True
    memory: int | None = None
    workspace: int = 0
    context: int = 0

    @property
    def rounding(self) -> int:
        """Every allocation is a multiple of so many bytes."""
        return CUDA_BLOCK if self.cuda else 1

    def flops_per_s(self, compute: str) -> float | None:
        """Peak FLOP/s in a compute format."""
        return peak_flops_per_s(self.driver, compute) if self.driver else None

    def bytes_per_s(self) -> float | None:
        """Peak memory bandwidth."""
        return peak_bytes_per_s(self.driver) if self.driver else None


def _gpu(name: str, driver: str, mib: int, workspace: int = WORKSPACE) -> Target:
    return Target(name=name, driver=driver, memory=mib * MIB, workspace=workspace, context=CONTEXT)


CPU = Target(name="cpu", cuda=False)
CUDA = Target(name="cuda", workspace=WORKSPACE_HOPPER, context=CONTEXT)
"""Some CUDA device: its memory and its rates are not known, its workspace is the larger one."""

GPUS: Mapping[str, Target] = MappingProxyType(
    {
        # Memory in MiB as nvidia-smi shows it; rates in runner/measure/peaks.py.
        gpu.name: gpu
        for gpu in (
            _gpu("h200", "NVIDIA H200", 143771, WORKSPACE_HOPPER),
            _gpu("h100", "NVIDIA H100 80GB HBM3", 81559, WORKSPACE_HOPPER),
            _gpu("h100_pcie", "NVIDIA H100 PCIe", 81559, WORKSPACE_HOPPER),
            _gpu("b200", "NVIDIA B200", 183359, WORKSPACE_HOPPER),
            _gpu("a100", "NVIDIA A100-SXM4-80GB", 81920),
            _gpu("a100_40gb", "NVIDIA A100-SXM4-40GB", 40960),
            _gpu("l4", "NVIDIA L4", 23034),
            _gpu("l40s", "NVIDIA L40S", 46068),
            _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24564),
            _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24576),
        )
    }
)


def target_of(device: torch.device) -> Target:
    """The target that a device at hand is."""
    import torch

    if device.type != CUDA.name:
        return CPU
    driver = torch.cuda.get_device_name(device)
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return Target(
        name=driver,
        driver=driver,
        memory=int(torch.cuda.get_device_properties(device).total_memory),
        workspace=WORKSPACE_HOPPER if hopper else WORKSPACE,
        context=CONTEXT,
    )


def target_named(name: str, device: str) -> Target:
    """The target that `plan.device` means; `auto` follows the job's `device`, and is some CUDA
    device unless that says cpu. Raises UserError for an unknown one."""
    known = {CPU.name: CPU, CUDA.name: CUDA, **GPUS}
    chosen = (CPU.name if device == CPU.name else CUDA.name) if name == "auto" else name
    if chosen not in known:
        raise UserError(
            Fault(
                key="plan.device",
                given=name,
                allowed=f"auto, {', '.join(known)}",
                next_step="plan.device=cuda for a GPU whose rates do not matter",
            )
        )
    return known[chosen]
