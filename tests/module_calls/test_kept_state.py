"""Modules that keep something between calls: refused by its name, or repaired without exponents."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stopdown.errors import ScalingError, StopdownWarning
from stopdown.module_calls.kept_state import HeldContainers, KeptState
from stopdown.runtime.guard import guard
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_


class Normed(nn.Module):
    """A linear whose results leave fp16, a norm, a linear."""

    def __init__(self, size: float = 2.0**17) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.enter.weight.data *= size

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.norm(self.enter(x)))


class RunningMean(Normed):
    """A buffer that each call adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.enter(x)
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return self.leave(self.norm(y + self.mean))


class Remembering(Normed):
    """An attribute that each call sets, and the next one reads."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.enter(x)
        y = y if self.last is None else y + 3 * self.last.flip(-1)
        self.last = y
        return self.leave(self.norm(y))


class Counting(Normed):
    """A number that each call multiplies its result with."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return super().forward(x) * self.count


class Listing(Normed):
    """A list that grows, and that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append(1.0)
        return super().forward(x) * len(self.seen)


class Mapping(Normed):
    """A mapping that grows, and that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.known: OrderedDict[int, float] = OrderedDict()

    def forward(self, x: torch.Tensor) -> Any:
        self.known[len(self.known)] = 1.0
        return super().forward(x) * len(self.known)


class Caching(Normed):
    """What each call sets anew, and reads no earlier than that: Wan's autoencoder does so."""

    def forward(self, x: torch.Tensor) -> Any:
        self.cache = {"entered": self.enter(x)}
        return self.leave(self.norm(self.cache["entered"]))


KEEPS = {
    RunningMean: "mean",
    Remembering: "last",
    Counting: "count",
    Listing: "seen",
    Mapping: "known",
}


def make(kind: type[Normed]) -> tuple[Normed, torch.Tensor]:
    module = kind().eval().requires_grad_(False)
    return module, torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KEEPS)
def test_what_is_kept_is_named(kind: type[Normed]) -> None:
    """`rescale_` refuses it by its name, and leaves it as it was: no rule of an operation is wrong."""
    module, x = make(kind)
    wanted = copy.deepcopy(module)(x)
    with pytest.raises(ScalingError) as raised:
        rescale_(module, (x,))
    assert raised.value.what == (
        f"{kind.__name__} keeps {KEEPS[kind]} from one call to the next. The same call returned "
        "different values the second time."
    )
    assert torch.equal(module(x), wanted)


def test_what_is_written_and_not_read_is_no_hindrance() -> None:
    """A cache that each call fills anew leaves the module a function of its arguments; what it holds is
    scaled, and that is said.
    """
    module, x = make(Caching)
    wanted = module(x)
    with pytest.warns(StopdownWarning, match="leaves activations in cache"):
        rescaling = rescale_(module, (x,))
    assert torch.equal(module(x), wanted)
    cast_(module, torch.float16, rescaling)
    assert (module(x.half()).float() - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("kind", KEEPS)
def test_a_repair_goes_on_from_what_was_kept(kind: type[Normed]) -> None:
    """Under the guard the calls are those of fp32, one after the other, and no exponents are put on."""
    module, x = make(kind)
    wide = copy.deepcopy(module.half()).float()
    wanted = [wide(x.half().float()) for _ in range(3)]
    said: list[str] = []
    with guard(module, announce=said.append) as handle:
        found = [module(x.half()) for _ in range(3)]
    for one, right in zip(found, wanted, strict=True):
        assert (one.float() - right).norm() < 0.02 * right.norm()
    assert [x.action for x in handle.repairs] == ["bf16"]
    assert "another" not in " ".join(said)
    assert "returned different values" not in " ".join(said)


def test_without_what_was_kept_a_repair_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With restoring turned off, replays of one call count as calls."""
    monkeypatch.setattr(KeptState, "list_changes", lambda _: [])
    module, x = make(Counting)
    wanted = copy.deepcopy(module.half()).float()(x.half().float())
    with guard(module, announce=lambda text: None):
        found = module(x.half()).float()
    assert (found - wanted).norm() > 0.5 * wanted.norm()


def test_what_a_call_wrote_is_put_back() -> None:
    """Buffers, new attributes, replaced ones, and lists and mappings that were changed in place."""
    module = nn.Module()
    module.register_buffer("table", torch.tensor([1.0, float("nan")]))
    module.part, module.known = nn.Module(), {"a": 1}
    module.part.seen, module.part.left = [1], "x"  # type: ignore[assignment]
    kept = KeptState(module)
    assert kept.list_changes() == []
    table = module.table
    module.table.add_(1)
    module.known["b"] = 2
    module.part.seen.append(2)
    del module.part.left
    module.part.new = 3
    changed = kept.list_changes()
    assert set(changed) == {"table", "known", "part.seen", "part.left", "part.new"}
    kept.restore(changed)
    assert kept.list_changes() == []
    assert module.table is table
    assert table.tolist()[0] == 1.0
    assert (module.known, module.part.seen, module.part.left) == ({"a": 1}, [1], "x")
    assert not hasattr(module.part, "new")


@dataclasses.dataclass
class Result:
    """An output that PyTorch does not know."""

    sample: torch.Tensor
    hidden: torch.Tensor


class Slots:
    """The same without a `__dict__`."""

    __slots__ = ("hidden", "sample")

    def __init__(self, sample: torch.Tensor, hidden: torch.Tensor) -> None:
        self.sample, self.hidden = sample, hidden


class Plain(Slots):
    """The same with one."""


class Returning(Normed):
    """Returns its stream, which is beyond fp16, beside its result."""

    def __init__(self, kind: Any) -> None:
        super().__init__(2.0**10)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.enter(x)
        return self.kind(self.leave(self.norm(y)), y)


@pytest.mark.parametrize("kind", [Result, Slots, Plain])
def test_outputs_of_other_classes_are_those_of_fp32(kind: Any) -> None:
    """Tensors in dataclasses and in objects with and without slots leave without an exponent."""
    module, x = Returning(kind).eval().requires_grad_(False), torch.randn(3, 8) * 30
    wanted = module(x)
    with torch.no_grad():
        rescaling = rescale_(module, (x,))
        for name in ("sample", "hidden"):
            assert torch.equal(getattr(module(x), name), getattr(wanted, name)), name
        cast_(module, torch.float16, rescaling)
        found = module(x.half())
    assert type(found) is kind
    for name in ("sample", "hidden"):
        right = getattr(wanted, name)
        assert (getattr(found, name).float() - right).norm() < 4e-3 * right.norm(), name


MAPPINGS = (dict, OrderedDict, partial(defaultdict, list))


@pytest.mark.parametrize("make_list", [list, deque])
@pytest.mark.parametrize("make_mapping", MAPPINGS)
def test_containers_of_the_caller_are_put_back(make_mapping: Any, make_list: Any) -> None:
    """What code puts into a list or mapping that it is given is seen, and comes out again."""
    given, cache = make_list([torch.ones(1)]), make_mapping({"a": torch.ones(1)})
    held = HeldContainers(((given,), {"timestep": cache}))
    assert not held.is_filled
    given.append(torch.zeros(1))
    assert held.is_filled
    held.restore()
    cache["b"] = torch.zeros(1)
    assert held.is_filled
    held.restore()
    assert len(given) == 1
    assert list(cache) == ["a"]
