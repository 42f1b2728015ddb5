"""API for programs that call models themselves and embed Stopdown, such as the ComfyUI nodes.

    from stopdown.embedding import Guard, GuardOptions

It has the names that such a program needs besides those of `stopdown` and `stopdown.scaling`. They are
loaded when they are first used, and listed in `__init__.pyi` beside this file.
"""

from __future__ import annotations

import sys as _sys

from stopdown.public_names import load_name as _load_name
from stopdown.public_names import read_homes as _read_homes

_HOMES = _read_homes(_sys.modules[__name__])
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    return _load_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
