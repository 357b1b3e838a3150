"""Two untimed updates under torch's profiler: a Chrome trace with phases, and its timeline."""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from runner.contracts import MicroBatch
from runner.measure.flops import more_formulas, takes_over
from runner.measure.probe import Silent, untouched
from runner.step import Training, measured_update
from runner.timeline import Operation, Span, Timeline, timeline

UPDATE = "update"
PHASE = "phase: "
UPDATES = 2
TRACE = "trace.json.gz"


class PhaseRanges:
    """Labels the phases of an update in the trace."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def enter(self, phase: str) -> None:
        """Close the range before and open one for `phase`."""
        self._open.close()
        self._open.enter_context(record_function(f"{PHASE}{phase}"))

    def close(self) -> None:
        """Close the last range."""
        self._open.close()


def record_timeline(
    training: Training,
    draws: Sequence[Sequence[MicroBatch]],
    folder: Path,
    *,
    ridge: float | None,
) -> Timeline:
    """Profile one update over each of `draws`; write the trace and derive its figures.

    Training is left as it was. An update that is not profiled comes first, so that allocations
    and compilations of the first time are not in the picture.
    """
    activities = [ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with untouched(training):
        measured_update(training, lambda: draws[0], Silent())
        with profile(activities=activities) as profiler:
            for micros in draws:
                ranges = PhaseRanges()
                with record_function(UPDATE):
                    measured_update(training, lambda micros=micros: micros, ranges)  # type: ignore[misc]
                    ranges.close()
                    if training.device.type == "cuda":
                        torch.cuda.synchronize(training.device)
        with Work() as work:
            measured_update(training, lambda: draws[0], Silent())
    _write_trace(profiler, folder)
    events = list(profiler.events() or [])
    cuda = training.device.type == "cuda"
    return timeline(
        updates=[_span(e) for e in events if e.name == UPDATE and not _on_cuda(e)],
        work=[_span(e) for e in events if (_on_cuda(e) if cuda else _is_top_operator(e))],
        operations=operations(profiler, work, cuda=cuda),
        ridge=ridge,
    )


def _write_trace(profiler: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "trace.json"
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(folder / TRACE, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def _span(event: Any) -> Span:
    return Span(name=event.name, start=event.time_range.start / 1e6, end=event.time_range.end / 1e6)


def _on_cuda(event: Any) -> bool:
    labels = event.name == UPDATE or event.name.startswith(PHASE)
    return event.device_type.name == "CUDA" and not labels


def _is_top_operator(event: Any) -> bool:
    """Whether a CPU event is an operator that no other operator called."""
    if not event.name.startswith("aten::"):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return False
        parent = parent.cpu_parent
    return True


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of products and bytes of operands and results, by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        counter = FlopCounterMode(display=False, custom_mapping=more_formulas())
        self._formulas = counter.flop_registry
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note it; a view moves nothing. See `takes_over`."""
        if any(takes_over(kind) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = f"aten::{func.overloadpacket.__name__}"
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops[name] += formula(*args, **(kwargs or {}), out_val=out)
        if not func.is_view:
            tensors = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, Tensor)]
            self.bytes[name] += sum(t.nbytes for t in tensors)
        return out


def operations(profiler: Any, work: Work, *, cuda: bool) -> list[Operation]:
    """Device time by operator from the profile, work from the count of one update of it."""
    found = []
    for average in profiler.key_averages():
        own = average.self_device_time_total if cuda else average.self_cpu_time_total
        if average.key.startswith("aten::") and own:
            found.append(
                Operation(
                    name=average.key,
                    seconds=own / 1e6,
                    flops=UPDATES * work.flops[average.key],
                    bytes=UPDATES * work.bytes[average.key],
                )
            )
    return found
