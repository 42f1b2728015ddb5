"""Checks of a live pipeline's parameters without a run: dtypes, lost fp32 precision, values.

**Catches** several dtypes in one component, modules that their authors keep in fp32 but are not, NaN and
Inf, and values that a cast would lose.
**Does not catch** weights whose values are packed, on `meta` or offloaded to disk, and rescaled weights of
a pipeline from a single file, as it does not keep the file's path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stopdown.component_call_names import name_module_path, split_module_path
from stopdown.component_calls.components import find_kept_fp32, read_precisions
from stopdown.dtype_rules.findings import generalise, make_finding
from stopdown.fold_names import RESCALED
from stopdown.number_formats import FORMATS, find_format, list_some, name_dtype
from stopdown.numerics import HALVES, is_readable
from stopdown.plans.adapter_check import read_structure
from stopdown.records import Finding
from stopdown.sources.headers import read_rescaled
from stopdown.weight_checks import is_packed


def list_computing(module: torch.nn.Module) -> tuple[torch.dtype, ...]:
    """List the floating dtypes in which a module computes, the most frequent by elements first.

    Those of 8 bits are for storage: layers widen such weights when they are called.
    """
    return tuple(x for x in read_precisions(module) if x.itemsize > 1)


SUBNORMAL_SHARE = 0.5
"""Share of subnormal values from which a tensor is reported."""


def find_kept_parameters(module: torch.nn.Module, precision: str) -> frozenset[str]:
    """Return the names of the parameters that a module's authors keep in fp32 in a given precision."""
    kept = find_kept_fp32(type(module), precision)
    names = [name for name, _ in module.named_parameters()]
    return frozenset(name for name in names if any(part in kept for part in name.split(".")))


def find_widening(
    module: torch.nn.Module, name: str, module_paths: Collection[str]
) -> dict[str, torch.nn.Module]:
    """Return the modules of a component that cast their own input to fp32, by path.

    Modules that the run did not reach are recognised by class. PyTorch's own classes are excluded, because
    only a hook makes their modules cast their input.

    Args:
        name: name of the component.
        module_paths: modules that did so in a run, as in `Examination.widening`.
    """
    parts = dict(module.named_modules())
    paths = {path for call, path in map(split_module_path, module_paths) if call == name}
    kinds = {type(part) for path, part in parts.items() if path in paths}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    return {path: part for path, part in parts.items() if path in paths or type(part) in kinds}


def check_dtypes(
    components: Mapping[str, torch.nn.Module], widening: Collection[str] = ()
) -> Iterator[Finding]:
    """Find parameters with an unsuitable dtype, component by component.

    Args:
        widening: module paths of modules that cast their own input to fp32, whose parameters should be
            fp32.
    """
    for name, module in components.items():
        precisions = list_computing(module)
        if not precisions or getattr(module, RESCALED, False):
            continue  # a plan decides what stays in fp32, and casts around it
        main = precisions[0]
        kept_fp32 = find_kept_parameters(module, name_dtype(main))
        yield from _check_kept(name, module, main, kept_fp32)
        wide = find_widening(module, name, widening)
        yield from _check_others(name, module, main, kept_fp32, wide)


def _check_kept(
    name: str, module: torch.nn.Module, main: torch.dtype, kept_fp32: frozenset[str]
) -> Iterator[Finding]:
    lost = [
        path
        for path, parameter in module.named_parameters()
        if path in kept_fp32 and parameter.dtype in HALVES
    ]
    if lost and main in HALVES:
        evidence = (
            f"{len(lost)} parameters that {type(module).__name__} keeps in fp32 are "
            f"{name_dtype(main)}: {list_some(lost)}."
        )
        yield _find_at_owner("fp32-module-lost", name, lost[0], evidence, main)


def _check_others(
    name: str,
    module: torch.nn.Module,
    main: torch.dtype,
    kept_fp32: frozenset[str],
    wide: Collection[str],
) -> Iterator[Finding]:
    odd: dict[str, list[tuple[str, torch.dtype]]] = {}
    for path, parameter in module.named_parameters():
        owner = path.rpartition(".")[0]
        is_kept = path in kept_fp32 or (owner in wide and parameter.dtype == torch.float32)
        is_stored = not parameter.is_floating_point() or parameter.element_size() == 1
        if parameter.dtype != main and not (is_kept or is_stored):
            odd.setdefault(generalise(owner), []).append((path, parameter.dtype))
    for found in odd.values():
        paths = [path for path, _ in found]
        evidence = (
            f"{list_some(paths)}: {name_dtype(found[0][1])}, where most of the component is "
            f"{name_dtype(main)}."
        )
        yield _find_at_owner("several-dtypes", name, paths[0], evidence, main)


def _find_at_owner(kind: str, name: str, path: str, evidence: str, main: torch.dtype) -> Finding:
    """Make a finding at the module that owns a parameter."""
    module_path = name_module_path(name, path.rpartition(".")[0])
    return make_finding(kind, module_path, evidence, dtype=str(main))


def check_rescaled_files(said: Mapping[str, str]) -> Iterator[Finding]:
    """Find components whose files declare rescaled weights.

    Args:
        said: metadata entry about rescaling by component; "" for none.
    """
    for name, text in said.items():
        if text:
            yield make_finding("rescaled-weights", name, f"Its file says: {text}.")


def check_rescaled(pipe: Any, components: Mapping[str, torch.nn.Module]) -> Iterator[Finding]:
    """Find components of a live pipeline with rescaled weights, and adapters on them."""
    for name, module in components.items():
        said = _describe_rescaled(module)
        if not said:
            continue
        structure = read_structure(module, pipe)
        adapters = sorted({*structure.adapters, *structure.fused})
        if adapters:
            evidence = (
                f"{said} It has the adapter{'s' * (len(adapters) > 1)} {', '.join(adapters)}."
            )
            yield make_finding("adapter-on-rescaled", name, evidence)
        else:
            yield make_finding("rescaled-weights", name, said)


def _describe_rescaled(module: torch.nn.Module) -> str:
    """Return a sentence with the metadata entry on rescaling in a module's files; "" for none."""
    folder = getattr(getattr(module, "config", None), "_name_or_path", "")
    if not folder or not Path(str(folder)).is_dir():
        return ""
    files = sorted(Path(str(folder)).glob("*.safetensors"))
    said = read_rescaled(*files)
    return f"{folder} says: {said}." if said else ""


def check_parameters(
    components: Mapping[str, torch.nn.Module], precisions: Mapping[str, str]
) -> Iterator[Finding]:
    """Find weights of live components that do not fit a precision.

    Values that become subnormal are not reported for components with exponents, as their plan accounts for
    that.

    Args:
        precisions: format in which weights are checked, by component; others are checked in their own.

    Cost: a few passes over every weight that is in memory.
    """
    for name, module in components.items():
        is_rescaled = getattr(module, RESCALED, False)
        kept_fp32 = find_kept_parameters(module, "fp16")
        for path, parameter in module.named_parameters():
            if is_readable(parameter) and not is_packed(parameter):
                target = precisions.get(name) or name_dtype(parameter.dtype)
                target = "fp32" if target == "fp16" and path in kept_fp32 else target
                for found in check_tensor(name_module_path(name, path), parameter.detach(), target):
                    if not (is_rescaled and found.kind == "weight-subnormal"):
                        yield found


def check_files(
    files: Mapping[str, list[Path]], precisions: Mapping[str, str]
) -> Iterator[Finding]:
    """Find weights in safetensors files that do not fit a precision, with one tensor in memory at a time.

    Args:
        files: weight files by component.
        precisions: format in which weights are checked, by component; others are checked in their own.

    Cost: reads every byte of the files once.
    """
    from safetensors import safe_open

    for name, paths in files.items():
        for path in paths:
            with safe_open(str(path), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor = file.get_tensor(key)
                    if tensor.is_floating_point() and find_format(tensor.dtype):
                        target = precisions.get(name) or name_dtype(tensor.dtype)
                        yield from check_tensor(name_module_path(name, key), tensor, target)


def check_tensor(module_path: str, tensor: torch.Tensor, target: str) -> Iterator[Finding]:
    """Find faults that one weight would have after a cast to a format: NaN, Inf, or too small values.

    Cost: up to four passes and two host reads.
    """
    entry, stored = FORMATS[target], name_dtype(tensor.dtype)
    if tensor.numel() == 0 or tensor.element_size() < 2:
        return
    low, high = (float(x) for x in torch.aminmax(tensor))
    largest = max(abs(low), abs(high))
    if not largest < float("inf"):
        bad = int((~torch.isfinite(tensor)).sum())
        evidence = f"{bad} of {tensor.numel()} values are NaN or Inf, as stored in {stored}."
        yield make_finding("weight-not-finite", module_path, evidence)
    elif largest > entry.largest:
        over = int((tensor.abs() > entry.largest).sum())
        evidence = (
            f"{over} of {tensor.numel()} values are beyond {entry.largest:g}, where {target} ends; "
            f"the largest is {largest:.4g}."
        )
        yield make_finding("weight-out-of-range", module_path, evidence)
    elif target == "fp16" and largest > 0:
        yield from _check_small(module_path, tensor, target)


def _check_small(module_path: str, tensor: torch.Tensor, target: str) -> Iterator[Finding]:
    entry, magnitudes = FORMATS[target], tensor.abs()
    used = int((magnitudes > 0).sum())
    small = int(((magnitudes > 0) & (magnitudes < entry.smallest_normal)).sum())
    lost = int(((magnitudes > 0) & (magnitudes < entry.smallest / 2)).sum())
    if tensor.numel() > 1 and small >= SUBNORMAL_SHARE * used:
        evidence = (
            f"{small:,} of {used:,} values are below {entry.smallest_normal:.3g}, the smallest normal "
            f"number of {target}; {lost:,} become 0."
        )
        yield make_finding("weight-subnormal", module_path, evidence)
