"""Where a run happened: code, packages, device. Recorded, never used to decide anything."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fullstep", "torch", "hydra-core", "omegaconf", "mlflow", "datasets", "numpy")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout that `folder` lies in, or None outside one."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": dirty}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=5
    )
    return done.stdout.strip()


def packages() -> dict[str, str | None]:
    """Installed versions of what the measurement depends on."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_id(device: torch.device) -> str | None:
    """The GPU's UUID; None for a CPU, which jobs may share."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def other_processes(device: torch.device) -> list[int]:
    """Process numbers of others that compute on the GPU now; empty on a CPU.

    In a container the driver may show none, so an empty list proves nothing.
    """
    identity = device_id(device)
    if identity is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return []
    return sorted(process.pid for process in running if process.pid != os.getpid())


def memory_in_use(device: torch.device, allocated: int) -> dict[str, Any]:
    """Memory of a CUDA device now, by the driver and by NVML; `allocated` as this process's
    allocator has it. (Written from the documentation; unverified on a GPU.)"""
    free, total = torch.cuda.mem_get_info(device)
    found: dict[str, Any] = {
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "free_bytes": free,
        "total_bytes": total,
    }
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_id(device))
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        return {**found, "nvml_error": str(error)}
    by_process = {process.pid: process.usedGpuMemory for process in running}
    return {**found, "nvml_used_bytes": used, **shared_out(by_process, os.getpid())}


def shared_out(by_process: Mapping[int, int | None], own: int) -> dict[str, Any]:
    """Memory by process as NVML tells it: this one's, the others' by number, their sum.

    In a container it may tell numbers of the host, or no process at all. Where this process is
    not among them nobody can say which are others, and nothing is said. A size that the driver
    does not tell is None, and so is a sum that it is missing from.
    """
    if own not in by_process:
        return {}
    others = {str(pid): held for pid, held in sorted(by_process.items()) if pid != own}
    known = [held for held in others.values() if held is not None]
    return {
        "own_bytes": by_process[own],
        "others_bytes": sum(known) if len(known) == len(others) else None,
        "others": others,
    }


def device_bytes(device: torch.device) -> int:
    """Memory of the device: the GPU's, or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_state(device: torch.device) -> dict[str, Any]:
    """Name and, where NVML has them, clocks, power and throttle reasons."""
    if device.type != "cuda":
        return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "type": "cuda",
        "name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        **nvml_state(device),
    }


def nvml_state(device: torch.device) -> dict[str, Any]:
    """Clocks (MHz), power (W), temperature and throttle reasons now; the error where NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_id(device))
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
    except pynvml.NVMLError as error:
        return {"nvml_error": str(error)}


def environment(device: torch.device, launch: Path) -> dict[str, Any]:
    """The record's `environment`; `git` is that of the launch folder, the user's own code."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages(),
        "git": git_state(launch),
        "device": device_state(device),
    }
