"""Start ComfyUI from a checkout, in this process: `python launch.py CHECKOUT [OPTIONS OF MAIN.PY]`.

torchvision and torchaudio, which ComfyUI imports in a few files, are not built for every torch. Where one
is missing, empty modules stand in its place: its names can be imported, and raise when they are called.
A fork's `comfy.zluda`, which installs packages while it is imported, is left out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

MISSING = ("torchvision", "torchaudio")
LEFT_OUT = ("comfy.zluda",)


class _Missing(types.ModuleType):
    """Has every name; none of them does anything."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise ImportError("This needs torchvision or torchaudio, which isn't installed.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is missing, last of all, and what is left out, first of all."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(checkout: Path) -> None:
    """Make a checkout's packages importable."""
    import transformers.utils  # asks now which packages there are

    transformers.utils.is_torchvision_available()
    sys.path.insert(0, str(checkout))
    sys.meta_path.insert(0, _Finder(LEFT_OUT))
    missing = [name for name in MISSING if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))


if __name__ == "__main__":
    checkout = Path(sys.argv[1]).resolve()
    prepare(checkout)
    sys.argv = [str(checkout / "main.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
