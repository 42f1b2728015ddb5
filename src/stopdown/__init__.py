"""Half precision, whole picture: image and video diffusion models in half precision.

    import stopdown

    pipe = stopdown.load("shapes")  # or a Hub id, a folder, a .safetensors file
    frames = pipe("a red circle moving left on a grey background").frames[0]
    print(pipe.stopdown_guard.record)  # NaN and Inf are named, repaired and run again

    stopdown.fp16(model, x)  # a module or a pipeline that is loaded: rescaled, cast and guarded
    stopdown.check(pipe, device="v100")  # dtype faults, before they happen
    plan = stopdown.make_plan("shapes")  # fp16 without overflow: exact powers of two
    stopdown.compare("shapes", prompts=["a red circle moving left"])  # what a precision costs

The command line does the same: `stopdown --help`. Records are in `stopdown.records`, errors in
`stopdown.errors`. Names are loaded when they are first used, so `import stopdown` loads neither torch nor
Diffusers; `__init__.pyi` beside this file is their one list.
"""

from __future__ import annotations

import importlib

from stopdown.quantizers.registration import register as _register

__version__ = "0.1.0"


def _read_homes() -> dict[str, str]:
    """Return each name of the stub, and the module that it is in: verbs first, then classes."""
    stub = __spec__.loader.get_data(f"{__file__}i").decode()
    words = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    found = {name: module for _, module, _, name, *_ in words}
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0].isupper(), entry[0])))


_HOMES = _read_homes()
__all__ = [name for name, home in _HOMES.items() if home != __name__]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


_register()
