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
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown.interception.autocast import list_autocast
from stopdown.interception.module_paths import ModulePaths
from stopdown.numerics import iterate_tensors
from stopdown.scaling.graph import operations
from stopdown.scaling.graph.operations import list_kinds, read_calls

LARGEST_KNOWN = 1 << 18
"""Values are computed for tensors up to this size; a mask of 512 by 512 tokens fits."""


@dataclass(frozen=True)
class Origin:
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
    origin: Origin


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
        """Look at what a step made of known values."""


class Walk(TorchFunctionMode):
    """The walk through one call; see the head of this file.

    Args:
        judge: told of each step.
        main: dtype of most of the component's weights.
        device: what code that asks for a real tensor's device is told, though it is on the CPU.
        paths: which module is running; None outside of components.
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
            args, kwargs = pytree.tree_map_only(torch.device, _to_cpu, (args, kwargs))
        name = name_function(func)
        if name in read_calls().asks:
            answer = _answer(func, name, args, kwargs)
            if answer is not _UNANSWERED:
                return answer
        if name in ("__get__", "__set__"):
            is_device = self._device is not None and func == _DEVICE
            return self._device if is_device else func(*args, **kwargs)
        if name in _INDEXING:
            args = (args[0], _read_index(args[1]), *args[2:])
        step = self._describe(func, name, args, kwargs)
        with unset_fake_temporarily():
            must_cast = self._judge(step)
        known = _compute_known(func, args, kwargs)
        if must_cast:
            args, kwargs = self._unite(args, kwargs)
        output = _run(func, args, kwargs)
        if must_cast:
            output = _heal(output, step, self._main)
        known = output if known is _IS_OUTPUT else known
        self._mark(step, output, known)
        if known is not None:
            with unset_fake_temporarily():
                self._judge.watch(step, next(iter(step.known.values()), None), known)
        return output

    def _describe(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Step:
        arguments = name_arguments(func, name, args, kwargs)
        operands: list[Operand] = []
        known: dict[str, torch.Tensor] = {}
        for key, value in arguments.items():
            for tensor in _direct_tensors(value):
                if (values := find_known(tensor)) is not None:
                    known.setdefault(key, values)
                if tensor.is_floating_point() or tensor.is_complex():
                    operands.append(Operand(key, tensor.dtype, find_origin(tensor)))
        path = self._paths.current if self._paths is not None else ""
        return Step(path, name, tuple(operands), known, arguments, list_autocast())

    def _unite(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        floats = [x for x in iterate_tensors((args, kwargs)) if x.is_floating_point()]
        wanted = self._main if self._main in {x.dtype for x in floats} else floats[-1].dtype
        with torch._C.DisableTorchFunction():
            united: tuple[Any, Any] = pytree.tree_map_only(
                torch.Tensor,
                lambda x: x.to(wanted) if x.is_floating_point() else x,
                (args, kwargs),
            )
        return united

    def _mark(self, step: Step, output: Any, known: Any) -> None:
        outputs, values = _direct_tensors(output), _direct_tensors(known)
        for at, tensor in enumerate(outputs):
            if not isinstance(tensor, FakeTensor):
                pass  # real tensors hold their own values
            elif at < len(values) and values[at].shape == tensor.shape:
                set_known(tensor, values[at])
            elif hasattr(tensor, "stopdown_known"):
                set_known(tensor, None)  # changed in place by something unknown
            if tensor.is_floating_point():
                set_origin(tensor, _trace(step, tensor.dtype))


def set_origin(tensor: torch.Tensor, origin: Origin) -> None:
    tensor.stopdown_origin = origin  # type: ignore[attr-defined]


def find_origin(tensor: torch.Tensor) -> Origin:
    found: Origin | None = getattr(tensor, "stopdown_origin", None)
    return found or Origin("made", "tensor of the caller", "")


def set_known(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    tensor.stopdown_known = values  # type: ignore[attr-defined]


def find_known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, None when they depend on weights or are many."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.numel() <= LARGEST_KNOWN and not tensor.is_meta else None
    found: torch.Tensor | None = getattr(tensor, "stopdown_known", None)
    return found


def _trace(step: Step, dtype: torch.dtype) -> Origin:
    """Where the dtype of a step's output comes from: an operand that has it, or the step itself."""
    same = [operand.origin for operand in step.operands if operand.dtype == dtype]
    if not same:
        return Origin("cast" if step.operands else "made", step.name, step.path)
    chosen = next((origin for origin in same if origin.kind != "parameter"), same[0])
    if chosen.kind == "parameter":
        return Origin("mixed", step.name, step.path, chosen.parameter)
    # The dtype of a cast that an fp32 parameter asked for is that parameter's.
    root = next((origin.parameter for origin in same if origin.parameter), "")
    if root and not chosen.parameter and chosen.kind != "argument":
        return Origin(chosen.kind, chosen.name, chosen.path, root)
    return chosen


def _to_cpu(_: torch.device) -> torch.device:
    return torch.device("cpu")


def is_product(name: str) -> bool:
    """Whether an operation is one of those that do nearly all of the arithmetic."""
    return name in list_kinds(*operations.PRODUCTS, "einsum", "bilinear")


def wants_one_dtype(name: str) -> bool:
    """Whether an operation's floating operands must have one dtype where no rule says otherwise."""
    return name in list_kinds(*operations.ONE_DTYPE)


def name_function(func: Any) -> str:
    """The short name of a torch function: `linear`, `add`, `to`."""
    name = getattr(func, "__name__", str(func))
    return read_calls().called.get(name, name)


@functools.cache
def _parameter_names(name: str, func: Any) -> tuple[str, ...]:
    """Names of a function's arguments, in order; empty if they are unknown."""
    packet = getattr(torch.ops.aten, name.strip("_") or name, None)
    if inspect.isfunction(func):
        try:
            return tuple(inspect.signature(func).parameters)
        except (TypeError, ValueError):
            return ()
    for overload in (packet.overloads() if packet is not None else ())[:1]:
        return tuple(argument.name for argument in getattr(packet, overload)._schema.arguments)
    return ()


def name_arguments(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name; by number where the names are not known."""
    names = read_calls().arguments.get(name) or _parameter_names(name, func)
    padded = [*names, *(str(at) for at in range(len(names), len(args)))]
    found = dict(zip(padded, args, strict=False)) | dict(kwargs)
    renames = read_calls().renamed.get(name, {})
    return {renames.get(key, key): value for key, value in found.items()}


def _direct_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in _direct_tensors(item)]
    return []


_UNANSWERED = object()
_DEVICE = torch.Tensor.device.__get__


def _answer(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What code that asks for a fake tensor's values is told."""
    tensors = list(iterate_tensors((args, kwargs)))
    if not any(isinstance(x, FakeTensor) for x in tensors):
        return _UNANSWERED
    values = [find_known(x) for x in tensors]
    if all(v is not None for v in values):
        given = iter(values)
        real = pytree.tree_map_only(torch.Tensor, lambda _: next(given), (args, kwargs))
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            return func(*real[0], **real[1])
    return False if name in ("__bool__", "is_nonzero", "equal", "allclose") else _UNANSWERED


def _compute_known(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives on known values; None when some are not known, or they are too many."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    real: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = find_known(leaf) if isinstance(leaf, FakeTensor) else leaf
            if leaf is None or leaf.numel() > LARGEST_KNOWN:
                return None
        real.append(_to_cpu(leaf) if isinstance(leaf, torch.device) else leaf)
    is_fake = any(isinstance(x, FakeTensor) for x in leaves)
    if not is_fake and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return _IS_OUTPUT
    if (
        not any(isinstance(x, torch.Tensor) for x in leaves)
        and name_function(func) not in read_calls().makes
    ):
        return None
    real_args, real_kwargs = pytree.tree_unflatten(real, spec)
    if _is_large(real_args, real_kwargs):
        return None
    try:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            values = func(*real_args, **real_kwargs)
    except Exception:
        return None  # the fake run says what is wrong
    small = [x for x in _direct_tensors(values) if x.numel() <= LARGEST_KNOWN]
    return values if small and len(small) == len(_direct_tensors(values)) else None


def _read_index(index: Any) -> Any:
    """An index whose whole numbers are read from fake tensors: `x[:, :lengths[0]]`."""
    if isinstance(index, (tuple, list)):
        return type(index)(_read_index(x) for x in index)
    if isinstance(index, slice):
        return slice(*(_read_number(x, None) for x in (index.start, index.stop, index.step)))
    return _read_number(index, 0)


def _read_number(value: Any, otherwise: int | None) -> Any:
    """The number in a fake tensor of one; `otherwise` where it depends on weights."""
    if not isinstance(value, FakeTensor) or value.dim() or value.dtype not in _WHOLE:
        return value
    known = find_known(value)
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return otherwise if known is None else int(known)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives on fake tensors, also where values decide the size: `nonzero`, `x[mask]`.

    Values that depend on weights are taken as zeros, masks among them as full.
    """
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as refused:
        error = refused
    fakes = [x for x in iterate_tensors((args, kwargs)) if isinstance(x, FakeTensor)]
    if sum(x.numel() for x in fakes) > _LARGEST_STAND_IN:
        raise error
    try:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            real = pytree.tree_map_only(FakeTensor, _fill, (args, kwargs))
            made = func(*real[0], **real[1])
    except Exception:
        raise error from None
    if not _direct_tensors(made):
        raise error  # a number that depends on weights: what the code does with it is unknown
    mode = fakes[0].fake_mode
    return pytree.tree_map_only(torch.Tensor, mode.from_tensor, made)


def _fill(tensor: FakeTensor) -> torch.Tensor:
    known = find_known(tensor)
    if known is not None:
        return known
    value = 1 if tensor.dtype == torch.bool else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tuple(tensor.shape))


_INDEXING = ("__getitem__", "__setitem__")
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST_STAND_IN = 1 << 26
"""Elements of tensors that are filled to find the size of a result."""

_IS_OUTPUT = object()
"""Everything is real here: what comes out is what is known."""


def _is_large(args: Any, kwargs: Any) -> bool:
    """Whether sizes written out in a call ask for a large tensor."""
    sizes = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, int)]
    return math.prod(max(1, abs(x)) for x in sizes) > 64 * LARGEST_KNOWN


def _heal(output: Any, step: Step, main: torch.dtype | None) -> Any:
    """The output of a refused step in the component's dtype: what follows is not at fault."""
    if main is None or main not in step.dtypes:
        return output
    with torch._C.DisableTorchFunction():
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(main) if x.is_floating_point() else x, output
        )
