"""One call of a component on fake tensors, operation by operation as its code writes them.

Every call of a torch function is seen with the dtypes that its operands have, the module whose code
makes it, where each operand got its dtype, and its values where they do not depend on weights
(positions, masks, timesteps: those are computed beside the fake ones). An operation whose operands
cannot go together is reported and its operands are cast, so that one walk finds all.

**Catches** functions of torch and methods of tensors, in eager order, branches on known values.
**Does not catch** what a custom kernel does inside, and branches on values that depend on weights:
a test whether such values are finite is answered with no fault, a mask of such values is taken as full.
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
    """Where a tensor got the dtype that it has.

    Attributes:
        kind: `argument`, `parameter`, `output`, `cast`, `made` or `mixed`.
        name: of the argument or parameter, or of the operation.
        parameter: name of the parameter that brought the dtype in, "" when none did.
        before: for an argument, where the caller got it from.
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
    """One floating operand of an operation."""

    name: str
    dtype: torch.dtype
    origin: DtypeOrigin


@dataclass(frozen=True)
class Step:
    """One call of a torch function, before it is made.

    Attributes:
        path: dotted path of the innermost module whose code makes it; "" is the component.
        name: `linear`, `layer_norm`, `cat`, `to`, `add`…
        operands: the floating ones, in the order of its arguments.
        known: argument name to its values, where they are known.
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
    """What is told of each step of a walk (`observations.Judge`)."""

    def __call__(self, step: Step) -> bool:
        """Look at a step before it is made, and return whether its operands cannot go together."""

    def watch(self, step: Step, given: Any, made: Any) -> None:
        """Look at the output of a step whose values are known."""


class Walk(TorchFunctionMode):
    """The walk through one call; see the head of this file.

    Args:
        judge: told of each step.
        main: dtype of most of the component's weights.
        device: what code that asks for a real tensor's device is told, though it is on the CPU.
        paths: which module is running; None outside of components. Inside of one, `ArgumentValues` is
            entered before.
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
        """Ask for values; whether there is a fault among those that depend on weights is denied."""
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
    """Cast a tensor to another dtype and keep its known values."""
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
    """Find the origin of the dtype of a step's output: an operand that has it, or the step itself."""
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
    """Return whether an operation needs operands of one floating dtype where no rule says otherwise."""
    return name in list_kinds(*operations.ONE_DTYPE)


@functools.cache
def _parameter_names(name: str, func: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments in order; an empty tuple when they are unknown."""
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
    """Map names to a call's arguments; unknown names are positions such as "0"."""
    names = read_calls().arguments.get(name) or _parameter_names(name, func)
    padded = [*names, *(str(at) for at in range(len(names), len(args)))]
    found = dict(zip(padded, args, strict=False)) | dict(kwargs)
    renames = read_calls().renamed.get(name, {})
    return {renames.get(key, key): value for key, value in found.items()}


_TESTS = ("__bool__", "is_nonzero", "equal", "allclose")
"""Of values that depend on weights they are answered with no: what is tested for is a fault."""

_DEVICE = torch.Tensor.device.__get__


def _heal(output: Any, step: Step, main: torch.dtype | None) -> Any:
    """Cast the output of a refused step to the component's dtype, so that later steps are not blamed."""
    if main is None or main not in step.dtypes:
        return output
    with torch._C.DisableTorchFunction():
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(main) if x.is_floating_point() else x, output
        )
