"""Tests of the undo stack: what is put on comes off, to the bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stopdown.interception import patches as patches_module
from stopdown.interception.patches import Patches, interrupts_postponed


class Thing:
    """An object with a class attribute to shadow."""

    colour = "red"


def test_an_absent_attribute_is_absent_again() -> None:
    """An attribute set over a class attribute leaves no trace in the instance."""
    thing, patches = Thing(), Patches()
    patches.set_attribute(thing, "colour", "blue")
    patches.set_attribute(thing, "colour", "green")
    assert thing.colour == "green"
    patches.undo()
    assert vars(thing) == {}
    assert thing.colour == "red"


def test_items_come_back_with_their_value() -> None:
    """Entries of a mapping are restored, new ones removed."""
    mapping, patches = {"a": 1}, Patches()
    patches.set_item(mapping, "a", 2)
    patches.set_item(mapping, "b", 3)
    patches.undo()
    assert mapping == {"a": 1}


def test_undoing_twice_is_harmless() -> None:
    """A second undo does nothing, also after someone else changed the attribute."""
    thing, patches = Thing(), Patches()
    patches.set_attribute(thing, "colour", "blue")
    patches.undo()
    thing.colour = "theirs"
    patches.undo()
    assert thing.colour == "theirs"


def test_an_exception_takes_everything_back() -> None:
    """As a context manager the stack undoes when the block fails."""
    tensor = torch.ones(2)

    def fail() -> None:
        with Patches() as patches:
            patches.write_tensor(tensor, torch.zeros(2))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(tensor, torch.ones(2))


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-40, 40), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_scaling_is_undone_to_the_bit(exponents: list[int], seed: int, dtype: torch.dtype) -> None:
    """Any powers of two, subnormal results included, come off again exactly in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(17, generator=generator).to(dtype)
    before, patches = tensor.clone(), Patches()
    for exponent in exponents:
        patches.scale_tensor(tensor, exponent)
    patches.undo()
    assert torch.equal(tensor, before)


def test_a_block_of_rows_is_scaled_alone() -> None:
    """Some rows of a tensor are scaled, the others stay."""
    tensor, patches = torch.ones(4, 2), Patches()
    patches.scale_tensor(tensor, -3, (slice(1, 3),))
    assert tensor[:, 0].tolist() == [1.0, 0.125, 0.125, 1.0]
    patches.undo()
    assert torch.equal(tensor, torch.ones(4, 2))


def test_a_parameter_that_was_cast_meanwhile_is_scaled_back() -> None:
    """`module.half()` between scaling and undoing leaves no exponent behind."""
    linear, patches = torch.nn.Linear(2, 2), Patches()
    before = linear.weight.detach().clone()
    patches.scale_tensor(linear.weight, -3)
    linear.half()
    patches.undo()
    assert torch.equal(linear.weight, before.half())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a shell's background process doesn't have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("write", range(1, 5))
def test_an_interrupt_leaves_no_weight_scaled(
    monkeypatch: pytest.MonkeyPatch, write: int, is_late: bool
) -> None:
    """Ctrl-C while a weight is written: it came before the record of it, or lost it as it was undone."""
    weights, rewrite, writes = [torch.ones(2), torch.ones(2)], patches_module._rewrite, list[int]()

    def interrupt(*args: Any) -> None:
        writes.append(len(writes) + 1)
        if is_late:
            rewrite(*args)
        if writes[-1] == write:
            signal.raise_signal(signal.SIGINT)
        if not is_late:
            rewrite(*args)

    monkeypatch.setattr(patches_module, "_rewrite", interrupt)

    def scale() -> None:
        with Patches() as patches:
            for weight in weights:
                patches.scale_tensor(weight, 3)

    with pytest.raises(KeyboardInterrupt):
        scale()
    assert [x.tolist() for x in weights] == [[1, 1], [1, 1]]
    assert len(writes) == (2 if write == 1 else 4)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_comes_again_and_again_is_not_postponed() -> None:
    """Whatever waits in vain can be left."""
    before, passed = signal.getsignal(signal.SIGINT), list[int]()

    def wait() -> None:
        with interrupts_postponed():
            for _ in range(9):
                signal.raise_signal(signal.SIGINT)
                passed.append(1)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert len(passed) == 2
    assert signal.getsignal(signal.SIGINT) is before
