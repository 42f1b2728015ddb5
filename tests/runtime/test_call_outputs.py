"""What calls under a guard return and write besides new tensors: looked at, refused or reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.returning_modules import Returning, X
from stopdown.errors import NonFiniteError
from stopdown.numerics import relative_l2
from stopdown.runtime.activation_maxima import Notes
from stopdown.runtime.call_check import check_call
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.guard import guard

SEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda x: x.numpy(),
    "numbers": lambda x: x.tolist(),
    "number": lambda x: x.abs().max().item(),
    "complex": lambda x: torch.complex(x.float(), x.float()),
}


@pytest.mark.parametrize("name", SEEN)
def test_other_forms_are_looked_at(name: str) -> None:
    """NaN and Inf are found in arrays, numbers and complex tensors; nothing passes in silence."""
    module, said = Returning(SEEN[name]).half(), list[str]()
    wanted = Returning(SEEN[name])(X)
    with guard(module, announce=said.append) as handle:
        try:
            found = module(X.half())
        except NonFiniteError:
            return
    assert [x.action for x in handle.repairs if x.action != "none"]
    assert said
    values = [np.asarray(x) for x in (found, wanted)]
    assert np.isfinite(values[0]).all()
    assert np.abs(values[0] - values[1]).max() < 0.02 * np.abs(values[1]).max()


def test_numbers_are_looked_at_whatever_the_default_device() -> None:
    """On MPS, where a script may put new tensors, there is no fp64."""
    with torch.device("meta"):
        checked = check_call(Notes(), [1.0, float("nan")])
    assert (checked.is_seen, checked.is_finite) == (True, False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_alone() -> None:
    """PyTorch has no range of theirs: a guarded call gives what the plain one does."""
    module = nn.Linear(4, 4).half().requires_grad_(False)
    given = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], dtype=torch.float16)
    plain = module(given)
    with guard(module):
        found = module(given)
    assert all(map(torch.equal, found.unbind(), plain.unbind()))


class Writing(nn.Module):
    """Writes to its argument, or puts its stream into a list of its caller's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.norm, self.last = nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)
        self.eval().requires_grad_(False)
        self.wide.weight.mul_(2.0**18)

    def forward(self, x: torch.Tensor, store: list[torch.Tensor] | None = None) -> torch.Tensor:
        """`[N, 16]`, the same again."""
        if store is None:
            x.mul_(3).add_(1)
        h = self.wide(x)
        if store is not None:
            store.append(h)
        made: torch.Tensor = self.last(self.norm(h))
        return made


def call_writing() -> tuple[float, float]:
    """Errors of what a call with a fault gives, and of the argument that it writes to."""
    module, x = Writing().half(), X.half()
    given = X.clone()
    wanted = Writing()(given)
    with guard(module, announce=lambda text: None):
        found = module(x)
    return relative_l2(found.float(), wanted), relative_l2(x.float(), given)


def test_a_call_that_wrote_to_its_arguments_ends_the_run() -> None:
    """Made again it would begin elsewhere: the error says so, and the argument was written once."""
    with pytest.raises(
        NonFiniteError, match="it wrote to its arguments, so it can't be made again"
    ):
        call_writing()


def test_made_again_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at its arguments the same call is repaired to other values, 10 % off."""
    monkeypatch.setattr(FaultHandler, "_has_written", lambda self, fault: False)
    assert max(call_writing()) > 0.05


def test_a_repaired_call_fills_a_list_once() -> None:
    """The caller's list holds what one call puts there, in its true size, after a repair as well."""
    wanted, found = list[torch.Tensor](), list[torch.Tensor]()
    right = Writing()(X, wanted)
    with guard(Writing().half(), announce=lambda text: None) as handle:
        output = handle.pipe(X.half(), found)
    assert len(found) == 1
    assert relative_l2(found[0].float(), wanted[0]) < 0.02
    assert relative_l2(output.float(), right) < 0.02
