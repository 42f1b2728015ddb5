"""A single file with other values: which of its rows become which rows of which parameter.

Diffusers' own converter tells: it is given the file's names and shapes with the number of each row
in place of its values, and where the numbers come out is where the values would. So every layout
that Diffusers loads is understood: fused projections that are split, transposed matrices, convolutions
that become linear. It runs twice, counting up and counting down, and what does not come out of both as
the same row was computed and not moved. Numbered tensors are views of one column and take no memory.

**Catches** parameters that are computed from values, rows that two parameters want differently,
values that do not fit into fp16.
**Does not catch** tensors that other programs read and Diffusers does not: they are copied, and named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stopdown.errors import ScalingError
from stopdown.graph.capture import name_parameters
from stopdown.number_formats import FORMATS
from stopdown.patches import Patches
from stopdown.pipelines.component_files import load_parts
from stopdown.pipelines.components import find_components
from stopdown.pipelines.headers import StoredTensor, encode_header, read_header_bytes
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.sources import Source
from stopdown.pipelines.weight_files import read_shapes

MOST_ROWS = 2**24
"""Whole numbers up to here are exact in fp32."""

_UNREAD, _LEFT = -(2**15), -(2**15) - 1
"""In place of a row's exponent: nothing reads it; a component that is left as it was does."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of a file's tensors stand in the parameters of its pipeline.

    Attributes:
        tensors: of the file, in its order.
        starts: floating tensor to the number of its first row, counted from 1 through the file.
        numbers: component, parameter name, the row number of each of its values.
        strange: component to the parameters that do not come from the file's values alone.
    """

    tensors: Mapping[str, StoredTensor]
    starts: Mapping[str, int]
    numbers: Mapping[str, Mapping[str, torch.Tensor]]
    strange: Mapping[str, tuple[str, ...]]

    def count(self, tensor: str) -> int:
        """How many rows a tensor has."""
        return (self.tensors[tensor].shape or (1,))[0]

    def find_tensors(self, component: str, name: str) -> list[str]:
        """The tensors of the file that a parameter has rows of."""
        starts = list(self.starts)
        firsts = torch.tensor(list(self.starts.values()))
        used = self.numbers[component][name].unique().long()
        places = torch.searchsorted(firsts, used, right=True) - 1
        return [starts[place] for place in places.unique().tolist()]

    def find_unread(self) -> tuple[str, ...]:
        """Floating tensors of the file of which no parameter has a row."""
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
    """Follow the rows of a single file through Diffusers' converter.

    Raises:
        ScalingError: the file has more than `MOST_ROWS` rows.
        SourceError: the file does not fit its model.

    Cost: two loads without values.
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
    up = _load_numbered(source, tensors, starts, 0)
    down = _load_numbered(source, tensors, starts, last + 1)
    strange = {
        component: tuple(
            name
            for name, found in named.items()
            if not _is_moved(found, down[component][name], last)
        )
        for component, named in up.items()
    }
    return Rows(tensors, starts, up, strange)


def _load_numbered(
    source: Source,
    tensors: Mapping[str, StoredTensor],
    starts: Mapping[str, int],
    counted_from: int,
) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters of each component, loaded from row numbers; counted down from a number above 0."""
    import diffusers.loaders.single_file as loader

    numbered = {
        name: _number(entry.shape, starts.get(name), counted_from)
        for name, entry in tensors.items()
    }
    if source.parts:
        parts = load_parts(source, numbered)
        return {name: _list_stored(module) for name, module in parts.items()}
    with Patches() as patches:
        patches.set_attribute(loader, "load_single_file_checkpoint", lambda *_, **__: numbered)
        pipe = load_pipeline(source, torch_dtypes=torch.float32)
    return {name: _list_stored(module) for name, module in find_components(pipe).items()}


def _list_stored(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The floating tensors of a component's checkpoint; tied ones once."""
    stored = module.state_dict().keys()
    named = name_parameters(module).items()
    return {name: x for name, x in named if name in stored and x.is_floating_point()}


def _number(shape: Sequence[int], start: int | None, counted_from: int) -> torch.Tensor:
    if start is None:
        return torch.zeros((), dtype=torch.int64).expand(tuple(shape))
    rows = torch.arange(start, start + (shape[0] if shape else 1), dtype=torch.float32)
    rows = counted_from - rows if counted_from else rows
    return rows.view(-1, *(1 for _ in shape[1:])).expand(tuple(shape)) if shape else rows[0]


def _is_moved(up: torch.Tensor, down: torch.Tensor, last: int) -> bool:
    return bool((up + down == last + 1).all()) and bool((up >= 1).all())


def spread_exponents(
    rows: Rows, exponents: Mapping[str, Mapping[str, int]], left: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Exponent of every row of the tensors that become fp16; the others are not in it.

    Args:
        exponents: component to be written in fp16, parameter name (`name[0:64]` for a block of rows),
            exponent.
        left: components whose tensors stay as they are.

    Raises:
        ScalingError: two parameters want the same row differently, or a parameter that is folded
            does not come from the file.
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


def name_exponents(spread: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The exponents of rows by names, `name[0:64]` where blocks of rows differ; without zeros."""
    named: dict[str, int] = {}
    for name, rows in spread.items():
        values, counts = rows.unique_consecutive(return_counts=True)
        stops = counts.cumsum(0).tolist()
        for exponent, count, stop in zip(values.tolist(), counts.tolist(), stops, strict=True):
            if exponent:
                key = name if count == len(rows) else f"{name}[{stop - count}:{stop}]"
                named[key] = exponent
    return named


def _spread_component(
    rows: Rows, component: str, folds: Mapping[str, int], found: torch.Tensor
) -> None:
    for name, numbers in rows.numbers[component].items():
        blocks = _list_blocks(name, folds, len(numbers) if numbers.dim() else 1)
        if name in rows.strange[component]:
            if any(exponent for _, _, exponent in blocks):
                raise ScalingError(f"{component}:{name} is not in the file as it is in the model.")
            continue
        for start, stop, exponent in blocks:
            places = numbers.reshape(len(numbers) if numbers.dim() else 1, -1)[start:stop]
            wanted = places.unique().long()
            before = found[wanted]
            if bool(((before != _UNREAD) & (before != exponent)).any()):
                raise ScalingError(
                    f"{component}:{name} needs 2**{exponent} in rows of the file that other "
                    "parameters need otherwise."
                )
            found[wanted] = exponent


def _list_blocks(name: str, folds: Mapping[str, int], rows: int) -> list[tuple[int, int, int]]:
    """First row, one past the last, exponent: for all rows of a parameter."""
    if name in folds:
        return [(0, rows, folds[name])]
    known = sorted(
        (*map(int, key.removeprefix(f"{name}[").rstrip("]").split(":")), exponent)
        for key, exponent in folds.items()
        if key.startswith(f"{name}[")
    )
    blocks, done = [], 0
    for start, stop, exponent in [*known, (rows, rows, 0)]:
        if start > done:
            blocks.append((done, start, 0))
        if stop > start:
            blocks.append((start, stop, exponent))
        done = stop
    return blocks


def write_single_file(
    source: Path,
    target: Path,
    exponents: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file again with some tensors in fp16, their rows times `2**exponent`.

    Names and shapes are those of the source, and so is the order but for this: wider dtypes come
    first, as safetensors wants them aligned. One tensor after the other is in memory.

    Args:
        source: file to read.
        target: file to write.
        exponents: tensor name to `[rows]` exponents.
        metadata: entries beside those that the source has.

    Raises:
        ScalingError: values do not fit into fp16; every such tensor is named.
        OSError: the disk refuses.
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
                before, value = value, fold_rows(value, exponents[name])
                if bool((before.isfinite() & ~value.isfinite()).any()):
                    too_large.append(name)
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if too_large:
        raise ScalingError(f"Values are beyond 65504 in {', '.join(too_large)}.")


def fold_rows(value: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """A tensor in fp16, each row times `2**exponent`.

    Args:
        value: `[R, ...]` or a scalar, floating.
        exponents: `[R]` int32.
    """
    shape = (-1, *(1 for _ in value.shape[1:])) if value.dim() else ()
    return torch.ldexp(value.float(), exponents.view(shape)).half()


def _measure_entry(entry: Mapping[str, Any], halved: bool) -> tuple[int, int]:
    """Bytes of a tensor as it will be written, and of one of its values."""
    start, stop = entry["data_offsets"]
    count = 1
    for size in entry["shape"]:
        count *= size
    if halved:
        return 2 * count, 2
    return stop - start, (stop - start) // count if count else 8
