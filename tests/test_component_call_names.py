"""Names of calls and module paths: written and read back."""

from __future__ import annotations

import pytest

from stopdown.component_call_names import (
    is_inside,
    list_outermost,
    name_call,
    name_component,
    name_module_path,
    split_call,
    split_module_path,
)


@pytest.mark.parametrize(
    ("parts", "name"),
    [(("vae", "decode"), "vae.decode"), (("vae", "forward"), "vae"), (("vae", ""), "vae")],
)
def test_a_call_has_the_name_of_its_component_and_method(parts: tuple[str, str], name: str) -> None:
    """`forward` is left out, and the component is found again."""
    assert name_call(*parts) == name
    assert name_component(name) == "vae"
    assert split_call(name) == ("vae", "" if parts[1] == "forward" else parts[1])


@pytest.mark.parametrize("path", ["", "blocks.1.ff"])
def test_a_module_path_is_split_as_it_was_joined(path: str) -> None:
    """A call alone names the component itself."""
    assert split_module_path(name_module_path("vae.decode", path)) == ("vae.decode", path)


def test_a_path_is_inside_whole_names_only() -> None:
    """`blocks.10` is not inside `blocks.1`; everything is inside the component itself."""
    assert is_inside("blocks.1.ff", "blocks.1")
    assert is_inside("blocks.1", "blocks.1")
    assert not is_inside("blocks.10", "blocks.1")
    assert is_inside("blocks.10", "")


def test_only_outermost_paths_are_listed() -> None:
    """A module inside of another one that is listed is left out."""
    assert list_outermost(["a.b", "a", "ab", "c.d"]) == ["a", "ab", "c.d"]
