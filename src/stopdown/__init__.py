"""Image and video diffusion models in half precision, without black frames or NaN.

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

import sys as _sys

from stopdown.public_names import load_name as _load_name
from stopdown.public_names import read_homes as _read_homes
from stopdown.quantizers.registration import register as _register

__version__ = "0.1.0"

_HOMES = _read_homes(_sys.modules[__name__])
__all__ = [name for name, home in _HOMES.items() if home != __name__]


def __getattr__(name: str) -> object:
    return _load_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


_register()
