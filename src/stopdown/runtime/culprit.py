"""Find the operation that caused NaN or Inf in a call's output: run the call again and inspect every
operation.

The culprit is the operation whose inputs are finite and whose output isn't. It is found by tracing back
from the call's output, so that a harmless Inf (a mask's, before a softmax) isn't blamed. An operation in
16 bits is then computed once more in fp32: if the result is finite, the 16-bit range was too small, and
the size of the result is known.

**Catches** any operation that PyTorch dispatches, in any module, also in place and on views; weights that
aren't finite; arguments that were bad before the call; faults behind a clamp.

**Does not catch** faults inside a fused kernel (it is named as a whole) or inside compiled code (the
module is named), and faults that don't recur: the result is then `intermittent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from stopdown.component_call_names import name_module_path
from stopdown.fold_names import name_parameters
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.patches import Patches
from stopdown.number_formats import FP16, find_format, name_dtype
from stopdown.numerics import HALVES, bound_values, iterate_tensors, measure_amax
from stopdown.operations import find_operation
from stopdown.runtime.hidden_values import FUNCTIONS, load_compiler

_HIDING = ("clamp", "nan_to_num")
_HIDING_NAMES = {*FUNCTIONS, "_to_copy", "index_put"}
_SENTINEL = -FP16.largest


@dataclass(frozen=True)
class Culprit:
    """The origin of NaN or Inf in a call's output.

    Attributes:
        kind: `range` (16 bits overflow), `clamped` (the same behind a clamp), `undefined` (not finite in
            any precision), `kernel` (the format can represent the result, but the device's kernel
            doesn't return it), `written` (the code wrote it), `weight`, `input`, `unknown`, or
            `intermittent` if the replay was finite.
        path: of the innermost module around it; of the parameter for a weight.
        operation: such as `linear` or `mul`; empty if there is none.
        dtype: of the operation's result.
        operands: dtype, shape and largest magnitude of each floating operand, in words.
        reached: magnitude of the result in fp32; NaN if unknown.
        around: the modules that it happened in, innermost first, without those that return the
            overflowing value itself: in fp32, their output would still not fit.
    """

    kind: str
    path: str = ""
    operation: str = ""
    dtype: str = ""
    operands: tuple[str, ...] = ()
    reached: float = math.nan
    around: tuple[str, ...] = ()

    @property
    def overflow(self) -> str:
        """The overflow in words: `an activation reached 113,000, above fp16's maximum of 65,504`.

        "" if there is none, or if its size is unknown.
        """
        known = find_format(self.dtype)
        if self.kind not in ("range", "clamped") or known is None:
            return ""
        if not known.largest < self.reached < math.inf:
            return ""
        reached, ends = map(word_size, (self.reached, known.largest))
        return f"an activation reached {reached}, above {self.dtype}'s maximum of {ends}"

    def describe(self, component: str, *, is_sized: bool = True) -> str:
        """Describe, for people, where the NaN or Inf began and why.

        Args:
            component: name of the call, for the module's path.
            is_sized: whether to give the size of an overflow.
        """
        module_path = name_module_path(component, self.path)
        if self.kind == "intermittent":
            return "The same call returned finite values when it was retried: a race, or faulty memory."
        if self.kind == "input":
            return f"Its argument {self.path} was already not finite."
        if self.kind == "weight":
            return f"The weight {module_path} isn't finite."
        if not self.operation:
            return "Stopdown couldn't find where the fault began."
        said = f"The fault begins at `{module_path}` ({self.operation} in {self.dtype})."
        ends = {
            "undefined": "its result isn't finite in fp32 either",
            "written": "its code writes the NaN or Inf",
        }
        if math.isfinite(self.reached):
            size = f"in fp32 reaches {word_size(self.reached)}" if is_sized else "overflows"
            ends[self.kind] = f"its result {size}"
        if self.kind == "kernel":
            ends["kernel"] = (
                f"its result should reach no more than {self.reached:.4g}, which {self.dtype} holds: this "
                "device's kernel is wrong, or adds up in 16 bits"
            )
        known = [f"its operands are finite ({', '.join(self.operands)})"] if self.operands else []
        known += [ends[self.kind]] if self.kind in ends else []
        if known:
            words = ", but ".join(known)
            said += f" {words[0].upper()}{words[1:]}."
        return said + (" A clamp hid it." if self.kind == "clamped" else "")


def word_size(value: float) -> str:
    """Format a magnitude for people: exact up to five digits, else rounded to three, such as `113,000`."""
    if value >= 1e9:
        return f"{value:.3g}"
    return f"{value if value < 1e5 else float(f'{value:.3g}'):,.0f}"


@dataclass
class _Event:
    """One operation whose result isn't finite, and the earlier such operations that its NaN or Inf came
    from.
    """

    index: int
    path: str
    operation: str
    dtype: torch.dtype
    causes: list[_Event]
    is_mask: bool
    kind: str = ""
    operands: tuple[str, ...] = ()
    reached: float = math.nan
    around: tuple[str, ...] = ()
    returned_by: set[str] = field(default_factory=set)


def find_culprit(
    module: torch.nn.Module,
    call: Callable[[], Any],
    arguments: Mapping[str, Any],
) -> tuple[Culprit, Any]:
    """Run a call again and find the operation where NaN or Inf in its output began.

    Args:
        module: the component.
        call: makes the call.
        arguments: of the call by name, to recognise faulty ones.

    Returns:
        The origin, and the output of the repeated call.

    Cost: one run of the call, with one pass and one host read for each operation.
    """
    load_compiler()
    with Patches() as patches:
        tracer = _Tracer(module, arguments, patches)
        with _leaving_compiler(), tracer:
            output = call()
    return tracer.conclude(output), output


def find_origins(
    module: torch.nn.Module, call: Callable[[], Any], arguments: Mapping[str, Any]
) -> tuple[frozenset[str], Any]:
    """Run a call again and classify where all NaN and Inf in its output began, to tell faults from
    intended values.

    The kinds are those of `Culprit`, `mask`, and `overflow` for a value that a wider format could
    represent.

    Returns:
        The kinds, and the output of the repeated call.

    Cost: as `find_culprit`, and copies of the tensors that operations overwrite.
    """
    with Patches() as patches:
        tracer = _Tracer(module, arguments, patches, is_exact=True)
        with _leaving_compiler(), tracer:
            output = call()
    return tracer.list_kinds(output), output


def _leaving_compiler() -> Any:
    """Run code that a model compiles by itself, such as flex attention, without the compiler in the block.

    Under a dispatch mode the compiler would give up such code, and remember this: the calls after it would
    fail.
    """
    return torch.compiler.set_stance("force_eager")


class _Tracer(TorchDispatchMode):
    """A dispatch mode that checks every operation's result, and records which one made each NaN or Inf."""

    def __init__(
        self,
        module: torch.nn.Module,
        arguments: Mapping[str, Any],
        patches: Patches,
        *,
        is_exact: bool = False,
    ) -> None:
        """Prepare to trace one call of a module; enter this mode around the call.

        Args:
            arguments: of the call by name, to recognise faulty ones.
            patches: undoing them removes the hooks.
            is_exact: distinguish an overflow in fp32 from a result that isn't finite in any precision.
        """
        super().__init__()
        self.count, self._is_exact = 0, is_exact
        self.hidden: list[_Event] = []
        self._made: Any = WeakIdKeyDictionary()
        self._blank: Any = WeakIdKeyDictionary()
        self._written: dict[int, _Event] = {}
        self._names: Any = WeakIdKeyDictionary()
        for name, tensor in name_parameters(module).items():
            self._names[tensor] = ("weight", name)
        for name, value in arguments.items():
            for tensor in iterate_tensors(value):
                self._names[tensor] = ("input", name)
        self.paths = ModulePaths(module, patches, on_leave=self.note_returned)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args, kwargs
        if self._is_exact and func._schema.is_mutable:
            given = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        result = func(*args, **kwargs)
        self.count += 1
        event = self._look(func, args, kwargs, result)
        if self._is_exact and event is not None and event.kind == "undefined":
            event.kind = _tell_overflow(func, event.operation, *given, result)
        return result

    def list_kinds(self, output: Any) -> frozenset[str]:
        """Return the kinds (`Culprit.kind`, `mask`) of the operations where the NaN and Inf in an
        output began.
        """
        left = [self._find_maker(x) for x in _floats(output) if not _is_finite(x)]
        seen, kinds = set[int](), set[str]()
        while left:
            event = left.pop()
            if id(event) in seen:
                continue
            seen.add(id(event))
            left += event.causes
            if not event.causes:
                kinds.add("mask" if event.is_mask else event.kind or "unknown")
        return frozenset(kinds)

    def note_returned(self, path: str, output: Any) -> None:
        """Record which of a module's outputs hold NaN or Inf, as running that module in fp32 wouldn't
        help.
        """
        for tensor in _floats(output):
            if tensor in self._made:
                self._made[tensor].returned_by.add(path)

    def conclude(self, output: Any) -> Culprit:
        """Return the operation where NaN or Inf in the call's output began; if it is finite, one behind
        a clamp.
        """
        bad = [x for x in _floats(output) if not _is_finite(x)]
        if bad:
            return _trace_back(self._find_maker(bad[0]), "")
        if self.hidden:
            return _trace_back(self.hidden[0], "clamped")
        return Culprit("intermittent")

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> _Event | None:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        outputs = _floats(result)
        kind = getattr(find_operation(name), "kind", "")
        if kind == "blank":
            for tensor in outputs:
                self._blank[tensor] = True
            return None
        bad = [x for x in outputs if not _is_finite(x)]
        changed = {id(x) for x in outputs}
        inputs = [x for x in _floats((args, kwargs)) if id(x) not in changed]
        if kind in _HIDING or name.rstrip("_") in _HIDING_NAMES:
            makers = [self._made[x] for x in _floats(args) if x in self._made and not bad]
            self.hidden += [
                event for event in makers if not event.is_mask and _find_root(event).dtype in HALVES
            ]
        for tensor in outputs:
            self._blank.pop(tensor, None)
            if tensor in self._made and not any(tensor is x for x in bad):
                del self._made[tensor]
        if not bad:
            return None
        was_bad = [self._made[x] for x in outputs if x in self._made]  # overwritten in place
        event = self._describe(func, name, args, kwargs, bad[0], inputs, was_bad)
        for tensor in bad:
            self._made[tensor] = event
            self._written[_find_storage(tensor)] = event
        return event

    def _describe(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        bad: torch.Tensor,
        inputs: list[torch.Tensor],
        was_bad: list[_Event],
    ) -> _Event:
        causes = was_bad + [
            self._find_maker(x) for x in inputs if x not in self._blank and not _is_finite(x)
        ]
        only_low = _is_only_low(bad)
        is_mask = (
            only_low
            and all(cause.is_mask for cause in causes)
            and (bool(causes) or _has_sentinel(args, kwargs, inputs))
        )
        real = [cause for cause in causes if not cause.is_mask]
        event = _Event(self.count, self.paths.current, name, bad.dtype, real, is_mask)
        if not real and not is_mask:
            event.operands = tuple(_describe_operands(inputs))
            event.around = tuple(path for path in reversed(self.paths.stack) if path)
            event.kind, event.reached = _weigh(func, args, kwargs, bad, bool(causes))
        return event

    def _find_maker(self, tensor: torch.Tensor) -> _Event:
        """Return the recorded operation that made a tensor with NaN or Inf, or last wrote to its memory.

        For a weight, an argument or an unknown tensor, return a record without an operation.
        """
        if tensor in self._made:
            return self._made[tensor]
        named = self._names.get(tensor)
        if named is None and (event := self._written.get(_find_storage(tensor))) is not None:
            return event
        kind, path = named or ("unknown", "")
        is_mask = not isinstance(tensor, torch.nn.Parameter) and _is_only_low(tensor)
        return _Event(self.count, path, "", tensor.dtype, [], is_mask, kind)


def _find_root(event: _Event) -> _Event:
    while event.causes:
        event = min(event.causes, key=lambda cause: cause.index)
    return event


def _trace_back(event: _Event, kind: str) -> Culprit:
    event = _find_root(event)
    is_too_large = event.kind == "range" and event.reached > torch.finfo(event.dtype).max
    hopeless = event.returned_by if is_too_large else ()
    found = event.kind or "unknown"
    return Culprit(
        kind if kind and found in ("range", "unknown") else found,
        event.path,
        event.operation,
        name_dtype(event.dtype),
        event.operands,
        event.reached,
        tuple(path for path in event.around if path not in hopeless),
    )


def _weigh(func: Any, args: Any, kwargs: Any, bad: torch.Tensor, masked: bool) -> tuple[str, float]:
    """Classify why an operation with finite operands returned NaN or Inf, by computing it in fp32.

    Args:
        bad: the result.
        masked: whether an operand is a mask with -Inf.

    Returns:
        A kind of `Culprit.kind`, and the result's largest magnitude in fp32; NaN if unknown.
    """
    if any(not math.isfinite(x) for x in _numbers(args, kwargs)):
        return "written", math.nan
    if func._schema.is_mutable or masked:  # its operands are gone, or belong to a mask
        if bad.dtype not in HALVES:
            return "undefined", math.nan
        return ("range" if bool(torch.isinf(bad).any()) else "unknown"), math.nan
    places: list[torch.device | None] = [None] if bad.dtype in HALVES else []
    places += [torch.device("cpu")] if bad.device.type != "cpu" else []
    for place in places:
        try:
            values = _floats(func(*_widen(args, place), **_widen(kwargs, place)))
        except Exception:  # a kernel that has no such form: nothing is known of it
            return ("unknown" if bad.dtype in HALVES else "undefined"), math.nan
        if all(map(_is_finite, values)):
            reached = max((measure_amax(x) for x in values), default=math.nan)
            fits = reached <= torch.finfo(bad.dtype).max
            return ("kernel" if fits else "range"), reached
    return "undefined", math.nan


_GROWING = ("exp", "exp2", "expm1", "sinh", "cosh", "prod", "cumprod")
"""Functions that can exceed every format's maximum although their result is finite for finite operands."""


def _tell_overflow(func: Any, operation: str, args: Any, kwargs: Any, result: Any) -> str:
    """Return `overflow` if an operation's NaN or Inf in fp32 is finite in fp64; `undefined` if it isn't.

    Return `unknown` if it can't be computed in fp64.
    """
    name = operation.rstrip("_")
    infinite = any(bool(x.isinf().any()) for x in _floats(result))
    if name in _GROWING:
        return "overflow" if infinite else "undefined"
    if name == "pow" and infinite:
        is_zero = isinstance(args[0], torch.Tensor) and bool((args[0] == 0).any())
        return "undefined" if is_zero else "overflow"

    def widen(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype)
        if isinstance(x, torch.dtype):
            return torch.float64 if x.is_floating_point else x
        return torch.device("cpu") if isinstance(x, torch.device) else x

    try:
        exact = _floats(func(*pytree.tree_map(widen, args), **pytree.tree_map(widen, kwargs)))
        pairs = zip(_floats(result), exact, strict=True)
        is_over = any(bool((~x.cpu().isfinite() & y.isfinite()).any()) for x, y in pairs)
    except Exception:  # a kernel that has no such form: nothing is known of it
        return "unknown"
    return "overflow" if is_over else "undefined"


def _widen(tree: Any, place: torch.device | None) -> Any:
    """Cast 16-bit operands in nested arguments to fp32, and move them to another device if one is given."""

    def widen(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(place, torch.float32 if x.dtype in HALVES else x.dtype)
        if isinstance(x, torch.device) and place is not None:
            return place
        return torch.float32 if isinstance(x, torch.dtype) and x in HALVES else x

    return pytree.tree_map(widen, tree)


def _describe_operands(inputs: list[torch.Tensor]) -> Iterator[str]:
    for tensor in inputs[:4]:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        amax = measure_amax(tensor)
        size = word_size(amax) if amax >= 1e4 else f"{amax:,.4g}"
        yield f"{name_dtype(tensor.dtype)} {shape} up to {size}"


def _floats(tree: Any) -> list[torch.Tensor]:
    """List the floating tensors in nested values that can be checked.

    8-bit tensors are left out, because they only store weights and can't be compared. So are tensors on
    `meta`: other libraries put offloaded weights there in the middle of a call.
    """
    found = [x for x in iterate_tensors(tree) if x.is_floating_point() and x.numel()]
    found = [x for x in found if not x.is_meta]
    return [x for x in found if x.element_size() > 1]


def _is_finite(tensor: torch.Tensor) -> bool:
    bounds = bound_values([tensor])
    return bounds is None or all(map(math.isfinite, bounds.tolist()))


def _is_only_low(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor +Inf, so that any -Inf in it may be a mask's."""
    bounds = bound_values([tensor])
    return bounds is None or bounds.tolist()[1] < math.inf  # both are NaN if one value is


def _has_sentinel(args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
    """Return whether -Inf in an operation's result may be a mask's: -Inf or a format's minimum is among
    its operands.
    """
    if any(x <= _SENTINEL for x in _numbers(args, kwargs)):
        return True
    lows = [float(x.min()) for x in inputs]
    return any(low in (_SENTINEL, torch.finfo(torch.bfloat16).min) or low < -3e38 for low in lows)


def _numbers(args: Any, kwargs: Any) -> list[float]:
    leaves = pytree.tree_leaves((args, kwargs))
    return [float(x) for x in leaves if isinstance(x, float)]


def _find_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
