"""Tests for runner/measure/account.py, places.py, storages.py and derive.py."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.gpt import GPT
from models.gpt_network import GPTNetwork
from runner.measure.account import MemoryAccount, MemoryTracker
from runner.measure.derive import CURVE_POINTS, account_of
from runner.measure.live import CATEGORIES, Event, Life, Log
from scripts.accounts import of_trace

TINY = GPT(layers=4, heads=4, width=64, positions=64, vocab=272)
DEEP = GPT(layers=12, heads=2, width=32, positions=32, vocab=100)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only waits for other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Silent:
    """Listens to phases and does nothing."""

    def enter(self, phase: str) -> None:
        """Nothing."""


class Job:
    """A model and an optimizer with one whole update between them."""

    def __init__(
        self,
        model: GPTNetwork,
        *,
        rows: int = 4,
        accum: int = 1,
        autocast: bool = False,
        to_none: bool = True,
        fused: bool = True,
        around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        spec = model.spec
        generator = torch.Generator().manual_seed(0)
        shape = (rows, spec.positions)
        self.ids = torch.randint(0, spec.vocab, shape, generator=generator)
        self.targets = torch.randint(0, spec.vocab, shape, generator=generator)
        self.accum = accum
        self.autocast = autocast
        self.to_none = to_none
        self.around_forward = around_forward

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast), self.around_forward():
            logits = F.linear(self.model.hidden(ids), self.model.head_weight).flatten(0, 1)
            return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")

    def update(self, phases: Any) -> list[Tensor]:
        losses = []
        phases.enter("optimizer")
        self.optimizer.zero_grad(set_to_none=self.to_none)
        halves = zip(self.ids.chunk(self.accum), self.targets.chunk(self.accum), strict=True)
        for ids, targets in halves:
            phases.enter("forward")
            loss = self.loss(ids, targets) / self.targets.numel()
            phases.enter("backward")
            loss.backward()
            losses.append(loss.detach())
        phases.enter("optimizer")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        phases.enter("other")
        return losses

    def tracked(self) -> MemoryAccount:
        """The account of the second update."""
        self.update(Silent())
        tracker = MemoryTracker(
            model=self.model, optimizer=self.optimizer, inputs=[self.ids, self.targets]
        )
        with tracker:
            self.update(tracker)
        return tracker.account()

    def resting_bytes(self) -> int:
        """Bytes of parameters, optimizer state and batch."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *states, self.ids, self.targets]
        return sum(tensor.nbytes for tensor in tensors)


def profiled_peak(job: Job, folder: Path) -> int:
    """Peak bytes by torch's profiler, which sees every allocation of the CPU: what the update
    allocated at most, on top of what was there before it."""
    job.optimizer.zero_grad(set_to_none=True)
    resting = job.resting_bytes()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        job.update(Silent())
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [
        event["args"] | {"ts": event["ts"]}
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    first = min(events, key=lambda event: event["ts"])
    before = first["Total Allocated"] - first["Bytes"]
    return int(resting + max(event["Total Allocated"] for event in events) - before)


def checkpointed(model: GPTNetwork) -> GPTNetwork:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


# --- worked by hand ---------------------------------------------------------------------------


def test_one_matrix_has_the_bytes_worked_by_hand() -> None:
    layer = nn.Linear(4, 8, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x, w = torch.ones(2, 4), torch.ones(2, 8)
    layer(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tracker = MemoryTracker(model=layer, optimizer=optimizer, inputs=[x, w])
    with tracker:
        tracker.enter("forward")
        loss = (layer(x) * w).sum()
        tracker.enter("backward")
        loss.backward()
        tracker.enter("optimizer")
        optimizer.step()
        tracker.enter("other")
    account = tracker.account()
    # parameter 8*4*4; two moments like it and a step of 4 bytes; x of 2*4*4 and w of 2*8*4
    resting = 128 + 260 + 96
    assert account.start_bytes == resting
    assert account.peak_by_phase == {
        # the layer's output and the product, of 64 bytes each
        "forward": resting + 64 + 64,
        # loss and its gradient, the gradient of the output, the gradient of the matrix
        "backward": resting + 4 + 4 + 64 + 128,
        # loss and gradient stay; the fused optimizer makes nothing
        "optimizer": resting + 4 + 128,
        "other": resting + 4 + 128,
    }
    assert (account.peak_bytes, account.peak_phase) == (684, "backward")
    assert account.at_peak == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": 128,
        "gradients": 128,
        "optimizer_state": 260,
        "inputs": 96,
        "temporaries": 4 + 4 + 64,
    }


def test_what_a_product_keeps_for_backward_is_a_saved_activation() -> None:
    # the gradient of a square needs what was squared, 2*8*4 bytes, and nothing else
    layer = nn.Linear(4, 8, bias=False)
    x = torch.ones(2, 4)
    tracker = MemoryTracker(model=layer, inputs=[x])
    with tracker:
        tracker.enter("forward")
        loss = layer(x).square().sum()
        tracker.enter("backward")
        loss.backward()
        tracker.enter("other")
    assert tracker.account().largest_by_category["saved_activations"] == 64


def test_what_backward_needs_stays_a_saved_activation_if_a_variable_holds_it_longer() -> None:
    layer = nn.Linear(4, 8, bias=False)
    tracker = MemoryTracker(model=layer, inputs=[x := torch.ones(2, 4)])
    with tracker:
        tracker.enter("forward")
        out = layer(x)
        unneeded = out + 1
        loss = out.square().sum() + unneeded.sum()
        tracker.enter("backward")
        loss.backward()
        tracker.enter("other")
    assert out.shape == unneeded.shape
    assert tracker.account().largest_by_category["saved_activations"] == 64


def test_a_gradient_that_a_hook_uses_up_at_once_is_still_a_gradient() -> None:
    layer = nn.Linear(4, 8, bias=False)

    def use(parameter: Tensor) -> None:
        parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(use)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("backward")
        layer(torch.ones(2, 4)).sum().backward()
        tracker.enter("optimizer")
    assert tracker.account().largest_by_category["gradients"] == 128


def test_a_gradient_that_was_put_in_place_by_hand_is_a_gradient() -> None:
    layer = nn.Linear(4, 8, bias=False)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("backward")
        layer.weight.grad = torch.ones(8, 4)
        tracker.enter("optimizer")
        layer.weight.grad = None
    assert tracker.account().largest_by_category["gradients"] == 128


def test_a_storage_is_counted_once_however_many_views_it_has() -> None:
    layer = nn.Linear(4, 8, bias=False)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("forward")
        whole = torch.empty(100)
        views = [whole[:50], whole.view(10, 10), whole[::2], whole.detach()]
        tracker.enter("other")
    account = tracker.account()
    assert account.peak_bytes == 128 + 400
    del whole, views
    assert tracker.account() == account, "what happens after the update is not part of it"


def test_a_storage_that_grows_and_shrinks_is_followed() -> None:
    layer = nn.Linear(4, 8, bias=False)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("forward")
        by_operation, by_storage = torch.empty(10), torch.empty(10)
        by_operation.resize_(1000)
        tracker.enter("backward")
        by_operation.untyped_storage().resize_(0)
        tracker.enter("optimizer")
        by_storage.untyped_storage().resize_(800)
        tracker.enter("other")
    by_phase = tracker.account().peak_by_phase
    assert by_phase["forward"] == 128 + 4000 + 40
    assert by_phase["optimizer"] == 128 + 0 + 800


def test_what_nobody_owns_is_called_unattributed() -> None:
    layer = nn.Linear(4, 8, bias=False)
    stray = torch.ones(1000)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("forward")
        stray.add_(1)
        tracker.enter("other")
    account = tracker.account()
    assert account.at_peak["unattributed"] == 4000
    assert account.start_bytes == 128 + 4000
    assert account.largest[0].birth == "before"


def test_what_the_allocator_holds_besides_is_unattributed_and_counted_once() -> None:
    layer = nn.Linear(4, 8, bias=False)
    stray = torch.ones(1000)
    tracker = MemoryTracker(model=layer, held=128 + 4000 + 500)  # the tensors, and a workspace
    with tracker:
        tracker.enter("forward")
        stray.add_(1)  # was held all the time, and only now shows up
        del stray
        tracker.enter("other")
    account = tracker.account()
    assert account.start_bytes == 128 + 4000 + 500
    assert account.at_peak["unattributed"] == account.largest_by_category["unattributed"] == 4500
    assert account.peak_by_phase["other"] == 128 + 500
    sizes = {item.name: item.bytes for item in account.largest}
    assert sizes["held beside tensors: workspaces of libraries"] == 500


def test_tensors_that_arrive_with_the_data_are_inputs() -> None:
    layer = nn.Linear(4, 8, bias=False)
    tracker = MemoryTracker(model=layer)
    with tracker:
        tracker.enter("data")
        ids = torch.zeros(10, dtype=torch.int64)
        tracker.enter("transfer")
        moved = ids.to("cpu", copy=True)
        tracker.enter("other")
    assert moved.shape == (10,)
    assert tracker.account().at_peak["inputs"] == 160


# --- what no account of results can have (scripts/accounts.py) --------------------------------


def test_what_is_no_operation_s_result_is_named_and_taken_off() -> None:
    def event(ts: float, size: int, address: int, total: int) -> dict[str, Any]:
        args = {"Addr": address, "Bytes": size, "Total Allocated": total}
        return {"name": "[memory]", "ts": ts, "args": args}

    memory = [
        event(1.0, 100, 1, 1100),  # outside operations, kept
        event(2.1, 300, 2, 1400),  # result of softmax
        event(2.2, 50, 3, 1450),  # its own
        event(2.3, -50, 3, 1400),
        event(3.1, 70, 3, 1470),  # own of mm, at the peak: the same address again
        event(3.2, 30, 4, 1500),  # result of mm
        event(3.3, -70, 3, 1430),
        event(4.1, -300, 2, 1130),  # freed in another operation than it was made in
    ]
    spans = [
        {"name": f"seen::{name}", "ts": ts, "dur": 0.5}
        for name, ts in (("add_", 4.0), ("mm", 3.0), ("_softmax", 2.0))
    ]
    found = of_trace([*spans, *reversed(memory)], resting=10)
    assert found.peak == 10 + 500
    assert found.unseen == {"mm": 70, "outside operations": 100}
    assert found.peak_without == 10 + 330


# --- the account of a log ---------------------------------------------------------------------


def life(birth: int, death: int | None = None, role: str | None = None) -> Life:
    return Life(
        shape=(1,), dtype="float32", label="x", where="", birth=birth, death=death, role=role
    )


def test_the_peak_is_split_by_what_each_storage_was_for_in_its_whole_life() -> None:
    weight, kept, brief = life(-1, role="parameters"), life(1, death=2), life(1, death=1)
    log = Log(
        stretches=["other", "forward", "backward"],
        before=[Event(weight, 100, -1)],
        events=[
            Event(None, 0, 1),
            Event(kept, 30, 1),
            Event(brief, 50, 1),
            Event(brief, -50, 1),
            Event(None, 0, 2),
            Event(kept, -30, 2),
        ],
    )
    account = account_of(log)
    assert (account.start_bytes, account.peak_bytes, account.peak_phase) == (100, 180, "forward")
    split = {"parameters": 100, "saved_activations": 30, "temporaries": 50}
    assert account.at_peak == dict.fromkeys(CATEGORIES, 0) | split
    assert account.peak_by_phase == {"forward": 180, "backward": 130}
    assert [item.bytes for item in account.largest] == [100, 50, 30]
    assert [item.birth for item in account.largest] == ["before", "forward", "forward"]
    assert [item.death for item in account.largest] == [None, "forward", "backward"]


def test_what_outlives_the_backward_pass_was_not_kept_for_it() -> None:
    # made in the first forward pass, dropped in the second: a variable held it, not autograd
    held = life(1, death=3)
    log = Log(
        stretches=["other", "forward", "backward", "forward", "backward"],
        before=[],
        events=[Event(held, 30, 1), Event(held, -30, 3)],
    )
    assert account_of(log).at_peak["temporaries"] == 30


def test_at_the_end_of_each_phase_the_bytes_of_every_category_are_known() -> None:
    log = Log(stretches=["other", "forward", "backward", "other"], before=[], events=[])
    weight, kept, scratch = life(-1, role="parameters"), life(1, 2), life(2, 2)
    log.before.append(Event(weight, 100, -1))
    log.events += [
        Event(None, 0, 1),
        Event(kept, 40, 1),
        Event(None, 0, 2),
        Event(scratch, 7, 2),
        Event(scratch, -7, 2),
        Event(kept, -30, 2),
        Event(None, 0, 3),
        Event(kept, -10, 3),
    ]
    ends = account_of(log).at_boundaries
    assert [phase for phase, _ in ends] == ["forward", "backward", "other"]
    assert [held["parameters"] for _, held in ends] == [100, 100, 100]
    assert [held["saved_activations"] for _, held in ends] == [40, 10, 0]
    assert [held["temporaries"] for _, held in ends] == [0, 0, 0]


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    sizes = [1] * 5000
    sizes[3333] = 1000
    events = []
    for size in sizes:
        one = life(1, death=1)
        events += [Event(one, size, 1), Event(one, -size, 1)]
    curve = account_of(Log(stretches=["other", "forward"], before=[], events=events)).curve
    assert len(curve) <= CURVE_POINTS
    assert max(curve, key=lambda point: point[1]) == (6666, 1000, "forward")


# --- a whole update against an independent measure --------------------------------------------


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", [TINY, DEEP], ids=["tiny", "deep"])
def test_the_peak_is_what_torch_allocated(
    spec: GPT, autocast: bool, accum: int, tmp_path: Path
) -> None:
    # what is left is what kernels allocate within one operation
    job = Job(spec.build(0), autocast=autocast, accum=accum)
    account = job.tracked()
    assert account.peak_bytes == pytest.approx(profiled_peak(job, tmp_path), rel=0.005)


def test_the_peak_under_checkpointing_is_what_torch_allocated(tmp_path: Path) -> None:
    job = Job(checkpointed(TINY.build(0)))
    account = job.tracked()
    assert account.peak_bytes == pytest.approx(profiled_peak(job, tmp_path), rel=0.005)


def test_the_categories_agree_with_torchs_own_tracker() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    job = Job(TINY.build(0), fused=False)
    account = job.tracked()
    job.optimizer.zero_grad()
    theirs = MemTracker()
    theirs.track_external(job.model, job.optimizer, job.ids, job.targets)
    with theirs:
        job.update(Silent())
    peak = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert account.peak_bytes == pytest.approx(peak["Total"], rel=0.005)
    figures = {getattr(key, "value", key): value for key, value in peak.items()}
    assert account.at_peak["parameters"] == figures["Parameter"]
    assert account.at_peak["optimizer_state"] == figures["Optstate"]


# --- categories and names ---------------------------------------------------------------------


def test_parameters_gradients_and_state_have_the_bytes_of_the_model() -> None:
    account = Job(TINY.build(0)).tracked()
    params = 4 * TINY.describe().params
    tensors = 4 + 12 * 4  # embeddings and last norm, and 12 of each block
    assert account.largest_by_category["parameters"] == params
    assert account.largest_by_category["gradients"] == params
    assert account.largest_by_category["optimizer_state"] == 2 * params + 4 * tensors
    assert account.largest_by_category["inputs"] == 2 * 4 * 64 * 8
    assert account.largest_by_category["unattributed"] == 0
    assert sum(account.at_peak.values()) == account.peak_bytes


def test_saved_activations_of_a_layer_are_those_its_backward_needs() -> None:
    # one more layer keeps, for 256 tokens of width d=64 in fp32: the inputs of both norms (2d;
    # one is the sum that the last layer's successor would keep), their outputs (2d), qkv (3d),
    # attention's output (d), its transposed copy (d) where it is made, the MLP's inner values
    # before and after GELU (8d); and mean and rstd of two norms and one logsumexp for 4 heads
    def saved(layers: int) -> int:
        spec = GPT(layers=layers, heads=4, width=64, positions=64, vocab=272)
        return Job(spec.build(0)).tracked().largest_by_category["saved_activations"]

    extra = saved(5) - saved(4)
    assert extra == 256 * 4 * ((2 + 2 + 3 + 1 + 8) * 64 + 4 + 4)


def test_checkpointing_lowers_saved_activations_to_the_inputs_of_blocks() -> None:
    plain = Job(TINY.build(0)).tracked()
    less = Job(checkpointed(TINY.build(0))).tracked()
    # 256 tokens of width 64 in fp32. Plain, when the forward pass ends: 16 times that for each of
    # 4 blocks (see above), the last norm's input and output, the loss's log-probabilities and
    # its count of targets; mean and rstd of each norm, logsumexp of 4 heads; 64 positions
    one, stats = 256 * 64 * 4, 256 * 4 * (4 + 4)
    kept = 4 * (16 * one + stats) + 2 * one + 256 * 4 * 2 + 256 * 272 * 4 + 4 + 64 * 8
    assert plain.largest_by_category["saved_activations"] == kept
    # checkpointed, in the last block's backward: the inputs of 3 blocks, all of one, positions
    assert less.largest_by_category["saved_activations"] == 19 * one + stats + 64 * 8
    # while the forward pass runs: 4 inputs, the last output and its norm, the loss's
    # log-probabilities and the logits of 256*272*4 that they were made from
    resting = less.start_bytes - 4 * TINY.describe().params  # gradients were cleared before
    forward = less.peak_by_phase["forward"] - resting
    assert forward == pytest.approx((4 + 2) * one + 2 * 256 * 272 * 4, rel=0.02)
    assert less.largest_by_category["parameters"] == plain.largest_by_category["parameters"]


def test_recomputed_activations_are_saved_ones_and_not_temporaries() -> None:
    account = Job(checkpointed(TINY.build(0))).tracked()
    again = [item for item in account.largest if item.birth == "backward"]
    kept = {item.name for item in again if item.category == "saved_activations"}
    assert account.peak_phase == "backward"
    assert {"addmm", "gelu"} & kept


def test_copies_that_offloading_keeps_are_saved_activations() -> None:
    offloaded = Job(TINY.build(0), around_forward=torch.autograd.graph.save_on_cpu).tracked()
    plain = Job(TINY.build(0)).tracked()
    saved = offloaded.largest_by_category["saved_activations"]
    assert saved >= plain.largest_by_category["saved_activations"]


def test_gradients_cleared_to_zero_are_live_in_the_forward_pass_and_none_are_not() -> None:
    none = Job(TINY.build(0), to_none=True).tracked()
    zero = Job(TINY.build(0), to_none=False).tracked()
    params = 4 * TINY.describe().params
    # the update that is watched begins with the gradients of the one before, either way
    assert zero.start_bytes == none.start_bytes
    assert zero.peak_by_phase["forward"] - none.peak_by_phase["forward"] == params


def test_the_largest_object_is_named_with_shape_format_and_place() -> None:
    spec = GPT(layers=1, heads=2, width=16, positions=64, vocab=1000)
    account = Job(spec.build(0)).tracked()
    assert account.largest_live_object == (
        "saved_activations: log_softmax (256, 1000) float32 in head"
    )
    assert account.largest[0].bytes == 256 * 1000 * 4
    names = [str(item) for item in account.largest]
    assert "parameters: embed.weight (1000, 16) float32" in names
    assert "optimizer_state: embed.weight.exp_avg (1000, 16) float32" in names


def test_the_logits_are_called_so() -> None:
    spec = GPT(layers=1, heads=2, width=16, positions=64, vocab=1000)
    job = Job(spec.build(0))
    tracker = MemoryTracker(model=job.model)
    with tracker:
        tracker.enter("forward")
        logits = F.linear(job.model.hidden(job.ids), job.model.head_weight)
        tracker.enter("other")
    assert logits.shape == (4, 64, 1000)
    assert "logits (256, 1000) float32 in head" in tracker.account().largest_live_object


def test_what_backward_makes_is_named_by_the_module_it_belongs_to() -> None:
    spec = GPT(layers=2, heads=2, width=64, positions=64, vocab=16)
    account = Job(spec.build(0)).tracked()
    made = [item for item in account.largest if item.birth == "backward"]
    assert made
    # backward begins at the end: the first gradients are those of the last block
    assert all(item.where.startswith("blocks.1.") for item in made)


def test_the_account_is_plain_json() -> None:
    account = Job(DEEP.build(0)).tracked()
    read = json.loads(json.dumps(account.to_json(), allow_nan=False))
    assert read["peak_bytes"] == account.peak_bytes
    assert read["largest_live_object"] == account.largest_live_object
    assert read["largest"][0]["text"] == account.largest_live_object
    assert read["at_peak"] == account.at_peak
    assert max(point[1] for point in read["curve"]) == account.peak_bytes


# --- it only watches --------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_a_watched_update_computes_the_same_bits(autocast: bool) -> None:
    plain, watched = (Job(checkpointed(TINY.build(0)), autocast=autocast) for _ in range(2))
    for job in (plain, watched):
        job.update(Silent())
    tracker = MemoryTracker(model=watched.model, optimizer=watched.optimizer)
    expected = plain.update(Silent())
    with tracker:
        losses = watched.update(tracker)
    assert torch.equal(losses[0], expected[0])
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_no_hook_stays_and_the_next_update_is_not_watched() -> None:
    resize = torch.UntypedStorage.resize_
    job = Job(TINY.build(0))
    account = job.tracked()
    for module in job.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in job.model.parameters():
        assert not parameter._post_accumulate_grad_hooks
    tracker = MemoryTracker(model=job.model, optimizer=job.optimizer)
    with tracker:
        tracker.enter("other")
    job.update(tracker)
    assert tracker.account().peak_bytes == tracker.account().start_bytes < account.peak_bytes
    assert torch.UntypedStorage.resize_ is resize


def test_an_update_that_fails_leaves_no_hook_either() -> None:
    job = Job(TINY.build(0))
    tracker = MemoryTracker(model=job.model, optimizer=job.optimizer)
    with pytest.raises(RuntimeError, match="planted"), tracker:
        tracker.enter("forward")
        job.model.hidden(job.ids)
        raise RuntimeError("planted")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())
    assert tracker.account().peak_phase == "forward"


def test_the_account_keeps_neither_model_nor_tensors_alive() -> None:
    job = Job(TINY.build(0))
    job.update(Silent())
    tracker = MemoryTracker(model=job.model, optimizer=job.optimizer, inputs=[job.ids])
    with tracker:
        job.update(tracker)
    remains = [weakref.ref(job.model), weakref.ref(job.optimizer), weakref.ref(job.ids)]
    del job
    gc.collect()
    assert [ref() for ref in remains] == [None, None, None]
    assert tracker.account().peak_bytes > 0


# --- fake tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_fake_tensors_give_the_account_of_real_ones(autocast: bool) -> None:
    real = Job(checkpointed(TINY.build(0)), autocast=autocast).tracked()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Job(checkpointed(GPTNetwork(TINY)), autocast=autocast).tracked()
    ours, theirs = fake.to_json(), real.to_json()
    if autocast:
        # autocast frees its copies of weights in the order of their addresses
        for name in ("curve", "by_category"):
            del ours[name], theirs[name]
    assert ours == theirs


@pytest.mark.long
def test_forty_eight_layers_take_about_a_second_on_fake_tensors() -> None:
    import time

    spec = GPT(layers=48, heads=25, width=1600, positions=1024, vocab=50257)
    with FakeTensorMode(allow_non_fake_inputs=True):
        job = Job(GPTNetwork(spec), rows=4)
        job.update(Silent())
        start = time.process_time()
        job.update(Silent())
        plain = time.process_time() - start
        account = job.tracked()
        watched = time.process_time() - start - 2 * plain
    assert account.largest_by_category["parameters"] == 4 * 1_557_611_200
    assert watched - plain < 2.0


# --- what a layer keeps (specification equation 7.2) ------------------------------------------


SHORT = replace(TINY, positions=40)


def kept_by_layers(attention: str, **settings: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = SHORT.build(0)
    backend = getattr(SDPBackend, attention)
    job = Job(model, rows=3, around_forward=lambda: sdpa_kernel(backend), **settings)
    job.update(Silent())
    tracker = MemoryTracker(
        model=model, optimizer=job.optimizer, inputs=[job.ids, job.targets], grids=[(3, 40)]
    )
    with tracker:
        job.update(tracker)
    return tracker.account().retained


def test_a_layer_keeps_the_hidden_sized_tensors_counted_by_hand() -> None:
    kept = kept_by_layers("FLASH_ATTENTION")
    # Two normalised inputs, three of queries, keys and values, what attention returned, two sums
    # of the residual branch, four before and four after the activation function; and for each
    # token two statistics of each normalisation and one of each head.
    by_hand = 2 + 3 + 1 + 2 + 4 + 4 + (2 * 2 + SHORT.heads) / SHORT.width
    assert kept.n_hidden == pytest.approx(by_hand, rel=1e-12)
    assert kept.n_score == 0
    assert (kept.layers, kept.rows, kept.length, kept.element_bytes) == (4, 3, 40, 4)
    assert kept.bytes == pytest.approx(4 * 4 * by_hand * 3 * 40 * 64, rel=1e-12)
    assert kept.estimate == pytest.approx(kept.bytes, rel=1e-12) and kept.other_bytes == 0


def test_separate_products_keep_one_score_tensor_a_layer() -> None:
    kept = kept_by_layers("MATH")
    assert kept.n_score == 1
    scores = 3 * SHORT.heads * 40**2
    hidden = kept.n_hidden * 3 * 40 * SHORT.width
    assert kept.bytes == pytest.approx(4 * 4 * (scores + hidden), rel=1e-12)


def test_copies_of_weights_are_not_counted_as_activations() -> None:
    kept = kept_by_layers("FLASH_ATTENTION", autocast=True)
    matrices = sum(p.numel() for p in SHORT.build(0).blocks.parameters() if p.ndim == 2)
    assert kept.other_bytes == pytest.approx(2 * matrices, rel=0.01)  # and the biases


def test_the_curve_by_category_sums_to_the_curve() -> None:
    account = Job(SHORT.build(0)).tracked()
    totals = [point[1] for point in account.curve]
    columns = zip(*account.by_category.values(), strict=True)
    assert [sum(column) for column in columns] == totals
    assert max(account.by_category["saved_activations"]) > 0
    assert set(account.by_category["parameters"]) == {account.at_peak["parameters"]}


def test_the_kind_of_an_object_tells_which_lever_it_needs() -> None:
    found = {str(item): item.kind for item in Job(SHORT.build(0)).tracked().largest}
    for text, kind in found.items():
        assert kind == ("logits" if "in head" in text else "saved_activations"), text
    assert "logits" in found.values()
