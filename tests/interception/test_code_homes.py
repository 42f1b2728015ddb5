"""Whose code a hook is."""

from __future__ import annotations

import functools

from torch import nn

from stopdown.interception.code_homes import find_home, is_from, is_own
from stopdown.interception.module_paths import ModulePaths


class Inherited(nn.Linear):
    """A user's class whose method is torch's."""


def test_code_is_found_through_partials_methods_and_properties() -> None:
    """The Python module is that of the function, not of what wraps it."""
    assert find_home(functools.partial(functools.partial(nn.functional.relu), 1)).startswith(
        "torch."
    )
    assert find_home(nn.Linear.forward) == "torch.nn.modules.linear."
    assert find_home(ModulePaths.current) == "stopdown.interception.module_paths."


def test_a_method_of_a_users_object_is_the_users() -> None:
    """The library's code may call what the user's class overrides."""
    assert is_from(nn.Linear(1, 1).forward, ("torch.",))
    assert not is_from(Inherited(1, 1).forward, ("torch.",))
    assert is_own(functools.partial(ModulePaths._enter, None))
    assert not is_own(find_home.__class__)
