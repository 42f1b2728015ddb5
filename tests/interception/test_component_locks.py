"""Guarded pipelines and modules in several threads: each call as if it were alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.pipeline_calls import call_pipeline, quiet
from models.snapshots import assert_untouched
from processes.guarded_threads import ROWS, WIDTH, call_from_threads, make_streams
from stopdown import testing
from stopdown.errors import InputError, NonFiniteError
from stopdown.interception.component_locks import find_lock
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.numerics import relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.guard import guard


def run_guarded(name: str, pipe: Any, together: Barrier) -> tuple[Any, Any]:
    """Pixels and repairs of a run that begins when the other one does."""
    together.wait()
    with guard(pipe, announce=quiet) as handle:
        pixels = call_pipeline(pipe, name)
    return pixels, [(repair.component, repair.action, repair.step) for repair in handle.repairs]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("overflows", [(None, None), ("vae", "transformer")], ids=str)
def test_two_pipelines_in_two_threads(overflows: tuple[str | None, str | None]) -> None:
    """Healthy or repaired, alone or beside another: the same pixels, repairs, and nothing left."""
    made = [
        (name, testing.make_pipeline(name, overflow=overflow, dtype=torch.float16))
        for name, overflow in zip(("cogview3plus", "cogvideox"), overflows, strict=True)
    ]
    alone = [run_guarded(name, pipe, Barrier(1)) for name, pipe in made]
    together = Barrier(2)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for _, pipe in made:
            stack.enter_context(assert_untouched(pipe))
        jobs = [pool.submit(run_guarded, name, pipe, together) for name, pipe in made]
        beside = [job.result(timeout=240) for job in jobs]
    for (pixels, repairs), (expected, expected_repairs), overflow in zip(
        beside, alone, overflows, strict=True
    ):
        np.testing.assert_array_equal(pixels, expected)
        assert repairs == expected_repairs
        assert bool(repairs) == (overflow is not None)


def fail() -> None:
    """A call that overflows under a guard of its own."""
    layer = nn.Linear(4, 4).half().eval().requires_grad_(False)
    layer.weight.fill_(60000)
    with guard(layer, on_fault="raise"), pytest.raises(NonFiniteError):
        layer(torch.ones(1, 4, dtype=torch.float16))


def test_faults_of_two_threads_are_worked_on_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for the cause patches what threads share: the second one waits until the first is done."""
    work, entered, go_on = FaultHandler._decide, [Event(), Event()], Event()

    def wait(self: FaultHandler, fault: Fault) -> Any:
        next(x for x in entered if not x.is_set()).set()
        assert go_on.wait(120)
        return work(self, fault)

    monkeypatch.setattr(FaultHandler, "_decide", wait)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fail) for _ in entered]
        try:
            assert entered[0].wait(120)
            assert not entered[1].wait(0.5)
        finally:
            go_on.set()
        for job in jobs:
            job.result(timeout=120)


class Waiting(nn.Module):
    """Stays in the middle of being exported until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inside, self.go_on = nn.Linear(2, 2), Event(), Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 2]`, the same again."""
        self.inside.set()
        assert self.go_on.wait(120)
        return self.linear(x)


def test_a_guard_is_awake_while_another_thread_exports() -> None:
    """PyTorch says of the whole process that it is compiling then; only that thread's code is traced."""
    waiting, layer = Waiting(), nn.Linear(4, 4).half().eval().requires_grad_(False)
    layer.weight.fill_(60000)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(torch.export.export, waiting, (torch.ones(1, 2),), strict=False)
        try:
            assert waiting.inside.wait(120)
            assert torch.compiler.is_compiling()
            with guard(layer, on_fault="raise"), pytest.raises(NonFiniteError):
                layer(torch.ones(1, 4, dtype=torch.float16))
        finally:
            waiting.go_on.set()
        job.result(timeout=120)


def test_a_guard_is_awake_after_calls_were_put_back_beneath_another() -> None:
    """A tracer that began before a guard puts back plain calls: the next guard does not rely on them."""
    with guard(nn.Linear(4, 4).half().eval().requires_grad_(False)), Patches() as patches:
        plain = nn.Module._wrapped_call_impl
        patches.set_class_attribute(nn.Module, "__call__", plain)
        fail()


@pytest.mark.thorough
def test_one_module_called_from_eight_threads() -> None:
    """Each call is right and counted while others overflow and the module is repaired, again and again."""
    found = call_from_threads(480, 8, calls_per_guard=96)
    assert found["right"] == found["calls"] == 480
    assert found["faults"] >= found["repair: rescaled"] >= 5
    assert not found.keys() - {"calls", "right", "faults", "repair: rescaled"}


@pytest.mark.slow
def test_ten_thousand_calls_from_eight_threads() -> None:
    """None of them is wrong, lost or ended by an error."""
    found = call_from_threads(10_000, 8)
    assert found["right"] == found["calls"] == 10_000
    assert not found.keys() - {"calls", "right", "faults", "repair: rescaled"}


def test_paths_of_modules_are_those_of_one_thread() -> None:
    """What another thread calls meanwhile is not on the way to what this one calls."""
    net, entered = nn.Sequential(nn.ReLU(), nn.ReLU()), list[str]()
    with Patches() as patches:
        ModulePaths(net, patches, on_enter=entered.append)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(net, torch.ones(1)).result(timeout=120)
        assert entered == []
        net(torch.ones(1))
    assert entered == ["0", "1"]


def test_a_change_waits_for_calls_of_other_threads() -> None:
    """And calls that begin meanwhile wait for it; the thread that changes a module may call it."""
    lock, order, inside, go_on = find_lock(nn.ReLU()), list[str](), Event(), Event()

    def call_first() -> None:
        with lock.calling():
            inside.set()
            assert go_on.wait(120)
            order.append("called")

    def change() -> None:
        with lock.changing(), lock.calling():
            order.append("changed")

    def call_last() -> None:
        with lock.calling():
            order.append("called again")

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(call_first)]
        assert inside.wait(120)
        jobs.append(pool.submit(change))
        for _ in range(2000):
            if lock._owner is None:
                time.sleep(0.001)
        jobs.append(pool.submit(call_last))
        go_on.set()
        for job in jobs:
            job.result(timeout=120)
    assert order == ["called", "changed", "called again"]


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_guard_is_removed_while_threads_call(is_planned: bool) -> None:
    """Calls of now are right with it or made again without it, and the weights are what they were."""
    half, wide, _ = make_streams()
    module = wide if is_planned else half
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 500.0
    given = x.to(module.enter.weight.dtype)
    expected, before = wide(given.float()), [x.clone() for x in module.parameters()]
    plan = measure_plan({"part": module}, run=lambda: module(given)) if is_planned else None
    is_over = Event()

    def call() -> list[float]:
        errors = []
        while not is_over.is_set():
            errors.append(float((module(given).float() - expected).norm() / expected.norm()))
        return errors

    for number in range(4):
        handle = guard({"part": module}, plan, announce=quiet)
        is_over.clear()
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(call) for _ in range(4)]
            time.sleep(0.02 * number)
            handle.remove()
            is_over.set()
            errors = [x for job in jobs for x in job.result(timeout=120)]
        found = [
            x for x in errors if x == x or is_planned
        ]  # plain fp16 overflows, as it did before
        assert max(found, default=0.0) < 0.01
        assert all(map(torch.equal, before, module.parameters()))


class Mixing(nn.Module):
    """A norm that refuses a stream which an argument in fp32 has widened, and a product that overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """`[N, 4]`, the same again."""
        return self.norm(self.enter(x) + more)


def test_a_refused_call_is_made_again_after_another_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that refuses its dtypes while another thread's repair begins is asked for its exponents."""
    torch.manual_seed(0)
    module = Mixing().eval().requires_grad_(False)
    module.enter.weight *= 60000
    module.half()
    x, more = torch.full((2, 4), 9.0).half(), torch.ones(2, 4)
    wide = copy.deepcopy(module).float()
    expected, lock = wide(x.float(), more), find_lock(module)
    is_refused = Event()
    answer, check = FaultHandler.answer_refusal, FaultHandler.answer

    def wait(self: FaultHandler, fault: Fault, error: Exception) -> Any:
        is_refused.set()
        for _ in range(2000):
            if lock._owner is None:
                time.sleep(0.001)
        return answer(self, fault, error)

    def begin(self: FaultHandler, fault: Fault) -> Any:
        assert is_refused.wait(120)
        return check(self, fault)

    monkeypatch.setattr(FaultHandler, "answer_refusal", wait)
    monkeypatch.setattr(FaultHandler, "answer", begin)
    with guard(module, announce=quiet) as handle, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(module, x, more), pool.submit(module, x, more.half())]
        found = [job.result(timeout=120) for job in jobs]
    assert handle.repairs[0].action == "rescaled"
    for one in found:
        assert float((one.float() - expected).abs().max()) < 0.01


def test_overlapping_guards_are_refused() -> None:
    """Repairs of a module and of a part of it would multiply the same values: one message."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    with guard({"whole": module}):
        with pytest.raises(InputError, match="requested for part, a Linear") as raised:
            guard({"part": module[0]})
        with guard({"same": module}), guard({"other": nn.Linear(2, 2)}):
            pass
    assert raised.value.remedy == "Guard the Sequential alone."
    with guard({"part": module[0]}), pytest.raises(InputError, match="requested for whole"):
        guard({"whole": module})


PAUSES: list[Callable[[], object]] = []


class Pausing(nn.Module):
    """Two layers, the first of which is scaled; `PAUSES` are called between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 4]`, the same again."""
        inside = self.one(x)
        for pause in PAUSES:
            pause()
        return self.two(inside)


def test_parts_are_watched_again_after_the_last_call_whoever_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that no exponents watch holds its place longest: a part alone gives its own values then."""
    torch.manual_seed(1)
    module, given = Pausing().eval().requires_grad_(False), torch.ones(1, 4)
    module.one.weight.mul_(1e6)
    module.two.weight.mul_(1e-4)
    inside, go_on = Event(), Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(120)

    wanted = module.one(given)  # beyond fp16's range
    plan = measure_plan({"part": module}, run=lambda: module(given))
    assert plan.components[0].in_force.exponents
    with apply_plan({"part": module}, plan), ThreadPoolExecutor(1) as pool:
        monkeypatch.setitem(globals(), "PAUSES", [wait])
        job = pool.submit(module, given)
        assert inside.wait(120)
        with find_lock(module).calling():
            go_on.set()
            job.result(timeout=120)
        assert relative_l2(module.one(given.half()).float(), wanted) < 2e-3
