"""Compare two calls of a module without tracing: record how a call uses parameters and arguments as hashes.

Exponents that were solved for one call can be reused for another whose code does the same. A call is run
on tensors without values. Each torch function gets a mark: a hash of its name, the module
and the lines of code that it is called from, and the marks of its tensor arguments. A parameter's mark
is its name, so the mark of a value covers all operations that computed it. Sizes are not part of a
mark. If all marks of a call are among another call's, the equations of that other call hold for it:
each of its values can have the exponent of the value with the same mark.

**Catches** parameters that only one of the calls reads, or that are added to another value; values that
are computed instead; other functions, parts and outputs; writes into tensors.

**Does not catch** rows and columns of activations that sizes select; numbers that differ and are not 0;
functions that torch's modes don't intercept.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stopdown.fake_tensors.argument_values import find_written
from stopdown.interception.module_paths import ModulePaths
from stopdown.numerics import iterate_tensors

_ASKING = frozenset(
    (
        *(
            "shape",
            "size",
            "dim",
            "ndim",
            "numel",
            "nelement",
            "stride",
            "dtype",
            "device",
            "layout",
        ),
        *(
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
        ),
        *(
            "is_quantized",
            "is_leaf",
            "is_nested",
            "is_mkldnn",
            "is_mps",
            "is_xpu",
            "requires_grad",
            "grad",
        ),
        *("grad_fn", "itemsize", "element_size", "storage_offset", "untyped_storage", "get_device"),
    )
)
"""Functions and attributes that describe a tensor but return no tensor."""

_SAME = frozenset(
    (
        *(
            "to",
            "type",
            "float",
            "half",
            "bfloat16",
            "double",
            "type_as",
            "cpu",
            "cuda",
            "data",
            "detach",
        ),
        *("clone", "contiguous", "alias", "requires_grad_", "detach_"),
    )
)
"""Functions that return the same values in another dtype, device or memory."""

_POWERS = frozenset(("pow", "__pow__", "__rpow__", "__ipow__", "pow_", "float_power"))
_PICKING = frozenset(("__getitem__", "select"))
_JOINING = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack"))


class Readings(TorchFunctionMode):
    """Torch function mode that records a hash (mark) of each torch function call and its inputs' history.

    Attributes:
        found: marks of functions and outputs; two calls that use their tensors alike have equal sets.
    """

    def __init__(self, paths: ModulePaths, root: types.CodeType, blocked: Collection[str]) -> None:
        """Start to record a call of a module; enter this mode around the call.

        Args:
            paths: tracks which module runs.
            root: code object that makes the call; frames outside it are not part of a mark.
            blocked: names of tensors whose rows or columns differ in exponent. Their marks include
                which of these are read.
        """
        super().__init__()
        self.found: set[int] = set()
        self._paths, self._root, self._blocked = paths, root, frozenset(blocked)
        self._marks: dict[int, int] = {}
        self._exact: set[int] = set()
        self._written: dict[int, int] = {}
        self._held: list[Any] = []  # keeps ids unique

    def name(self, tensor: torch.Tensor, kind: str, name: object) -> None:
        """Assign the initial hash of a parameter (by its name) or an argument (by its index).

        The hashes of all tensors computed from it are derived from that.

        Args:
            kind: `"parameter"` or `"input"`.
            name: the name or index.
        """
        self._mark(tensor, hash((kind, name)))
        if name in self._blocked:
            self._exact.add(id(tensor))

    def note_outputs(self, outputs: list[torch.Tensor]) -> None:
        for number, tensor in enumerate(outputs):
            self.found.add(hash(("output", number, self._read(tensor))))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in _ASKING:
            return func(*args, **kwargs)
        first = next(iterate_tensors((args, kwargs)), None)
        if name in _SAME and first is not None:
            mark = self._read(first)
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and made is not first:
                is_cast = made.dtype != first.dtype
                self._mark(made, hash(("cast", str(made.dtype), mark)) if is_cast else mark)
                self._exact.update([id(made)] if id(first) in self._exact else ())
            return made
        is_exact = first is not None and id(first) in self._exact
        place = name, self._paths.current, self._find_place()
        joined = list(iterate_tensors(args)) if name in _JOINING else []
        given = self._read(joined[0]) if joined else self._describe((args, kwargs), name, is_exact)
        mark = hash((place, given))
        self.found.update(
            hash((mark, "joined", self._read(x))) for x in joined
        )  # independent of their number
        made = func(*args, **kwargs)
        written = find_written(name, args, kwargs)
        for number, tensor in enumerate(iterate_tensors(made)):
            if tensor is not written:
                self._mark(tensor, hash((mark, number)))
                self.found.add(hash((mark, number)))
                if is_exact and len(list(iterate_tensors((args, kwargs)))) == 1:
                    self._exact.add(id(tensor))
        if written is not None:
            self._write(written, mark)
        return made

    def _mark(self, tensor: torch.Tensor, mark: int) -> None:
        self._marks[id(tensor)] = mark
        self._held.append(tensor)

    def _write(self, tensor: torch.Tensor, mark: int) -> None:
        """Record a write in place: change the hashes of all tensors that share the written memory."""
        self.found.add(mark)
        place = _find_memory(tensor)
        self._written[place] = hash((self._written.get(place), mark))
        self._held.append(tensor)

    def _read(self, tensor: torch.Tensor) -> int:
        mark = self._marks.get(id(tensor))
        if mark is None:
            mark = hash(("constant", str(tensor.dtype)))
        if self._written and (written := self._written.get(_find_memory(tensor))) is not None:
            return hash((mark, written))
        return mark

    def _find_place(self) -> int:
        """Return a hash of the current call stack, up to the code that made the recorded call.

        Calls of one function from different lines are thereby told apart.
        """
        place: list[int] = []
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._root:
            place += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return hash(tuple(place))

    def _describe(self, value: Any, name: str, is_exact: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._read(value)
        if value is None or isinstance(value, (bool, str, types.EllipsisType)):
            return value
        if isinstance(value, (int, float)):
            keeps = is_exact or name in _POWERS or (name in _PICKING and isinstance(value, int))
            return value if keeps else int(value > 0) - int(value < 0)
        if isinstance(value, slice):
            return (value.start, value.stop, value.step) if is_exact else "slice"
        if isinstance(value, Mapping):
            return tuple(
                (str(key), self._describe(x, name, is_exact)) for key, x in sorted(value.items())
            )
        if isinstance(value, (list, tuple)):
            if (
                value
                and not is_exact
                and name not in _PICKING
                and all(type(x) is int for x in value)
            ):
                return "sizes"
            return tuple(self._describe(x, name, is_exact) for x in value)
        return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _find_memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)
