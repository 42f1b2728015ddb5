"""The modules that a program of any kind holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from stopdown.component_calls.attribute_walk import find_modules, find_parts
from stopdown.errors import InputError


def test_outermost_modules_are_found_by_attribute() -> None:
    """Lists and dicts are looked into, modules are not; circles end."""
    inner, outer = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    program = SimpleNamespace(a=outer, b={"c": [inner]}, d=3)
    program.itself = program
    assert find_modules(program) == {"a": outer, "b.c.0": inner}
    assert find_modules(outer) == {"": outer}


def test_methods_are_named_in_a_dict() -> None:
    """Each module below has a path; one that is there twice has the shortest."""
    vae = nn.Sequential(nn.Linear(1, 1))
    found = find_parts({"unet": vae, "vae.decode": (vae, "forward")})
    assert found.modules == {"unet": vae, "unet.0": vae[0]}
    assert found.methods == {"vae.decode": (vae, "forward")}


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ({}, "An empty dict holds no module"),
        ("model", "is a name, not a model"),
        ({"a": (nn.ReLU(), "nothing")}, "a ReLU has no method nothing"),
        ({"a": (3, "forward")}, "a int is no module"),
        (SimpleNamespace(x=1), "holds no module"),
    ],
)
def test_what_holds_no_module_is_refused(program: object, found: str) -> None:
    """The message says what is accepted."""
    with pytest.raises(InputError, match=found):
        find_parts(program)
