"""Classes of components, and what keeps a model's files from doing harm while one is built from them.

**Catches** classes that are no components, configurations of far more than the weights before memory is
taken, and whatever libraries raise over files: one `SourceError` says what does not fit.
**Does not catch** wrong values.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stopdown.errors import SourceError, StopdownError, take_first_line, take_one_line
from stopdown.patches import Patches
from stopdown.pipelines.headers import StoredTensor

MOST_PARTS = 200_000
"""Modules and parameters that a component is built of; the largest published have some thousand."""


def find_class(library: str, class_name: str) -> Any:
    """The class that a model index names, from Diffusers or Transformers and nowhere else.

    Raises:
        SourceError: the installed version has no such class, or it cannot be a component.
    """
    if library not in ("diffusers", "transformers"):
        library = f"diffusers.pipelines.{library}"
    try:
        found = getattr(importlib.import_module(library), class_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        package = library.partition(".")[0]
        version = importlib.import_module(package).__version__
        raise SourceError(
            f"model_index.json names the class {class_name!r} of {library}, which {package} {version} "
            f"does not have here: {take_first_line(error)}.",
            expected="Components are classes of the installed Diffusers and Transformers.",
            remedy=f"A newer version may know it: pip install -U {package}",
        ) from error
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise SourceError(
            f"model_index.json names {library}.{class_name}, which is no class of components.",
            expected="A component is a model, scheduler, tokenizer or processor.",
            remedy="Download or save the model again.",
        )
    return found


@contextmanager
def limited_building(stored: Iterable[StoredTensor] = ()) -> Iterator[None]:
    """No component of more parts than any has, or of far more values than are stored for it.

    Without it a configuration of a few bytes takes hours, or all memory: layers are built one by one,
    and Transformers fills what the weights lack.

    Args:
        stored: the tensors that it is loaded from; without them its values are not limited.

    Raises:
        SourceError: a limit is passed, while the component is built.
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
            raise SourceError(
                f"A configuration describes {found}, found in {type(module).__name__}.",
                expected="A component has as many as its weights.",
                remedy="Download or save the model again, weights and config.json from one version.",
            )

    hooks = torch.nn.modules.module
    with Patches() as patches:
        patches.defer(hooks.register_module_parameter_registration_hook(register).remove)
        patches.defer(hooks.register_module_module_registration_hook(register).remove)
        yield


@contextmanager
def describing_failures(path: Path, class_name: str, *, has_weights: bool = True) -> Iterator[None]:
    """Whatever Diffusers and Transformers raise while they build from a model's files, as a SourceError.

    Args:
        has_weights: False where only configurations are read.

    Raises:
        SourceError: instead of any other exception.
    """
    try:
        yield
    except StopdownError:
        raise
    except ImportError as error:
        raise SourceError(
            f"{class_name} in {path} needs a library that is not here: {_shorten(error)}.",
            expected="Its config.json asks for it, as quantised weights do.",
            remedy="Install that library, or give a model whose weights are not quantised.",
        ) from error
    except Exception as error:  # no list is long enough for wrong configurations
        if has_weights:
            raise describe_misfit(path, class_name, _shorten(error)) from error
        raise SourceError(
            f"{class_name} could not be built from {path}: {_shorten(error)}.",
            expected="The JSON files there describe it.",
            remedy="Download or save the model again.",
        ) from error


def describe_misfit(path: Path, class_name: str, reason: str) -> SourceError:
    return SourceError(
        f"The weights in {path} do not fit their model: {reason}.",
        expected=f"Their configuration describes a {class_name}.",
        remedy="Download or save the model again, weights and config.json from one version.",
    )


def _shorten(error: Exception) -> str:
    if "meta tensor" in str(error):
        return "tensors of the model are missing from them"
    text = take_one_line(error).rstrip(".")
    return text if len(text) <= 400 else f"{text[:400]}…"
