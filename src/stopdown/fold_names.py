"""Names of folds (exponents multiplied into tensors): which tensor, and which rows or columns of it.

`name` is a whole tensor, `name[0:64]` some rows, `name[:,0:64]` some columns. The constant of a clamp in a
module's code is named like an eps attribute: `clamp_1e_12`. Only this module builds and parses the names. A
tensor may have several folds; the exponent of an element is that of its row plus that of its column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

import torch

from stopdown.interception.patches import Place

RESCALED = "stopdown_rescaled"
"""Attribute of a module while exponents are folded into it, which made it fit fp16."""

_CLAMP = "clamp_"

Folds = Sequence[tuple[Place, int]]
"""Pairs of a place in one tensor and its exponent; elements outside of these have exponent 0."""


def name_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a module by name; a tied one has its first name only."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    named.update(module.named_buffers())
    return named


def name_block(name: str, dim: int, start: int, stop: int) -> str:
    """Return the name of an exponent for some rows (`dim` 0) or columns of a tensor: `weight[0:64]`."""
    return f"{name}[{':,' * dim}{start}:{stop}]"


def split_fold_name(name: str) -> tuple[str, Place]:
    """Split an exponent's name, as `weight[0:64]`, into the tensor's name and the place in it.

    The place is a slice of rows, or two slices of rows and columns; () for the whole tensor.
    """
    bare, bracket, blocks = name.partition("[")
    if not bracket:
        return name, ()
    return bare, tuple(map(_read_slice, blocks.rstrip("]").split(",")))


def _read_slice(text: str) -> slice:
    start, _, stop = text.partition(":")
    return slice(int(start), int(stop)) if stop else slice(None)


def name_clamp(value: float) -> str:
    """Return a name for a clamp in a module's code, by its lower limit: `clamp_1e_3` for 0.001.

    An exponent of the limit is stored under it, like that of a norm's eps under the attribute's name. A dot
    would separate submodules.
    """
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return f"{_CLAMP}{''.join(map(str, digits))}e{exponent}".replace("-", "_")


def read_clamp(name: str) -> float | None:
    """Return the lower limit in a name from `name_clamp`; None for the name of an attribute."""
    is_clamp = name.startswith(_CLAMP) and name[len(_CLAMP) :][:1].isdigit()
    return float(name.removeprefix(_CLAMP).replace("_", "-")) if is_clamp else None


def list_folds(exponents: Mapping[str, int]) -> dict[str, list[tuple[Place, int]]]:
    """Group exponents by tensor: map its name to places in it (rows, columns) and their exponents.

    Args:
        exponents: exponents by name, as `weight` or `weight[0:64]`.
    """
    found: dict[str, list[tuple[Place, int]]] = {}
    for name, exponent in exponents.items():
        bare, place = split_fold_name(name)
        found.setdefault(bare, []).append((place, exponent))
    return found


def find_folded_parts(
    module: torch.nn.Module, exponents: Mapping[str, int]
) -> list[torch.nn.Module]:
    """List the module itself and all submodules that own, or contain, tensors with exponents."""
    paths = {""}
    for name in exponents:
        path = split_fold_name(name)[0].rpartition(".")[0]
        while path:
            paths.add(path)
            path = path.rpartition(".")[0]
    return [part for path, part in module.named_modules() if path in paths]


def spread_rows(folds: Folds, count: int) -> torch.Tensor:
    """Return the exponent of each row of a tensor, `[count]` in int32, from those of its folds.

    A fold is the exponent of some rows, or of some columns.
    """
    return _spread(((x[0] if x else slice(None), y) for x, y in folds if len(x) < 2), count)


def spread_columns(folds: Folds, count: int) -> torch.Tensor:
    """Return the exponent of each column of a tensor, `[count]` in int32, from those of its folds.

    A fold is the exponent of some rows, or of some columns.
    """
    return _spread(((x[1], y) for x, y in folds if len(x) > 1), count)


def _spread(blocks: Iterator[tuple[slice, int]], count: int) -> torch.Tensor:
    spread = torch.zeros(count, dtype=torch.int32)
    for block, exponent in blocks:
        spread[block] += exponent
    return spread


def list_equal_runs(exponents: torch.Tensor) -> list[tuple[int, int, int]]:
    """List the runs of equal exponents in a vector: start, stop and exponent of each."""
    values, counts = exponents.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    return list(zip((stops - counts).tolist(), stops.tolist(), values.tolist(), strict=True))


def name_exponents(
    rows: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor] | None = None
) -> dict[str, int]:
    """Return exponents by name, as `weight[0:64]` for a run of rows with equal ones; zeros are left out.

    Args:
        rows: exponents of the rows of each tensor, `[rows]`.
        columns: exponents of the columns, `[columns]`.
    """
    named: dict[str, int] = {}
    for dim, spread in enumerate((rows, columns or {})):
        for name, exponents in spread.items():
            for start, stop, exponent in list_equal_runs(exponents):
                if exponent:
                    is_whole = dim == 0 and stop - start == len(exponents)
                    named[name if is_whole else name_block(name, dim, start, stop)] = exponent
    return named
