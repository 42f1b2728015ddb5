"""Rewriting of single-file checkpoints: which row of a file becomes which row of which parameter.

Diffusers' own converter gives the answer: it gets the file's names and shapes, with the number of each row
in place of its values, and the numbers show where each row ends up. This covers every layout that Diffusers
loads: fused projections that are split, transposed matrices, convolutions that become linears. The
converter runs twice, with rows numbered upwards and downwards. A value that is not the same row in both was
computed and not moved. Numbered tensors are expanded views of one column and take no memory.

Not covered: tensors that other programs read and Diffusers does not; they are copied, and listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.component_calls.components import find_components
from stopdown.errors import ScalingError
from stopdown.fold_names import (
    list_equal_runs,
    list_folds,
    name_parameters,
    spread_columns,
    spread_rows,
)
from stopdown.interception.patches import Patches
from stopdown.number_formats import FORMATS
from stopdown.pipelines.component_files import load_parts
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources.headers import StoredTensor, encode_header, read_header_bytes
from stopdown.sources.source import Source
from stopdown.sources.weight_files import read_shapes

MOST_ROWS = 2**24
"""Largest row number; integers up to 2^24 are exact in fp32."""

_UNREAD, _LEFT = -(2**15), -(2**15) - 1
"""Markers in place of a row's exponent: no component reads the row; an unconverted component does."""


@dataclass(frozen=True)
class Rows:
    """Mapping of the rows of a file's tensors to the parameters of its pipeline.

    Attributes:
        tensors: tensors of the file, in its order.
        starts: number of each floating tensor's first row, counted from 1 through the file.
        numbers: for each value of a parameter, the number of its row, by component and parameter name.
        strange: parameters that are not just moved from the file, by component.
    """

    tensors: Mapping[str, StoredTensor]
    starts: Mapping[str, int]
    numbers: Mapping[str, Mapping[str, torch.Tensor]]
    strange: Mapping[str, tuple[str, ...]]

    def count(self, tensor: str) -> int:
        """Return the number of rows of a tensor."""
        return (self.tensors[tensor].shape or (1,))[0]

    def find_tensors(self, component: str, name: str) -> list[str]:
        """List the file's tensors from which a parameter has rows."""
        starts = list(self.starts)
        firsts = torch.tensor(list(self.starts.values()))
        used = self.numbers[component][name].unique().long()
        places = torch.searchsorted(firsts, used, right=True) - 1
        return [starts[place] for place in places.unique().tolist()]

    def find_unread(self) -> tuple[str, ...]:
        """List the file's floating tensors from which no parameter has rows."""
        read = torch.zeros(MOST_ROWS + 1, dtype=torch.bool)
        for component, named in self.numbers.items():
            for name, numbers in named.items():
                if name not in self.strange[component]:
                    read[numbers.unique().long()] = True
        return tuple(
            name
            for name, start in self.starts.items()
            if not bool(read[start : start + self.count(name)].any())
        )


def trace_rows(source: Source) -> Rows:
    """Map the rows of a single file to parameters, with Diffusers' converter.

    Cost: loads the pipeline twice without values.
    """
    tensors = read_shapes(source.path)
    starts: dict[str, int] = {}
    last = 0
    for name, entry in tensors.items():
        if entry.dtype in FORMATS:
            starts[name] = last + 1
            last += (entry.shape or (1,))[0]
    if last >= MOST_ROWS:
        raise ScalingError(
            f"{source.path} has {last} rows.", expected=f"Up to {MOST_ROWS} can be followed."
        )
    up, down = (
        _load_numbered(
            source, {x: _number(y.shape, starts.get(x), begin) for x, y in tensors.items()}
        )
        for begin in (0, last + 1)
    )
    strange = {
        component: tuple(
            name
            for name, found in named.items()
            if bool((found + down[component][name] != last + 1).any() or (found < 1).any())
        )
        for component, named in up.items()
    }
    return Rows(tensors, starts, up, strange)


def _load_numbered(
    source: Source, numbered: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    import diffusers.loaders.single_file as loader

    if source.parts:
        parts = load_parts(source, numbered)
        return {name: _list_stored(module) for name, module in parts.items()}
    with Patches() as patches:
        patches.set_attribute(loader, "load_single_file_checkpoint", lambda *_, **__: numbered)
        pipe = load_pipeline(source, torch_dtypes=torch.float32)
    return {name: _list_stored(module) for name, module in find_components(pipe).items()}


def _list_stored(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating tensors of a component's state dict, tied ones once."""
    stored = module.state_dict().keys()
    named = name_parameters(module).items()
    return {name: x for name, x in named if name in stored and x.is_floating_point()}


def _number(shape: Sequence[int], start: int | None, counted_from: int) -> torch.Tensor:
    """Make a tensor whose values are the numbers of its rows, to see where a converter moves them.

    Args:
        start: number of the first row; None for zeros.
        counted_from: the values are this minus the row numbers; 0 for the row numbers themselves.
    """
    if start is None:
        return torch.zeros((), dtype=torch.int64).expand(tuple(shape))
    rows = torch.arange(start, start + (shape[0] if shape else 1), dtype=torch.float32)
    rows = counted_from - rows if counted_from else rows
    return rows.view(-1, *(1 for _ in shape[1:])).expand(tuple(shape)) if shape else rows[0]


def spread_exponents(
    rows: Rows, exponents: Mapping[str, Mapping[str, int]], left: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the exponents of the rows of each file tensor that becomes fp16, `[R]` int32, by name.

    Args:
        exponents: exponents by component to write in fp16 and parameter name (`name[0:64]` for a block of
            rows).
        left: components that are not converted, whose tensors are left out.
    """
    total = max(rows.starts.values(), default=0) + max(map(rows.count, rows.starts), default=0)
    found = torch.full((total + 1,), _UNREAD, dtype=torch.int32)
    for component in left:
        for name, numbers in rows.numbers[component].items():
            if name not in rows.strange[component]:
                found[numbers.unique().long()] = _LEFT
    for component, folds in exponents.items():
        _spread_component(rows, component, folds, found)
    spread = {name: found[start : start + rows.count(name)] for name, start in rows.starts.items()}
    return {
        name: values.clamp_min(0).where(values <= _UNREAD, values)
        for name, values in spread.items()
        if not bool((values == _LEFT).any()) and bool((values != _UNREAD).any())
    }


def trace_columns(
    source: Source, rows: Rows, exponents: Mapping[str, Mapping[str, int]]
) -> dict[str, torch.Tensor]:
    """Return the exponents of the columns of a file's tensors, `[C]` int32 by name, to add to the rows'.

    Tensors without exponents of columns are left out.

    Args:
        exponents: exponents by component and parameter name (`name[:,0:64]` for a block of columns).

    Raises:
        ScalingError: the columns of a parameter are not columns in the file.

    Cost: loads the pipeline once without values, if there are any such exponents.
    """
    folds = {component: list_folds(found) for component, found in exponents.items()}
    wanted = [
        (component, name)
        for component, found in folds.items()
        for name, places in found.items()
        if any(len(place) > 1 for place, _ in places)
    ]
    if not wanted:
        return {}
    numbered = {name: _number_columns(entry.shape) for name, entry in rows.tensors.items()}
    loaded, found = _load_numbered(source, numbered), dict[str, torch.Tensor]()
    for component, name in wanted:
        columns = loaded[component][name]
        if not torch.equal(columns, _number_columns(columns.shape)):
            raise ScalingError(f"{component}:{name} has its columns elsewhere in the file.")
        spread = spread_columns(folds[component][name], columns.shape[1])
        for tensor in rows.find_tensors(component, name):
            if not torch.equal(found.setdefault(tensor, spread), spread):
                raise ScalingError(f"{component}:{name} needs columns of the file otherwise.")
    return found


def _number_columns(shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor whose values are its column numbers from 1, to see where a converter moves them.

    It is zero below two dimensions.
    """
    if len(shape) < 2:
        return torch.zeros(()).expand(tuple(shape))
    columns = torch.arange(1, shape[1] + 1, dtype=torch.float32)
    return columns.view(-1, *(1 for _ in shape[2:])).expand(tuple(shape))


def _spread_component(
    rows: Rows, component: str, folds: Mapping[str, int], found: torch.Tensor
) -> None:
    by_name = list_folds(folds)
    for name, numbers in rows.numbers[component].items():
        own = by_name.get(name, ())
        count = len(numbers) if numbers.dim() else 1
        if name in rows.strange[component]:
            if any(exponent for _, exponent in own):
                raise ScalingError(f"{component}:{name} isn't in the file as it is in the model.")
            continue
        for start, stop, exponent in list_equal_runs(spread_rows(own, count)):
            wanted = numbers.reshape(count, -1)[start:stop].unique().long()
            before = found[wanted]
            if bool(((before != _UNREAD) & (before != exponent)).any()):
                raise ScalingError(
                    f"{component}:{name} needs 2**{exponent} in rows of the file that other "
                    "parameters need otherwise."
                )
            found[wanted] = exponent


def write_single_file(
    source: Path,
    target: Path,
    exponents: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    columns: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Rewrite a file with some tensors in fp16, each row multiplied by `2**exponent`.

    Names and shapes are unchanged. So is the order, except that wider dtypes come first, as safetensors
    requires alignment. One tensor is in memory at a time.

    Args:
        exponents: exponents of the rows, `[rows]` int32, of each tensor to convert, by name.
        metadata: entries to add to the file's metadata.
        columns: exponents of the columns, `[columns]`, added to those of the rows, by tensor name.

    Raises:
        ScalingError: a scaled value is beyond 65504.
    """
    header = json.loads(read_header_bytes(source)[8:])
    header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
    names = [name for name in header if name != "__metadata__"]
    sizes = {name: _measure_entry(header[name], name in exponents) for name in names}
    by_place = sorted(names, key=lambda name: header[name]["data_offsets"][0])
    by_place.sort(key=lambda name: -sizes[name][1])
    offset = 0
    for name in by_place:
        header[name]["data_offsets"] = [offset, offset + sizes[name][0]]
        offset += sizes[name][0]
        if name in exponents:
            header[name]["dtype"] = "F16"
    too_large = []
    with target.open("wb") as file, safe_open(source, framework="pt") as tensors:
        file.write(encode_header(header))
        for name in by_place:
            value = tensors.get_tensor(name)
            if name in exponents:
                before, value = value, fold_rows(value, exponents[name], (columns or {}).get(name))
                is_finite = before.float().isfinite()  # which fp8 has no kernel for
                if bool((is_finite & ~value.isfinite()).any()):
                    too_large.append(name)
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if too_large:
        raise ScalingError(f"Values are beyond 65504 in {', '.join(too_large)}.")


def fold_rows(
    value: torch.Tensor, exponents: torch.Tensor, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a tensor in fp16, with each row multiplied by `2**exponent`.

    Args:
        value: `[R, ...]` or a scalar, floating.
        exponents: `[R]` int32.
        columns: `[C]` int32, added for the columns of `[R, C, ...]`.
    """
    shape = (-1, *(1 for _ in value.shape[1:])) if value.dim() else ()
    factors = exponents.view(shape)
    if columns is not None:
        factors = factors + columns.view(1, *shape[:-1])
    return torch.ldexp(value.float(), factors).half()


def _measure_entry(entry: Mapping[str, Any], halved: bool) -> tuple[int, int]:
    """Return the size of a tensor to write, and of one of its values, in bytes.

    Args:
        entry: the tensor's entry in a safetensors header.
        halved: whether it is written in fp16.
    """
    start, stop = entry["data_offsets"]
    count = 1
    for size in entry["shape"]:
        count *= size
    if halved:
        return 2 * count, 2
    return stop - start, (stop - start) // count if count else 8
