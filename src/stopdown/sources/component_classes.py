"""Lookup of component classes, and limits on what a model's configuration can make them build."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import SourceError, StopdownError, take_first_line, take_one_line
from stopdown.interception.patches import Patches
from stopdown.sources.headers import StoredTensor
from stopdown.sources.library_classes import list_modules_with, list_optional_components
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source_problems import make_source_error

MOST_PARTS = 200_000
"""Maximum number of modules and parameters of a component; the largest published have some thousand."""


def find_class(library: str, class_name: str) -> Any:
    """Return the class that a model index names, from Diffusers or Transformers only.

    Args:
        library: `diffusers`, `transformers`, or a package of `diffusers.pipelines`.
    """
    if library not in ("diffusers", "transformers"):
        library = f"diffusers.pipelines.{library}"
    try:
        with quiet_libraries():
            found = _find_in_library(library, class_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        package = library.partition(".")[0]
        version = importlib.import_module(package).__version__
        said = {"class_name": class_name, "library": library, "package": package}
        raise make_source_error(
            "no-class", **said, version=version, error=take_first_line(error)
        ) from error
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise make_source_error("no-component-class", library=library, class_name=class_name)
    return found


def _find_in_library(library: str, class_name: str) -> Any:
    module = importlib.import_module(library)
    if library != "transformers" or hasattr(module, class_name):
        return getattr(module, class_name)
    for name in list_modules_with(
        class_name
    ):  # they give Transformers a class that it has elsewhere
        found = getattr(importlib.import_module(f"diffusers.pipelines.{name}"), class_name, None)
        if isinstance(found, type):
            return found
    from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

    return simple_get_class_obj(library, class_name)  # names of earlier versions


@contextmanager
def limited_building(stored: Iterable[StoredTensor] = ()) -> Iterator[None]:
    """Raise `SourceError` in the block if a module gets too many parts, or far more values than are stored.

    Without this limit a small configuration can take hours or all memory, as layers are built one by one
    and Transformers initialises missing weights.

    Args:
        stored: tensors in the weight files; if empty, the number of values is not limited.
    """
    count, values = 0, 0
    # Each parameter is registered once without values and once with; 2 bits are the fewest of a value.
    most = 16 * sum(entry.size_bytes for entry in stored) + 2**24 if stored else math.inf

    def register(module: torch.nn.Module, name: str, part: Any) -> None:
        nonlocal count, values
        count += 1
        values += part.numel() if isinstance(part, torch.Tensor) else 0
        if count > MOST_PARTS or values > most:
            found = f"more than {MOST_PARTS} parts" if count > MOST_PARTS else f"{values} values"
            raise make_source_error("too-many", found=found, module=type(module).__name__)

    hooks = torch.nn.modules.module
    with Patches() as patches:
        patches.defer(hooks.register_module_parameter_registration_hook(register).remove)
        patches.defer(hooks.register_module_module_registration_hook(register).remove)
        yield


@contextmanager
def describing_failures(path: Path, class_name: str, *, has_weights: bool = True) -> Iterator[None]:
    """Convert errors raised in the block, while a component is built from files, to a `SourceError`.

    Args:
        has_weights: False if only configurations are read.
    """
    try:
        yield
    except StopdownError:
        raise
    except ImportError as error:
        said = {"class_name": class_name, "path": path, "error": _shorten(error)}
        raise make_source_error("no-library", **said) from error
    except Exception as error:  # no list is long enough for wrong configurations
        if has_weights:
            raise describe_misfit(path, class_name, _shorten(error)) from error
        said = {"class_name": class_name, "path": path, "error": _shorten(error)}
        if parts := _list_missing_parts(class_name, str(error)):
            said |= {"names": " and ".join(parts), "first": parts[0], "path": str(path)}
            raise make_source_error("no-part", **said) from error
        raise make_source_error("not-built", **said) from error


def _list_missing_parts(class_name: str, text: str) -> list[str]:
    """List the components that Diffusers misses in a model, by its message; empty for other messages."""
    found = re.search(r"expected \[(.*)\], but only \{(.*)\} were passed", text)
    if found is None:
        return []
    expected, passed = (re.findall(r"\w+", x) for x in found.groups())
    optional = list_optional_components(class_name)
    return [x for x in expected if x not in passed and x not in optional]


def describe_misfit(path: Path, class_name: str, reason: str) -> SourceError:
    return make_source_error("misfit", path=path, class_name=class_name, reason=reason)


def _shorten(error: Exception) -> str:
    if "meta tensor" in str(error):
        return "tensors of the model are missing from them"
    text = take_one_line(error).rstrip(".")
    return text if len(text) <= 400 else f"{text[:400]}…"
