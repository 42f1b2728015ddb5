"""One component call under the guard: its arguments afterwards, and those that no certificate covers."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.interception.component_locks import find_lock
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.records import CallSummary, Scaling
from stopdown.runtime import guarded_call
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.guarded_call import Call, GivenTensors
from stopdown.runtime.repairs import Component


class Decoder(nn.Module):
    """A module with one named argument."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z


def make_call(z: torch.Tensor) -> tuple[Call, ComponentCall]:
    """Return a guarded call of a decoder, and one call of it with this argument."""
    module = Decoder()
    callee = Callee("vae.decode", module, "forward", "decode")
    return Call(callee, Component(module, "vae"), "forward"), ComponentCall(callee, (z,))


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_write_to_an_argument_is_seen(is_inference: bool) -> None:
    """Also of a tensor of inference mode, whose writes PyTorch does not count: its values are sampled."""
    with torch.inference_mode(is_inference):
        z = torch.ones(3, 100, dtype=torch.float16)
        given = GivenTensors(make_call(z)[1])
        assert not given.were_written
        z.mul_(2)
        assert given.were_written


def test_nan_in_an_untouched_argument_is_no_write() -> None:
    """Samples are compared bit by bit: NaN equals itself there."""
    with torch.inference_mode():
        z = torch.full((4,), math.nan)
        assert not GivenTensors(make_call(z)[1]).were_written


def test_a_size_beyond_the_certificate_is_noted() -> None:
    """The length of an argument is compared without the batch; limits of other methods are left out."""
    planned = Scaling(sizes={"forward.z": ((4, 6),), "encode.z": ((2, 2),)})
    for shape, found in (((9, 4, 6), {}), ((1, 5, 6), {"z": ("5 × 6", "4 × 6")})):
        guarded, call = make_call(torch.zeros(shape))
        guarded.begin(call, planned)
        assert guarded.state.notes.oversizes == found


def test_a_value_beyond_the_certificate_is_reported_once() -> None:
    """The first excess is a sentence; later ones are counted, the largest is kept; NaN is beyond too."""
    guarded, _ = make_call(torch.zeros(1))
    within, beyond, worse = (CallCheck(limited=(("z", 64.0, x),)) for x in (64.0, 65.0, 80.0))
    assert list(guarded.record_excesses(within)) == []
    (sentence,) = guarded.record_excesses(beyond)
    assert sentence.startswith(
        "1 call of `vae.decode` not certified: `z` reached 65, and the plan's"
    )
    assert list(guarded.record_excesses(worse)) == []
    (total,) = guarded.list_excesses()
    assert total.startswith("2 calls of `vae.decode` not certified: `z` reached 80")
    other, _ = make_call(torch.zeros(1))
    assert len(list(other.record_excesses(CallCheck(limited=(("z", 64.0, math.nan),))))) == 1


def test_a_call_counted_with_a_fault_may_be_right_in_the_end() -> None:
    """Calls are counted with their faults and least headroom; a fault that is none is taken back."""
    guarded, _ = make_call(torch.zeros(1))
    guarded.record(0.5, CallCheck(headroom_bits=3.0))
    guarded.record(0.5, CallCheck(is_finite=False, headroom_bits=1.0, is_seen=False))
    assert (guarded.summary.calls, guarded.summary.non_finite, guarded.unseen) == (2, 1, 1)
    assert guarded.summary.headroom_bits == 1.0
    guarded.record_as_right()
    assert guarded.summary.non_finite == 0


class Watched(threading.Condition):
    """A lock that says when another thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self._first = threading.Event(), threading.get_ident()

    def __enter__(self) -> bool:
        if threading.get_ident() != self._first:
            self.asked.set()
        return super().__enter__()


@pytest.mark.parametrize("kind", ["calls", "formats", "corrections"])
def test_what_two_threads_note_at_once_is_all_there(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first thread has read the counts and not written them yet, the second one notes as well.

    It waits for the first, or has written by then: no load and no clock decides which.
    """
    guarded, _ = make_call(torch.zeros(1))
    guarded.summary = CallSummary("vae", "decode", 0, 0.0, (), 2)
    note, place, name = {
        "calls": (lambda _: guarded.record(0.0, CallCheck()), CallSummary, "add"),
        "formats": (guarded.record_own_precision, guarded_call, "replace"),
        "corrections": (lambda _: guarded.record_as_right(), guarded_call, "replace"),
    }[kind]
    lock, second = Watched(), threading.Thread(target=note, args=("bf16",))
    monkeypatch.setattr(find_lock(guarded.module), "_turn", lock)
    write = getattr(place, name)

    def interrupt(held: Any, *args: Any, **changes: Any) -> Any:
        if second.ident is None:
            second.start()
            while second.is_alive() and not lock.asked.is_set():
                second.join(0.001)
        return write(held, *args, **changes)

    monkeypatch.setattr(place, name, interrupt)
    note("fp16")
    second.join()
    made = {
        "calls": guarded.summary.calls,
        "formats": sorted(guarded.summary.precisions),
        "corrections": guarded.summary.non_finite,
    }
    assert made[kind] == {"calls": 2, "formats": ["bf16", "fp16"], "corrections": 0}[kind]


def test_the_device_is_the_one_that_computes_now() -> None:
    """A pipeline that was called on the host may be moved, or offloaded, before a call fails."""
    module, program = nn.Linear(2, 2), SimpleNamespace(_execution_device="cpu")
    call = Call(Callee("net", module, "forward", "call"), Component(module, "net"), "forward")
    assert call.find_device(program) == torch.device("cpu")
    program._execution_device = "cuda:1"
    assert call.find_device(program) == torch.device("cuda:1")
