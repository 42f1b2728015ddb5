"""Lazy loading of a package's public names, which are listed in its stub `__init__.pyi`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def read_homes(package: ModuleType) -> dict[str, str]:
    """Return the module of each name in a package's stub; functions come first, then classes."""
    spec = package.__spec__
    assert spec is not None
    stub = spec.loader.get_data(f"{spec.origin}i").decode()  # type: ignore[union-attr]
    words = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    found = {name: module for _, module, _, name, *_ in words}
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0].isupper(), entry[0])))


def load_name(package: str, name: str, homes: dict[str, str]) -> object:
    """Import a public name of a package and cache it in the package.

    Raises:
        AttributeError: the package's stub does not have it.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    if home == package:
        return importlib.import_module(f"{package}.{name}")
    value = getattr(importlib.import_module(home), name)
    setattr(sys.modules[package], name, value)
    return value
