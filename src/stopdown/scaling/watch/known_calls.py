"""Remember for which calls a module's folded exponents hold, by signature and sizes.

Calls for which exponents were solved are known to hold. A call with other sizes is run once without
values: it has to read the folded tensors in the same way (`readings`). A call with another signature,
or that reads them otherwise, is traced once. The equations of its graph then show what must be
multiplied at its ends, if that suffices.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.fake_tensors.fake_modules import detach_derived
from stopdown.fold_names import name_parameters, split_fold_name
from stopdown.module_calls.answers import strip_answers
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.call_signatures import Sizes, resize_call
from stopdown.module_calls.module_code import CODE_WORDS
from stopdown.module_calls.module_settings import ModuleSettings
from stopdown.module_calls.step_caches import in_full
from stopdown.number_formats import list_some
from stopdown.scaling.folding.folds import restrict_scaling
from stopdown.scaling.graph.capture import Answers, read_call
from stopdown.scaling.graph.module_copies import copy_module
from stopdown.scaling.trials.measurement import Captures, capture_answered, cut_sizes
from stopdown.scaling.watch.call_exponents import CallEnds
from stopdown.scaling.watch.call_exponents import find_ends as find_call_ends
from stopdown.scaling_records import Scaling

PLAIN = CallEnds()
"""Verdict that the exponents hold for a call whose arguments and outputs aren't multiplied."""

_MOST_ANSWERS = 8
_MOST_SAID = 8


@dataclass
class _Kind:
    """Whether the exponents hold for calls of one signature, and the sizes that were examined.

    Attributes:
        ends: how the arguments and outputs of such calls are multiplied; None if the exponents don't
            hold.
        sizes: sizes of the calls whose graphs were examined.
        marks: hashes of how these read the folded tensors; None until other sizes occur.
        is_read: False if that can't be determined without values.
    """

    ends: CallEnds | None
    sizes: list[Sizes]
    marks: frozenset[int] | None = None
    is_read: bool = True


Key = tuple[str, Sizes]
"""Signature and sizes of a call."""


class KnownCalls:
    """Decides whether a module's folded exponents hold for a call, and remembers it.

    Attributes:
        settings: settings of the module, which are copied to the module that is traced.
        verdicts: maps a signature and sizes to how arguments and outputs are multiplied; None if the
            exponents don't hold.
    """

    def __init__(self, module: torch.nn.Module, scaling: Scaling) -> None:
        """Record the calls for which a scaling was solved as those for which it holds.

        Args:
            module: the module without exponents.
            scaling: the exponents.
        """
        self._scaling, self.settings = scaling, ModuleSettings(module)
        self._kinds = {
            x: _Kind(PLAIN, list(scaling.shapes[x]))
            for x in scaling.signatures
            if x in scaling.shapes
        }
        self.verdicts: dict[Key, CallEnds | None] = {
            (name, sizes): PLAIN for name, kind in self._kinds.items() for sizes in kind.sizes
        }
        self._of_copies: dict[Key, CallEnds | None] = {}
        self._reading = Counter[str]()  # base signature to the number of answers that held
        for name, kind in list(self._kinds.items()):
            if (base := strip_answers(name)) != name:
                self._reading[base] = 0
                self._kinds.setdefault(base, _Kind(PLAIN, [])).sizes.extend(kind.sizes)
                self.verdicts |= {(base, sizes): PLAIN for sizes in kind.sizes}
        self._skeleton = _copy_without_weights(module)
        dtypes = (x.dtype for x in module.parameters() if x.is_floating_point())
        self._dtype = next(dtypes, torch.float16)

    def reads_values(self, key: Key) -> bool:
        """Return whether the code of calls with this signature reads tensor values as Python numbers
        (`.item()`).

        Its path may then differ from call to call.
        """
        return key[0] in self._reading

    def refuse(self, key: Key) -> None:
        """Remember that the scale exponents don't hold for calls with this signature and sizes."""
        self.verdicts[key] = None
        kind = self._kinds.get(key[0])
        if kind is None or kind.sizes in ([], [key[1]]):  # so not for other sizes either
            self._kinds[key[0]] = _Kind(None, [])

    def holds_for_copy(self, key: Key, call: ComponentCall) -> bool:
        """Return whether a call of a module's deep copy, which has the same scale exponents for good, is
        right unchanged.

        Args:
            key: signature and sizes of the call.
        """
        if key not in self._of_copies:
            self._of_copies[key] = self.verdicts.get(key) or self.find_ends(key, call)
        ends = self._of_copies[key]
        return ends is not None and ends.is_plain

    def holds_for_read(self, key: Key, answers: Answers, call: ComponentCall) -> bool:
        """Return whether the scale exponents hold for a call whose Python code branched on tensor values.

        Args:
            key: signature and sizes of the call, with the values.
            answers: the values.

        Cost: a capture for values that were not read before, up to `_MOST_ANSWERS` times per signature.
        If values never changed the path by then, later ones are assumed not to.
        """
        if key in self.verdicts:
            return self.verdicts[key] is not None
        base = strip_answers(key[0])
        if self._reading[base] >= _MOST_ANSWERS:
            return True
        ends = self.trace(cast_arguments(call), answers=answers)
        if ends is None or not ends.is_plain:
            return False
        self._reading[base] += 1
        self.verdicts[key] = ends
        return True

    def find_ends(self, key: Key, call: ComponentCall) -> CallEnds | None:
        """Return the powers of two for a call's arguments and outputs; None if the exponents can't hold
        for it.

        Args:
            key: signature and sizes of the call.
            call: the call with the casts to fp16 that the module gets (`cast_arguments`).

        Cost: a run without values for new sizes that read folded tensors as others of the signature
        did; else a capture.
        """
        signature, sizes = key
        kind = self._kinds.get(signature)
        if kind is None:
            ends = self.trace(call)
            self._kinds[signature] = _Kind(ends, [sizes])
            return ends
        if kind.ends is None or not sizes:
            return kind.ends
        marks = self._read(kind, call)
        if marks is None or (kind.marks is not None and marks <= kind.marks):
            return kind.ends
        ends = self.trace(call, is_short=False)
        if ends is not None and (ends.inputs, ends.outputs) == (
            kind.ends.inputs,
            kind.ends.outputs,
        ):
            kind.sizes.append(sizes)
            kind.marks = (kind.marks or frozenset()) | marks
        return ends

    def _read(self, kind: _Kind, call: ComponentCall) -> frozenset[int] | None:
        """Record, without tensor values, how a call uses the weights that are scaled; None if its code
        needs values.

        Return hashes of how the code reads them (`read_call`). On the first call of a signature, calls of
        the sizes that the plan examined are recorded too. A later call with other hashes takes another
        branch.
        """
        skeleton = self._prepare()
        if skeleton is None or not kind.is_read:
            return None
        part = skeleton.get_submodule(find_path(call))
        function, method = call.callee.bind(part), call.callee.method
        blocked = {bare for bare, place in map(split_fold_name, self._scaling.exponents) if place}

        def read(args: Any, kwargs: Any) -> frozenset[int] | None:
            given = self._empty(args, kwargs)
            return read_call(function, given[0], given[1], torch.float16, blocked)

        marks = read(call.args, call.kwargs)
        if marks is not None and kind.marks is None:
            resized = (resize_call(part, method, call.args, call.kwargs, x) for x in kind.sizes)
            found = [read(*x) for x in resized if x is not None]
            kind.marks = frozenset().union(*(x for x in found if x is not None)) if found else None
        kind.is_read = marks is not None
        return marks

    def _prepare(self) -> torch.nn.Module | None:
        """Return the copy of the module without weights, with its present settings.

        Return None if the module can't be copied, or runs other code now.
        """
        if self._skeleton is not None and not self.settings.is_other_code:
            self.settings.set_on(self._skeleton)
            return self._skeleton
        return None

    def _empty(self, *arguments: Any) -> Any:
        """Return arguments on `meta`, with fp16 tensors in the dtype of the module's weights."""

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            dtype = self._dtype if tensor.dtype == torch.float16 else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device="meta")

        return pytree.tree_map_only(torch.Tensor, empty, arguments)

    def trace(
        self, call: ComponentCall, *, is_short: bool = True, answers: Answers = ()
    ) -> CallEnds | None:
        """Trace a call and find, from its graph's equations, the powers of two for its arguments and
        outputs.

        Return None if the exponents can't hold, or if the call can't be traced.

        Args:
            is_short: trace only the first frames of a video, if possible.
            answers: tensor values that its code read.
        """
        skeleton = self._prepare()
        if skeleton is None:
            return None
        path = find_path(call)
        scaling = restrict_scaling(self._scaling, path) if path else self._scaling
        part = skeleton.get_submodule(path)
        whole = call.callee.bind(part), *self._empty(call.args, call.kwargs)
        short = cut_sizes(whole) if is_short else whole
        for one in (short, whole) if short is not whole else (whole,):
            with contextlib.suppress(Exception):  # model code may raise anything
                if answers:
                    capture = capture_answered(one, scaling.stream, answers)
                else:
                    capture = Captures().take(one, scaling.stream)
                return find_call_ends(part, scaling, capture, *one[1:])
        return None  # such calls can't be checked

    def describe_difference(self, key: Key, method: str, *, names_sizes: bool = True) -> str:
        """Describe how a call differs from the nearest known one: `with hidden=True, without mask[2d]`,
        or `with sizes 1x16, 4`.

        Args:
            key: signature and sizes of the call.
            names_sizes: list the sizes if only they differ.
        """
        signature, sizes = key
        if signature in self._scaling.signatures and names_sizes:
            return f"with sizes {', '.join('x'.join(map(str, x)) for x in sizes if x)} ({method})"
        if signature in self._scaling.signatures:
            return f"with other sizes ({method})"
        parts = _list_parts(signature)
        known = [x for x in self._scaling.signatures if x.startswith(f"{method}(")]
        if not known:
            return f"as {signature}"
        nearest = min(map(_list_parts, known), key=lambda x: len(x ^ parts))
        added = sorted(parts - nearest)
        code = [f"with {x}" for x in added if x.startswith(CODE_WORDS)]  # may be one for each layer
        said = [f"with {x}" for x in added if not x.startswith(CODE_WORDS)]  # as many attributes
        said += [f"without {x}" for x in sorted(nearest - parts)]
        texts = filter(None, (list_some(said, _MOST_SAID), list_some(code)))
        return f"{', '.join(texts) or 'otherwise'} ({method})"


def _copy_without_weights(module: torch.nn.Module) -> torch.nn.Module | None:
    """Copy a module with its weights on `meta`, so that calls can be traced on it; None if it can't be
    copied.
    """
    memo = detach_derived(module)
    for tensor in name_parameters(module).values():
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(empty, False) if is_parameter else empty
    try:
        with in_full(module):
            return copy_module(module, memo)
    except Exception:  # a module may hold anything
        return None


def cast_arguments(call: ComponentCall) -> ComponentCall:
    """Return a call with the casts to fp16 that the arguments of a component in fp16 get."""
    collect = lambda *args, **kwargs: (args, kwargs)  # noqa: E731 - in the place of the component
    args, kwargs = replace(call, below=collect).proceed_in(torch.float16)
    return replace(call, args=args, kwargs=kwargs)


def find_path(call: ComponentCall) -> str:
    """Return the path of the submodule that a call calls directly, not through its parent; "" for the
    whole module.
    """
    return call.callee.component_name if call.callee.stage == "part" else ""


def _list_parts(signature: str) -> set[str]:
    inner = signature.partition("(")[2].removesuffix(")")
    return {*re.split(r", (?![^\[]*\])", inner)} - {""}  # not inside a list
