"""Tracing of one component call on fake tensors, operation by operation as its code writes them.

Every call of a torch function is reported with its operands' dtypes, the module whose code makes it, the
origin of each dtype, and the operands' values if they do not depend on weights (positions, masks,
timesteps, which are computed alongside the fake tensors). If operands have incompatible dtypes, they are
cast after this is reported, so that one run finds all such operations.

**Catches** torch functions and tensor methods, in eager order, and branches on known values.
**Does not catch** what a custom kernel does inside, and branches on values that depend on weights. A test
for faults in such values, for example whether they are finite, finds none, and a mask of such values counts
as full.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown import operations
from stopdown.fake_tensors.argument_values import (
    INDEXING,
    find_known,
    find_values,
    list_direct,
    move_to_cpu,
    name_function,
    note_known,
    read_index,
    set_known,
)
from stopdown.interception.autocast import list_autocast
from stopdown.interception.module_paths import ModulePaths
from stopdown.numerics import iterate_tensors
from stopdown.operations import list_kinds, read_calls


@dataclass(frozen=True)
class DtypeOrigin:
    """Origin of a tensor's dtype.

    Attributes:
        kind: `argument`, `parameter`, `output`, `cast`, `made` or `mixed`.
        name: name of the argument, parameter or operation.
        path: path of the module in which the dtype arose.
        parameter: parameter from which the dtype comes; "" for none.
        before: for an argument, description of its origin outside the component.
    """

    kind: str
    name: str
    path: str
    parameter: str = ""
    before: str = ""

    def __str__(self) -> str:
        place = f" in {self.path}" if self.path else ""
        if self.kind in ("argument", "parameter"):
            return f"the {self.kind} {self.name}"
        said = {"cast": "a cast", "made": f"a {self.name}"}.get(self.kind, self.name) + place
        return f"{said}, with the parameter {self.parameter}" if self.parameter else said


@dataclass(frozen=True)
class Operand:
    """One floating operand of an operation, with its argument name and dtype."""

    name: str
    dtype: torch.dtype
    origin: DtypeOrigin


@dataclass(frozen=True)
class Step:
    """One call of a torch function, before it runs.

    Attributes:
        path: dotted path of the innermost module whose code makes the call; "" for the component.
        name: name of the operation: `linear`, `layer_norm`, `cat`, `to`, `add`…
        operands: floating operands, in the order of the arguments.
        known: values of tensor arguments that do not depend on weights, by argument name.
        arguments: all arguments by name.
        autocast: device types whose autocast is enabled.
    """

    path: str
    name: str
    operands: tuple[Operand, ...]
    known: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    autocast: tuple[str, ...]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {operand.dtype for operand in self.operands}


class StepObserver(Protocol):
    """Interface of an object that checks each traced operation (`observations.Judge`)."""

    def __call__(self, step: Step) -> bool:
        """Inspect an operation before it runs; return True if its operands have incompatible dtypes."""

    def watch(self, step: Step, given: Any, made: Any) -> None:
        """Inspect an output whose values are known in a dry run, because they don't depend on weights.

        Args:
            given: values of the operation's first known argument; None without one.
            made: values of the output.
        """


class Walk(TorchFunctionMode):
    """Function mode that traces one component call, or the code outside components.

    Args:
        judge: receives each operation.
        main: dtype of most of the component's weights.
        device: device that code sees on real tensors, although these are on the CPU.
        paths: tracks the running submodule; None outside components. Inside one, `ArgumentValues` must be
            entered before this mode.
    """

    def __init__(
        self,
        judge: StepObserver,
        main: torch.dtype | None,
        device: str = "cpu",
        paths: ModulePaths | None = None,
    ) -> None:
        super().__init__()
        self._judge, self._main, self._paths = judge, main, paths
        self.is_paused = False
        self._device = torch.device(device) if device != "cpu" else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if self._device is not None:
            args, kwargs = pytree.tree_map_only(torch.device, move_to_cpu, (args, kwargs))
        name = name_function(func)
        if name in read_calls().asks:
            return self._ask(func, name, args, kwargs)
        if name in ("__get__", "__set__"):
            is_device = self._device is not None and func == _DEVICE
            return self._device if is_device else func(*args, **kwargs)
        if name in INDEXING:
            args = (args[0], read_index(args[1]), *args[2:])
        step = self._describe(func, name, args, kwargs)
        with unset_fake_temporarily():
            must_cast = self._judge(step)
        if must_cast:
            args, kwargs = self._unite(args, kwargs)
        output = func(*args, **kwargs)
        known = [find_values(x) for x in list_direct(output)]
        if must_cast:
            output = _heal(output, step, self._main)
            note_known(output, known)
        self._mark(step, output)
        if isinstance(output, torch.Tensor) and known[0] is not None:
            with unset_fake_temporarily():
                self._judge.watch(step, next(iter(step.known.values()), None), known[0])
        return output

    def _ask(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation that reads a tensor's values, such as `item` or `equal`.

        A test, such as `equal`, returns False if the values depend on weights.
        """
        fakes = [x for x in iterate_tensors((args, kwargs)) if isinstance(x, FakeTensor)]
        is_unknown = any(find_known(x) is None for x in fakes)
        return False if is_unknown and name in _TESTS else func(*args, **kwargs)

    def _describe(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Step:
        arguments = map_argument_names(func, name, args, kwargs)
        operands: list[Operand] = []
        known: dict[str, torch.Tensor] = {}
        for key, value in arguments.items():
            for tensor in list_direct(value):
                if (values := find_known(tensor)) is not None:
                    known.setdefault(key, values)
                if tensor.is_floating_point() or tensor.is_complex():
                    operands.append(Operand(key, tensor.dtype, find_dtype_origin(tensor)))
        path = self._paths.current if self._paths is not None else ""
        return Step(path, name, tuple(operands), known, arguments, list_autocast())

    def _unite(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        floats = [x for x in iterate_tensors((args, kwargs)) if x.is_floating_point()]
        wanted = self._main if self._main in {x.dtype for x in floats} else floats[-1].dtype
        with torch._C.DisableTorchFunction():
            united: tuple[Any, Any] = pytree.tree_map_only(
                torch.Tensor,
                lambda x: _cast_known(x, wanted) if x.is_floating_point() else x,
                (args, kwargs),
            )
        return united

    def _mark(self, step: Step, output: Any) -> None:
        for tensor in list_direct(output):
            if tensor.is_floating_point():
                set_origin(tensor, _trace(step, tensor.dtype))


def _cast_known(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, and keep the values that are attached to a fake one."""
    made = tensor.to(dtype)
    if isinstance(made, FakeTensor):
        set_known(made, find_known(tensor))
    return made


def set_origin(tensor: torch.Tensor, origin: DtypeOrigin) -> None:
    tensor.stopdown_origin = origin  # type: ignore[attr-defined]


def find_dtype_origin(tensor: torch.Tensor) -> DtypeOrigin:
    found: DtypeOrigin | None = getattr(tensor, "stopdown_origin", None)
    return found or DtypeOrigin("made", "tensor of the caller", "")


def _trace(step: Step, dtype: torch.dtype) -> DtypeOrigin:
    """Return the origin of an output's dtype: that of an operand with this dtype, or the operation."""
    same = [operand.origin for operand in step.operands if operand.dtype == dtype]
    if not same:
        return DtypeOrigin("cast" if step.operands else "made", step.name, step.path)
    chosen = next((origin for origin in same if origin.kind != "parameter"), same[0])
    if chosen.kind == "parameter":
        return DtypeOrigin("mixed", step.name, step.path, chosen.parameter)
    # The dtype of a cast that an fp32 parameter asked for is that parameter's.
    root = next((origin.parameter for origin in same if origin.parameter), "")
    if root and not chosen.parameter and chosen.kind != "argument":
        return DtypeOrigin(chosen.kind, chosen.name, chosen.path, root)
    return chosen


def is_product(name: str) -> bool:
    """Return whether an operation is of a kind that does most arithmetic, such as a matrix product."""
    return name in list_kinds(*operations.PRODUCTS, "einsum", "bilinear")


def wants_one_dtype(name: str) -> bool:
    """Return whether an operation needs operands of one floating dtype unless a backend rule differs."""
    return name in list_kinds(*operations.ONE_DTYPE)


@functools.cache
def _parameter_names(name: str, func: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments in order; () if they are unknown."""
    packet = getattr(torch.ops.aten, name.strip("_") or name, None)
    if inspect.isfunction(func):
        try:
            return tuple(inspect.signature(func).parameters)
        except (TypeError, ValueError):
            return ()
    for overload in (packet.overloads() if packet is not None else ())[:1]:
        return tuple(argument.name for argument in getattr(packet, overload)._schema.arguments)
    return ()


def map_argument_names(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """Map argument names to a call's arguments; without a known name, the position is the name: "0"."""
    names = read_calls().arguments.get(name) or _parameter_names(name, func)
    padded = [*names, *(str(at) for at in range(len(names), len(args)))]
    found = dict(zip(padded, args, strict=False)) | dict(kwargs)
    renames = read_calls().renamed.get(name, {})
    return {renames.get(key, key): value for key, value in found.items()}


_TESTS = ("__bool__", "is_nonzero", "equal", "allclose")
"""Tests that return False for values that depend on weights, as they usually test for faults."""

_DEVICE = torch.Tensor.device.__get__


def _heal(output: Any, step: Step, main: torch.dtype | None) -> Any:
    """Cast an output of mixed operands to the component's dtype, so that later ones are not reported."""
    if main is None or main not in step.dtypes:
        return output
    with torch._C.DisableTorchFunction():
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(main) if x.is_floating_point() else x, output
        )
