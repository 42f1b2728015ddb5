"""Registration of the quantization method `stopdown` with Diffusers and Transformers at their import.

Both keep tables of methods in a module `quantizers.auto`. An import finder adds the method right after one
of these modules has been imported, or at once if it's imported already. So `import stopdown` loads neither
library, and a folder whose `config.json` names the method loads in every program that imported Stopdown,
before or after the library.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from stopdown.component_call_names import QUANT_METHOD

_QUANTIZERS = {
    "diffusers.quantizers.auto": "diffusers_quantizer.StopdownDiffusersQuantizer",
    "transformers.quantizers.auto": "transformers_quantizer.StopdownTransformersQuantizer",
}
"""A library's module with the tables → module and class of our quantizer in this package."""


class _Finder:
    """Import finder that adds Stopdown's quantization method to Diffusers and Transformers at their import.

    It only handles `quantizers.auto` of each library, whose tables list the library's methods.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Return the spec of a library's `quantizers.auto`, with an import that adds Stopdown's method.

        Return None for every other module.
        """
        spec = PathFinder.find_spec(name, path, target) if name in _QUANTIZERS else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_run, loader.exec_module)
        return spec


def _run(execute: Any, module: ModuleType) -> None:
    execute(module)
    _fill(module)


def _fill(module: Any) -> None:
    """Add Stopdown's quantization method to a library's tables of configs and quantizers.

    The quantizer is imported when it is first used.

    Args:
        module: the library's `quantizers.auto`, which has the tables.
    """
    config = importlib.import_module("stopdown.quantizers.config").StopdownConfig
    module.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, config)
    module.AUTO_QUANTIZER_MAPPING.setdefault(
        QUANT_METHOD, functools.partial(_make, module.__name__)
    )


def _make(tables: str, config: Any, **options: Any) -> Any:
    importlib.import_module("stopdown.sources.sources").check_libraries()
    module, name = _QUANTIZERS[tables].split(".")
    return getattr(importlib.import_module(f"stopdown.quantizers.{module}"), name)(
        config, **options
    )


def register() -> None:
    """Register Stopdown's quantization method with Diffusers and Transformers, now or at their import."""
    if not any(found is _Finder for found in sys.meta_path):
        sys.meta_path.insert(0, _Finder)
    for name in _QUANTIZERS:
        spec: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            _fill(sys.modules[name])
