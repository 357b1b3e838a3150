"""Which process is which: an identity that survives reuse of process numbers and restarts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def _start_time(pid: int) -> str | None:
    """When the process started, as text that is stable while it lives; None when it is gone."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The command name may hold spaces and brackets; the fields count from the last one.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return "_".join(listed.stdout.split()) or None


def _system() -> str:
    """Identity of this boot, and of this set of process numbers where they come in namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    found = boot.read_text(encoding="ascii").strip() if boot.exists() else "boot"
    return f"{found} {space.readlink() if space.is_symlink() else 'pid'}"


def identity(pid: int | None = None) -> str:
    """`BOOT NAMESPACE PID START` of a living process (this one by default)."""
    number = os.getpid() if pid is None else pid
    return f"{_system()} {number} {_start_time(number)}"


def is_gone(recorded: str) -> bool:
    """Whether the process with this identity, on this host, certainly runs no more.

    Process numbers of another namespace (a container) cannot be seen, so such a process counts
    as alive until the machine restarts.
    """
    parts = recorded.split(" ")
    if len(parts) != 4:
        return False
    boot, space, pid, start = parts
    this_boot, this_space = _system().split(" ")
    if boot != this_boot:
        return True
    return space == this_space and _start_time(int(pid)) != start
