"""Assumed limits of a model's inputs (latents, embeddings, timesteps), on which proofs against overflow
rest.

Integer timesteps are finitely many and are computed one by one. Others lie in cells around as many
points. Token ids need no limit. Sizes, crops and positions are those of the captured call. Any other
floating input has a limit by its argument's name, which is raised if a measured call was larger.
Tokens, latents and embeddings are at most as long, high and wide as in a captured call.

**Catches** latents, pictures, embeddings, rotary tables, masks, timesteps and size conditions with the
names that Diffusers and Transformers use.

**Does not catch** an argument of another name that is larger than a latent: give its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stopdown.module_calls.call_inputs import (
    FIXED_NAMES,
    FREE_NAMES,
    UNIT_NAMES,
    Size,
    fits,
    is_encoded,
    is_timestep,
    name_inputs,
    read_names,
    read_sizes,
    show_sizes,
)
from stopdown.numerics import has_values
from stopdown.scaling.bounds.known_values import InputLimits, Timesteps
from stopdown.scaling.graph.capture import Capture

LATENTS = 64.0
"""Limit of the elements of latents, noise and pictures: unit noise stays under 6, and the latents of
autoencoders without a scale stay under 40."""

EMBEDDINGS = 128.0
"""Limit of the elements of a text or image encoder's output, unless that is its hidden states."""

HIDDEN_STATES = 2.0**15
"""Limit of the elements of hidden states that fp16 represents, with a bit of headroom."""

TIMESTEPS = 1000
"""The largest integer timestep; the smallest is 0."""

CELLS = 2000
"""Number of cells into which the range of non-integer timesteps is divided."""


def state_limits(
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    names: Sequence[str] = (),
    measured: Mapping[str, float] | None = None,
    encoded: float = EMBEDDINGS,
) -> InputLimits:
    """Return the assumptions about one call's inputs: largest magnitudes, possible timesteps and fixed
    values.

    Args:
        args, kwargs: arguments of the captured call. Only names, dtypes and sizes are used, and the
            values of timesteps and of size conditions.
        names: names of the positional arguments, in order.
        measured: maps each placeholder name to the largest magnitude seen. A limit is at least twice
            that.
        encoded: largest magnitude to assume for a text or image encoder's outputs.
    """
    seen = measured or {}
    found: dict[str, float] = {}
    steps: dict[str, Timesteps] = {}
    fixed: dict[str, torch.Tensor] = {}
    named = name_inputs(args, kwargs, names)
    for placeholder, (name, tensor) in zip(capture.inputs, named, strict=True):
        if any(word in name for word in FIXED_NAMES) and has_values(tensor):
            fixed[placeholder] = tensor
        elif is_timestep(name, tensor):
            steps[placeholder] = list_timesteps(tensor)
        elif tensor.is_floating_point() or "mask" in name:
            found[placeholder] = max(state_limit(name, encoded), 2 * seen.get(placeholder, 0.0))
    return InputLimits(found, steps, fixed)


def list_timesteps(tensor: torch.Tensor) -> Timesteps:
    """Return all timesteps to prove bounds for: each integer from 0 to 1000, or 2000 cells of real numbers.

    Cells are for a floating tensor. They go from 0 to 1 if the call's own timesteps are in that range, else
    from 0 to 1000. A timestep of 0, as in a run of one step, fits both ranges and gets the larger one.

    Args:
        tensor: the call's timestep argument.
    """
    if not tensor.is_floating_point():
        return Timesteps(torch.arange(TIMESTEPS + 1))
    largest = float(tensor.abs().max()) if has_values(tensor) else 0.0
    last = 1.0 if 0 < largest <= 1 else float(TIMESTEPS)
    return Timesteps(torch.linspace(0, last, CELLS + 1).double(), last / CELLS / 2)


@dataclass(frozen=True)
class InputStatement:
    """Names, assumed limits and sizes of the inputs of one captured call.

    Attributes:
        method: called method; `forward` for the module itself.
        inputs: placeholder and argument name of each tensor.
        limits: limits of the inputs.
        sizes: argument name and size of each tensor that has one, as in `read_sizes`.
    """

    method: str
    inputs: tuple[tuple[str, str], ...]
    limits: InputLimits
    sizes: tuple[tuple[str, Size], ...]

    def find_size(self, placeholder: str) -> float:
        """Return the largest magnitude that an input is assumed to have, by placeholder name; inf
        without a limit.
        """
        if placeholder in self.limits.timesteps:
            steps = self.limits.timesteps[placeholder]
            return float(steps.values[-1]) + steps.radius
        if placeholder in self.limits.fixed:
            return float(self.limits.fixed[placeholder].abs().max())
        return self.limits.largest.get(placeholder, math.inf)


def state_calls(
    module: torch.nn.Module,
    calls: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
    measured: Sequence[Mapping[str, float]] = (),
    encoded: float = EMBEDDINGS,
) -> list[InputStatement]:
    """Return the assumed input limits of several calls; an argument gets the largest of its limits in
    all of them.

    Args:
        calls: each capture with the arguments that it was made with.
        measured: for each call, placeholder name to the largest magnitude seen.
        encoded: largest magnitude to assume for a text or image encoder's outputs.
    """
    found, largest = [], dict[tuple[str, str], float]()
    for number, (capture, args, kwargs) in enumerate(calls):
        names = read_names(module, capture.method)
        seen = measured[number] if measured else {}
        limits = state_limits(capture, args, kwargs, names=names, measured=seen, encoded=encoded)
        inputs = name_inputs(args, kwargs, names)
        pairs = tuple(zip(capture.inputs, (name for name, _ in inputs), strict=True))
        sizes = read_sizes(args, kwargs, names)
        found.append(InputStatement(capture.method or "forward", pairs, limits, tuple(sizes)))
    for one in found:
        for placeholder, name in one.inputs:
            size, key = one.limits.largest.get(placeholder, 0.0), (one.method, name)
            largest[key] = max(largest.get(key, 0.0), size)
    return [_raise_limits(one, largest) for one in found]


def _raise_limits(one: InputStatement, largest: Mapping[tuple[str, str], float]) -> InputStatement:
    raised = {
        placeholder: largest[one.method, name]
        for placeholder, name in one.inputs
        if placeholder in one.limits.largest
    }
    return replace(one, limits=replace(one.limits, largest=raised))


def list_limits(stated: Sequence[InputStatement]) -> dict[str, float]:
    """Map each argument, such as `forward.hidden_states`, to the largest magnitude that proofs assume.

    A later call can be checked against it. Arguments without a limit are left out.
    """
    found: dict[str, float] = {}
    for one in stated:
        for placeholder, name in one.inputs:
            size, key = one.find_size(placeholder), f"{one.method}.{name}"
            if name and math.isfinite(size):
                found[key] = max(found.get(key, 0.0), size)
    return found


def list_sizes(stated: Sequence[InputStatement]) -> dict[str, tuple[Size, ...]]:
    """Map each argument, such as `forward.hidden_states`, to the largest shapes up to which proved
    bounds hold.

    A shape that fits within another one is left out.
    """
    found: dict[str, tuple[Size, ...]] = {}
    for one in stated:
        for name, size in one.sizes:
            key = f"{one.method}.{name}"
            if name and not fits(size, found.get(key, ())):
                kept = (x for x in found.get(key, ()) if not fits(x, (size,)))
                found[key] = (*kept, size)
    return found


def note_limits(stated: Sequence[InputStatement]) -> str:
    """Describe the assumptions about inputs on which proved bounds rest, as the end of a sentence for
    people.

    For example: `, for |latents| up to 64, latents of shape up to 4 × 64 × 64`.
    """
    largest: dict[str, float] = {}
    words: list[str] = []
    for one in stated:
        for placeholder, name in one.inputs:
            words += _word_input(placeholder, name or "its input", one.limits, largest)
    words += [f"|{name}| up to {size:.4g}" for name, size in largest.items()]
    for key, sizes in list_sizes(stated).items():
        measure = "length" if all(len(size) == 1 for size in sizes) else "shape"
        words.append(f"{key.partition('.')[2]} of {measure} up to {show_sizes(sizes)}")
    return f", for {', '.join(dict.fromkeys(words))}" if words else ""


def _word_input(
    placeholder: str, name: str, stated: InputLimits, largest: dict[str, float]
) -> list[str]:
    if placeholder in stated.timesteps:
        return [f"every {name} from 0 to {float(stated.timesteps[placeholder].values[-1]):g}"]
    if placeholder in stated.fixed:
        return [f"{name} as measured"]
    size = stated.largest.get(placeholder)
    if size is not None and "mask" not in name:  # masks are 0 or 1
        largest[name] = max(largest.get(name, 0.0), size)
    return []


def state_limit(name: str, encoded: float = EMBEDDINGS) -> float:
    """Return the largest magnitude assumed for a floating argument of this name; inf for no limit.

    Args:
        encoded: largest magnitude to assume for a text or image encoder's outputs.
    """
    if any(word in name for word in UNIT_NAMES):
        return 1.0
    if any(word in name for word in (*FREE_NAMES, *FIXED_NAMES)):
        return math.inf
    return encoded if is_encoded(name) else LATENTS
