"""The packages beside the core: each is removed by deleting its folder and its line here.

Nothing of the core imports one of them. A package's `__init__` has a table `OFFERS`, name to the place of a
function, and the core asks for the function by that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from stopdown.errors import OptionError

PACKAGES = (
    "bench",
    "quantised_files",
)

_COMMAND = "command "


def find_offer(name: str) -> Callable[..., Any] | None:
    """Return the function that a package offers by a name; None if none does."""
    return next(
        (_load(package, place) for package, key, place in list_offers() if key == name), None
    )


def require_offer(name: str, what: str) -> Callable[..., Any]:
    """Return the function that a package offers by a name.

    Args:
        what: what it is for, as the beginning of a sentence: `Ray`.
    """
    if (found := find_offer(name)) is None:
        raise OptionError(
            f"{what}: the package for this is missing in this installation.",
            expected="Stopdown has it in a folder of its own, which was deleted here.",
            remedy="Install Stopdown again: pip install --force-reinstall --no-deps stopdown",
        )
    return found


def list_commands() -> dict[str, Callable[..., Any]]:
    """Return the commands that packages add to the command line, by name."""
    return {
        key.removeprefix(_COMMAND): _load(package, place)
        for package, key, place in list_offers()
        if key.startswith(_COMMAND)
    }


def list_offers() -> Iterator[tuple[str, str, str]]:
    """Yield what packages offer: package, name, place of the function in the package."""
    for package in PACKAGES:
        for key, place in import_module(f"stopdown.{package}").OFFERS.items():
            yield package, key, place


def _load(package: str, place: str) -> Callable[..., Any]:
    module, _, name = place.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"stopdown.{package}.{module}"), name)
    return found
