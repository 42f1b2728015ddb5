"""Two guarded pipelines in two threads: each as if it were alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline_calls import call_pipeline
from stopdown import testing
from stopdown.errors import NonFiniteError
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.fault_texts import Fault
from stopdown.runtime.guard import guard


def quiet(text: str) -> None:
    """Hears of a repair and says nothing."""


def run_guarded(name: str, pipe: Any, together: Barrier) -> tuple[Any, Any]:
    """Pixels and repairs of a run that begins when the other one does."""
    together.wait()
    with guard(pipe, announce=quiet) as handle:
        pixels = call_pipeline(pipe, name)
    return pixels, [(repair.component, repair.action, repair.step) for repair in handle.repairs]


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
            stack.enter_context(testing.assert_untouched(pipe))
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
    work, entered, go_on = FaultHandler._work_on, [Event(), Event()], Event()

    def wait(self: FaultHandler, fault: Fault) -> Any:
        next(x for x in entered if not x.is_set()).set()
        assert go_on.wait(120)
        return work(self, fault)

    monkeypatch.setattr(FaultHandler, "_work_on", wait)
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
