"""The core: exponents that bring a bf16-trained module into fp16's range without changing its results.

    import torch
    from stopdown.scaling import cast_, rescale_

    rescaling = rescale_(module, (x,))         # in fp32 the same bits as before
    cast_(module, torch.float16, rescaling)    # runs in fp16, values below its maximum

It captures a call, states equations between exponents, solves them, folds the exponents into weights
and tries the result. Names are loaded on first use; the stub beside this file lists them.
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
