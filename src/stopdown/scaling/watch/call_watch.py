"""Check, before each call of a module with folded exponents, whether they hold for a call like that.

An outermost layer compares the signature and sizes of a call with those for which the exponents were
solved. Other sizes are compared once, by a run without values: folded tensors have to be read in the
same way (`readings`). A call with another signature, or that reads otherwise, is traced once without
values. The equations of its graph decide (`call_exponents`): the call proceeds unchanged; or arguments
are multiplied before it and outputs after it; or it is refused. A guard then repairs the module, as
after any fault, and the call is repeated. Without a guard an error is raised.

**Catches** calls of the module and of its methods `encode` and `decode` with other optional arguments,
sizes, flags and outputs, and with other attributes, parts and code of the module; calls of a part
alone; non-finite results of unmeasured signatures; tensors that a call stores in its caller's
containers and caches; weights that were rewritten; gradients of folded weights, and backward passes
after the exponents have changed.

**Does not catch** what `call_signatures`, `readings` and `module_settings` do not; sizes that change
the path of code that reads tensor values; what `torch.compile` made of the module, if another module
calls it, and calls inside other compiled code; a part that is called by `part.forward(...)`, while
another thread calls the module, or inside compiled code; parameters that another method of the module
uses itself; weights that are written through `.data` or in inference mode, and single values of a
matrix; tensors that the module stores in attributes for others to read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.utils import _pytree as pytree

from stopdown.errors import ScalingError, warn_user
from stopdown.fold_names import RESCALED, find_folded_parts
from stopdown.interception.autocast import without_autocast
from stopdown.interception.component_locks import find_lock
from stopdown.interception.patches import (
    Patches,
    SameInCopies,
    call_while_alive,
    refuse_pickling,
)
from stopdown.module_calls.adapter_layers import find_reader, is_read_by_libraries
from stopdown.module_calls.answers import add_answers
from stopdown.module_calls.call import ComponentCall, are_finite, stays_finite
from stopdown.module_calls.call_interception import (
    PartCall,
    Rank,
    find_code,
    find_slot,
    has_layer,
    hide_parts,
    put_layer,
    show_parts,
)
from stopdown.module_calls.call_signatures import list_argument_sizes, sign_call
from stopdown.module_calls.callee import GENERAL_KEEPS, Callee
from stopdown.module_calls.entrances import BeyondError, ReplacedError
from stopdown.module_calls.kept_state import HeldContainers
from stopdown.module_calls.outermost_calls import is_plain, listen
from stopdown.module_calls.step_caches import clear_caches
from stopdown.number_formats import list_some
from stopdown.numerics import has_values, iterate_tensors
from stopdown.scaling.folding.adapters import AdapterFolds
from stopdown.scaling.folding.folds import (
    call_unmeasured,
    narrow_if_exact,
    widen_outputs,
)
from stopdown.scaling.graph.capture import noting_answers
from stopdown.scaling.watch.call_exponents import CallEnds
from stopdown.scaling.watch.folded_weights import FoldedWeights
from stopdown.scaling.watch.known_calls import PLAIN, Key, KnownCalls, cast_arguments, find_path
from stopdown.scaling_records import Scaling


@dataclass(frozen=True)
class Refusal:
    """A call for which the exponents don't hold, as it is passed to `WatchOptions.repair`.

    Attributes:
        call: the call with its original arguments, but without NaN and Inf, which no exponents fix.
        what: how it differs from the calls for which exponents were solved.
        is_traceable: whether exponents may be solved for it and the earlier calls together.
        path: path of the part that was called alone, for which no other exponents exist; "" for the
            whole module.

    Examples:
        >>> module = torch.nn.Linear(4, 4)
        >>> call = ComponentCall(Callee("denoiser", module, "forward", "denoise"), (torch.ones(1, 4),))
        >>> def repair(refusal):  # for `WatchOptions`, which would take the exponents off
        ...     print(refusal.call.callee.name, refusal.what)
        >>> repair(Refusal(call, "its code changed", is_traceable=True))
        denoiser its code changed
    """

    call: ComponentCall
    what: str
    is_traceable: bool
    path: str = ""


Repair = Callable[[Refusal], None]
"""Replaces or removes the module's exponents so that a refused call is right, or leaves them."""


_WATCH = "stopdown_call_watch"
"""Attribute of a module that holds its `CallWatch`."""

_NO_SOLUTION = "they don't hold for that"
_FILLED = "such calls put tensors into their arguments"
_NOT_FINITE = "it returned values that aren't finite, or other outputs"
_READ = "its code read other values, and went another way"
_WHOLE = "Call the whole component, or take the exponents off first (.undo(), or leave the guard)."
_CODE = (
    "Replace functions and parts, and put hooks on, before the plan, guard or rescaling: take it off "
    "(.undo(), or leave the guard), and put it on again."
)


@dataclass(frozen=True)
class WatchOptions:
    """Reports and repairs of a watch.

    Attributes:
        name: component name in messages; "" for the module's class.
        repair: receives a `Refusal`, and replaces or removes the module's exponents: then the call is made
            again. If it leaves them, or is None, a `ScalingError` is raised.
        announce: receives each message for the user once.
        remedy: what a user can do about refused calls.

    Examples:
        >>> WatchOptions(name="denoiser", announce=print).repair is None  # calls that don't fit raise
        True
    """

    name: str = ""
    repair: Repair | None = None
    announce: Callable[[str], None] = warn_user
    remedy: str = (
        "Put the plan on with a guard, which repairs such calls: stopdown.guard(pipe, plan), or "
        "quantization(SOURCE, guard=True)."
    )


class _Thread(threading.local):
    """Per-thread state: the present call's watch, and the powers of two for its arguments and outputs.

    `scaled` is None if the call needs none.
    """

    scaled: tuple[CallWatch, CallEnds] | None = None


_thread = _Thread()


class CallWatch(SameInCopies):
    """Checks each call of a rescaled module, and scales, repairs or refuses it if exponents don't hold.

    `rescale_` puts one on; `CallWatch.watch` does so for exponents from elsewhere.

    Args:
        module: the module, before the exponents are folded in.
        scaling: the exponents.
        options: names, messages and repairs.
        casts: whether the module is cast as well.

    Attributes:
        options: may be replaced, when a guard comes or goes.
        known: finds out for which calls the exponents hold; `known.settings.note` accepts the module's
            present attributes and code.
        weights: finds changed weights; `weights.note` accepts the present ones.

    Raises:
        ScalingError: from a call for which the exponents don't hold, if no repair is given.

    Cost: for each call a comparison of its signature and sizes. A new signature is traced (seconds), new
    sizes are run on tensors without values.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> CallWatch.find(module) is None
        True
        >>> rescaling = rescale_(module, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        >>> watch = CallWatch.find(module)
        >>> watch.scaling.exponents
        {'0.weight': -7}
        >>> rescaling.undo()
        >>> CallWatch.find(module) is None
        True
    """

    def __init__(
        self,
        module: torch.nn.Module,
        scaling: Scaling,
        options: WatchOptions,
        *,
        casts: bool = True,
    ) -> None:
        """Prepare to check a module's calls; `put_on` starts."""
        self.module, self.scaling, self.options, self._casts = module, scaling, options, casts
        self.known = KnownCalls(module, scaling)
        self.weights = FoldedWeights(module, scaling, self._name, casts=casts)
        self._parts = [
            PartCall(module, Callee(path, part, "forward", "part", GENERAL_KEEPS), self._enter)
            for path, part in module.named_modules()
            if path and next(part.parameters(), None) is not None
        ]
        self.is_removed = False
        self._own, self._slots = Patches(), set[str]()
        self._thread, self._said = threading.local(), set[str]()

    @classmethod
    def watch(
        cls,
        module: torch.nn.Module,
        scaling: Scaling,
        put: Callable[[Patches], None],
        patches: Patches,
        options: WatchOptions | None = None,
        *,
        casts: bool = True,
    ) -> None:
        """Put scale exponents on a module, and refuse or repair calls for which they don't hold.

        Args:
            put: folds the exponents in and casts the module; its patches undo that.
            patches: undoes everything.
            options: names and repairs.
            casts: whether the module is cast as well.
        """
        if scaling.exponents or scaling.multiplies or scaling.eps or scaling.outputs:
            cls(module, scaling, options or WatchOptions(), casts=casts).put_on(put, patches)
        else:
            put(patches)

    @staticmethod
    def find(module: torch.nn.Module) -> CallWatch | None:
        """Return the watch that checks a module's calls; None if the module has no folded exponents.

        Another thread may have replaced it since a call began.
        """
        watch: CallWatch | None = vars(module).get(_WATCH)
        if watch is None or watch.module is not module:
            return None
        watch.follow()
        return watch

    @staticmethod
    def scale_ends(module: torch.nn.Module, call: ComponentCall) -> Any:
        """Make a call, and multiply its arguments and outputs by powers of two if its signature needs that.

        This layer is next to the module, inside casts and a guard. So a guard stores, repairs and compares
        the caller's unscaled values. A replay with other exponents passes through here too, and is not
        multiplied. Adapters are scaled here, before code that may be compiled.
        """
        if isinstance(folds := vars(module).get(RESCALED), AdapterFolds):
            folds.follow()
        found = _thread.scaled
        if found is None or found[0].module is not module or not found[0].is_in_force:
            return call.proceed()
        _thread.scaled = None  # code that is compiled may come here again
        try:
            return found[0].scale(found[1], call)
        finally:
            _thread.scaled = found

    @property
    def _name(self) -> str:
        return self.options.name or type(self.module).__name__

    def put_on(self, put: Callable[[Patches], None], patches: Patches) -> None:
        """Fold the scale exponents in and start to check the module's calls, until `patches` is undone.

        Args:
            put: folds the exponents in and casts the module; its patches undo that.
        """
        patches.defer(self._remove)
        put(self._own)
        self.weights.note()
        self.weights.refuse_loading(self._own)
        clear_caches(self.module)  # they may have another scale or dtype
        if any(find_code(x) for x in self.module.modules()):
            torch.compiler.reset()  # compiled without these hooks
        self._own.set_attribute(self.module, _WATCH, self)
        lock = find_lock(self.module)
        self._own.set_attribute(lock, "begin", call_while_alive(self._prepare_calls))
        self._own.set_attribute(lock, "end", call_while_alive(self._finish_calls))
        self.follow()
        callee = Callee("", self.module, "forward", "decode", GENERAL_KEEPS)
        put_layer(self.module, "forward", self._enter_whole, self._own, Rank.EXPONENTS, callee)
        for method in ("encode", "decode"):
            if callable(getattr(self.module, method, None)):
                self._put_layer(method, method)
        put_layer(self.module, "compile", self._compile, self._own, Rank.EXPONENTS)
        listen(self._intercept_wrapper, self._own)
        self._own.set_attribute(self.module, "_replicate_for_data_parallel", self._refuse_replicas)
        for part in find_folded_parts(self.module, self.scaling.exponents):
            if part is not self.module:
                self._own.defer(part.register_state_dict_pre_hook(self._notice_reading).remove)
            self._own.set_attribute(part, "__reduce_ex__", _CopyHook(part, self))
        show_parts(self._parts)
        self.known.settings.note()

    def follow(self) -> None:
        """Check calls of compiled code as well, if the module has been compiled since the checks began."""
        slot = find_slot(Callee("", self.module, "forward", "call"))
        slot = "_call_impl" if slot == "forward" else slot
        if slot not in self._slots:
            self._put_layer(slot, "forward")

    def _compile(self, call: ComponentCall) -> None:
        call.proceed()
        self.follow()

    @contextlib.contextmanager
    def _intercept_wrapper(self, module: torch.nn.Module, method: str) -> Iterator[None]:
        """Check a call of another module, made inside the block, if that is the `torch.compile` wrapper
        of this module.
        """
        with Patches() as layers:
            if method == "forward" and getattr(module, "_orig_mod", None) is self.module:
                put_layer(module, "forward", self._check_wrapper_call, layers, Rank.EXPONENTS)
                ends = partial(self.scale_ends, self.module)
                put_layer(module, "forward", ends, layers, Rank.ENDS)
            yield

    def _check_wrapper_call(self, call: ComponentCall) -> Any:
        """Make a call of the `torch.compile` wrapper through the module's current watch, which may not
        be this one.
        """
        watch = self.find(self.module)
        return call.proceed() if watch is None else watch.lead(call)

    def _put_layer(self, slot: str, method: str) -> None:
        self._slots.add(slot)
        # outputs stay as they are
        callee = Callee("", self.module, method, "decode", GENERAL_KEEPS)
        put_layer(self.module, slot, self._enter, self._own, Rank.EXPONENTS, callee)
        slot = "forward" if slot == "_call_impl" else slot  # inside of a guard
        put_layer(
            self.module, slot, partial(self.scale_ends, self.module), self._own, Rank.ENDS, callee
        )

    def _remove(self) -> None:
        """Take the scale exponents off the module; calls that wait for its lock are made again from the
        start.
        """
        self.is_removed = True
        hide_parts(self._parts)
        if changed := self.weights.list_changed():
            self._say_once(
                f"{list_some(changed)} of {self._name} had exponents as they were rewritten. The exponents "
                "come off now, so these weights are divided by powers of two that they never had. Load the "
                "pipeline again."
            )
        self._own.undo()

    def _refuse_replicas(self) -> None:
        raise ScalingError(
            f"torch.nn.DataParallel can't copy {self._name} while it has exponents.",
            expected="The copies would compute with the weights of the first.",
            remedy="Take the exponents off first (.undo(), or leave the guard), or start a process for "
            "each device.",
        )

    def _notice_reading(self, part: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse to have Diffusers begin another model with the weights of a part (a state dict pre-hook).

        Warn once if anybody else reads the state dict of a part by itself.
        """
        if prefix or keep_vars or is_read_by_libraries():
            return
        if find_reader().startswith("diffusers.models."):
            raise ScalingError(
                f"Another model was to be made of weights of {self._name}, which are scaled.",
                expected="Without the exponents of all parts they are those of another model. Diffusers "
                "takes them for ControlNets and motion models (`from_unet`, `from_unet2d`).",
                remedy="Make the other model first. Or take the plan, guard or rescaling off (`.undo()`, "
                "or leave the guard), or load the component without it.",
            )
        self.warn_of_copy()

    def warn_of_copy(self) -> None:
        self._say_once(
            f"A part of {self._name} was copied, and its weights are scaled: without the exponents of "
            "the parts around it they are those of another model. Copy it without the plan, guard or "
            "rescaling."
        )

    def check_copy(
        self,
        copied: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "forward",
    ) -> None:
        """Refuse a call of a deep copy of the module for which its scale exponents don't hold; they
        can't be removed there.

        A copy without weights computes no values, and may make any call. For `forward`, this is a pre-hook
        of the copy.
        """
        if not any(has_values(x) for x in copied.parameters()):
            return
        given = copied, method, args, kwargs
        key = sign_call(*given), list_argument_sizes(*given)
        call = ComponentCall(Callee("", copied, method, "decode"), args, kwargs)
        if not self.known.holds_for_copy(key, call):
            what = self.known.describe_difference(key, method)
            raise ScalingError(
                f"A copy of {self._name} was called {what}; its exponents were found for other calls.",
                expected="A copy of a planned or repaired module keeps its exponents for good.",
                remedy=f"Copy it without the plan. {self.options.remedy}",
            )
        self.weights.check_copy(copied)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.options.announce(text)

    @property
    def has_call_here(self) -> bool:
        """Whether this thread is inside a call of the module that was checked and let through."""
        return getattr(self._thread, "is_inside", False)

    # Around a call

    def lead(self, call: ComponentCall) -> Any:
        """Make a call of the module's compiled code, after the check that the exponents hold for it.

        No interception layer inside compiled code would make this check.
        """
        callee = Callee("", call.callee.owner, "forward", "decode", GENERAL_KEEPS)
        return self._enter(replace(call, callee=callee))

    def _enter(self, call: ComponentCall) -> Any:
        if self.has_call_here:
            return call.proceed()
        try:
            with self._calling():
                return self._call(call)
        except ReplacedError:
            return call.begin_again()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Hold the module's lock for a call of this thread, so that a guard changes the module only
        between calls.

        Raises:
            ReplacedError: if the exponents were removed while the call waited.
        """
        with find_lock(self.module).calling():
            if self.is_removed:
                raise ReplacedError
            self._thread.is_inside = True
            try:
                yield
            finally:
                self._thread.is_inside = False

    def _prepare_calls(self) -> None:
        """Prepare the module for the first of several concurrent calls: read its settings, stop
        checking calls of parts.

        While the module runs, its own calls of parts need no check.
        """
        if not self.is_removed:
            hide_parts(self._parts)
            self.known.settings.read()

    def _finish_calls(self) -> None:
        """Resume checking direct calls of the module's parts, once the last of several concurrent calls
        has ended.

        Attributes that the calls changed are accepted as the module's own.
        """
        if not self.is_removed:
            show_parts(self._parts)
            self.known.settings.note()

    def _call(self, call: ComponentCall) -> Any:
        """Make a call if the scale exponents hold for it; otherwise have a guard repair the module, or
        raise an error.

        Raises:
            ReplacedError: if a repair has replaced or removed the exponents, so that the call must be
                repeated.
            ScalingError: if they don't hold for the call.
        """
        key, held, answers = self.sign(call), HeldContainers((call.args, call.kwargs)), list[Any]()
        ends = self._find_ends(key, call, held)
        ambient = without_autocast() if self._casts else contextlib.nullcontext()
        reads = self.known.reads_values(key) and is_plain()
        why = _NOT_FINITE
        with ambient:
            self.weights.check()
            is_known = ends is PLAIN
            restores = call.save(self.module) if is_plain() else ()
            try:
                with noting_answers(answers) if reads else contextlib.nullcontext():
                    is_good, output = (
                        (True, call.proceed()) if is_known else self._call_scaled(ends, call)
                    )
            except BeyondError as error:
                if self.options.repair is None:
                    raise
                is_good, output, why = False, None, error.what.rstrip(".")
            is_filled = held.is_filled
            if is_good and reads and not self.is_removed:
                key = add_answers(key[0], answers), key[1]
                if not self.known.holds_for_read(key, tuple(answers), call):
                    is_good, why = False, _READ
            if is_good and not is_filled:
                return self._track(call, output)
            for restore in (*restores, held.restore):
                restore()
        if self.is_removed:  # a guard applied others for such calls
            raise ReplacedError
        return self._refuse(key, call, _FILLED if is_filled and why == _NOT_FINITE else why, held)

    def _enter_whole(self, call: ComponentCall) -> Any:
        """Make a direct call of `forward`, which would bypass the module's hooks, as a call of the
        module itself.
        """
        if self.has_call_here or getattr(self._thread, "is_led", False):
            return call.proceed()
        self._thread.is_led = True  # compiled code may reenter
        try:
            return self.module(*call.args, **call.kwargs)
        finally:
            self._thread.is_led = False

    def _track(self, call: ComponentCall, output: Any) -> Any:
        """Register hooks on a call's output that raise in backward passes that would be wrong; return
        the output.

        Warn once if gradients are computed in fp16.
        """
        if not torch.is_grad_enabled() or not is_plain():
            return output
        if not self.is_removed:
            self.weights.refuse_gradients(self._own)

        def check(gradient: torch.Tensor) -> None:
            if self.is_removed:
                raise ScalingError(
                    f"The exponents of {self._name} were changed or taken off between a call and its "
                    "backward pass.",
                    expected="A backward pass reads the weights that the call read.",
                    remedy="Make it before the plan, guard or rescaling is taken off, and before calls "
                    "that a guard repairs.",
                )

        for tensor in iterate_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(check)
        is_asked = any(x.requires_grad for x in iterate_tensors((call.args, call.kwargs)))
        if is_asked and self.weights.has_half:
            self._say_once(
                f"Gradients with respect to inputs of {self._name} are computed in fp16, which loses "
                "small ones. Multiply the loss by a power of two, such as 1024, and divide the gradients "
                "by it."
            )
        return output

    def sign(self, call: ComponentCall) -> Key:
        """Return a call's signature and sizes; exponents are known to hold for calls with equal ones.

        Settings of the module that changed since the plan are part of the signature.
        """
        others = self.known.settings.describe()
        path = find_path(call)
        owner = call.callee.owner if path else self.module
        given = owner, call.callee.method, call.args, call.kwargs
        signature = f"{path}:{sign_call(*given)}".removeprefix(":")
        is_sized = is_plain()  # sizes in transformed code aren't integers
        sizes = list_argument_sizes(*given) if is_sized else ()
        if not others:
            return signature, sizes
        start, _, rest = signature.removesuffix(")").partition("(")
        return f"{start}({', '.join(filter(None, (rest, *others)))})", sizes

    def _call_scaled(self, ends: CallEnds, call: ComponentCall) -> tuple[bool, Any]:
        """Make a call whose signature wasn't measured; return whether its output is right and finite,
        and the output.

        Args:
            ends: powers of two for the call's arguments and outputs.
        """
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        if ends.inputs and sum(isinstance(x, torch.Tensor) for x in leaves) != ends.given:
            return False, None  # not those that were traced
        if find_path(call):
            is_half = torch.float16 in {x.dtype for x in call.callee.owner.parameters()}
            given = _scale_inputs(ends, call)
            output = given.proceed_in(torch.float16 if is_half else torch.float32)
            if ends.outputs:
                output = widen_outputs(ends.outputs, self.module, (), output)
        else:
            before, _thread.scaled = _thread.scaled, (self, ends)
            try:
                output = call.proceed()
            finally:
                _thread.scaled = before
            if not self.is_in_force:  # repaired: the output has other exponents
                return True, output
        made = {id(x): x for x in iterate_tensors(output)}
        is_known = not ends.outputs or len(made) == ends.returned
        is_guarded = has_layer(call.callee.owner, find_slot(call.callee), Rank.GUARD)
        is_unread = is_guarded or not is_plain()
        is_right = is_unread or are_finite(output) or not call.is_given_finite
        return is_known and is_right, output

    def scale(self, ends: CallEnds, call: ComponentCall) -> Any:
        """Make a call with arguments multiplied by powers of two, and outputs divided by theirs.

        Args:
            ends: powers of two for the call's arguments and outputs.
        """
        given = _scale_inputs(ends, call, narrows=self._casts)
        output = call_unmeasured(self.module, given.proceed)
        there = self.scaling.outputs if call.callee.method == "forward" else {}  # by its own hook
        numbers = {*ends.outputs, *there}
        left = {n: ends.outputs.get(n, 0) - there.get(n, 0) for n in numbers}
        left = {n: x for n, x in left.items() if x}
        return widen_outputs(left, self.module, (), output) if left else output

    @property
    def is_in_force(self) -> bool:
        """Whether the module has the scale exponents that this object checks calls for, even if applied
        again since.
        """
        watch: CallWatch | None = vars(self.module).get(_WATCH)
        return watch is not None and watch.scaling is self.scaling

    def holds_for(self, call: ComponentCall) -> bool:
        """Return whether a call is right, unchanged, with the scale exponents that the module has now."""
        return self.is_removed or self.known.verdicts.get(self.sign(call)) is PLAIN

    # What holds for a signature

    def _find_ends(self, key: Key, call: ComponentCall, held: HeldContainers) -> CallEnds:
        """Return the powers of two for a call's arguments and outputs, by its signature and sizes;
        refuse it without any.

        Results are cached.

        Args:
            key: the call's signature and sizes.
            held: contents of the call's arguments, which are restored after a trace.
        """
        known = self.known.verdicts
        if key not in known:
            with find_lock(self.module).changing():
                if key not in known and not self.is_removed:
                    ends, given = None, cast_arguments(call)
                    if not held.has_kept_tensors:
                        ends = self.known.find_ends(key, given)
                    held.restore()
                    known[key] = ends
            if self.is_removed:
                raise ReplacedError
        if (ends := known[key]) is None:
            self._refuse(key, call, _NO_SOLUTION, held)
        return ends

    def _refuse(self, key: Key, call: ComponentCall, why: str, held: HeldContainers) -> NoReturn:
        """Have a guard repair the module for a call for which its scale exponents don't hold, or raise
        an error.

        Args:
            key: the call's signature and sizes.
            why: end of the error's first sentence.
            held: contents of the call's arguments.

        Raises:
            ReplacedError: if the module was repaired, so that the call must be repeated.
            ScalingError: if not.
        """
        path, method, settings = find_path(call), call.callee.method, self.known.settings
        self.known.refuse(key)
        if (repair := self.options.repair) is not None:
            # replays of earlier calls would run the other code, with another cache
            is_other = bool(settings.describe()) or held.has_objects
            what = "alone"
            if not path:
                what = self.known.describe_difference(key, method, names_sizes=False)
            refusal = Refusal(
                call.bring_to_finite(),
                what,
                is_traceable=why in (_NO_SOLUTION, _READ, _NOT_FINITE) and not is_other,
                path=path,
            )
            with find_lock(self.module).changing():
                if not self.is_removed:
                    repair(refusal)
            if self.is_removed:
                raise ReplacedError
        what = (
            f"`{self._name}:{path}` was called alone"
            if path
            else f"{self._name} was called {self.known.describe_difference(key, method)}"
        )
        remedy = _WHOLE if path else self.options.remedy
        raise ScalingError(
            f"{what}; its exponents were found for other calls, and {why}.",
            expected="Its exponents stay on until they are taken off with .undo()."
            if repair is None or path
            else "The guard found no exponents for such calls, and couldn't cast the component.",
            remedy=_CODE if settings.is_other_code and (path or repair is None) else remedy,
        )


def _scale_inputs(ends: CallEnds, call: ComponentCall, *, narrows: bool = False) -> ComponentCall:
    """Return a call with its arguments multiplied by powers of two.

    Args:
        ends: powers of two by index of the argument tensor.
        narrows: cast those arguments to fp16 that would have overflowed in it before.
    """
    if not ends.inputs:
        return call
    leaves, spec = pytree.tree_flatten((call.args, dict(sorted(call.kwargs.items()))))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    for number, exponent in ends.inputs.items():
        given = leaves[places[number]]
        scaled = given * 2.0**exponent
        is_beyond = narrows and not stays_finite(given, torch.float16)
        leaves[places[number]] = narrow_if_exact(torch.float16, scaled) if is_beyond else scaled
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return replace(call, args=args, kwargs=kwargs)


@dataclass
class _CopyHook:
    """Replacement of `__reduce_ex__` of a scaled module and of its parts: refuses pickling, and has a deep
    copy of the module check its calls as well.

    A deep copy has the exponents and casts of the module. Copying a part without the whole module causes a
    warning, once.

    Attributes:
        watch: checks the module's calls; None in a copy.
    """

    module: torch.nn.Module
    watch: CallWatch | None

    def __call__(self, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            refuse_pickling()
        if isinstance(folds := vars(self.module).get(RESCALED), AdapterFolds):
            with find_lock(self.module).changing():
                folds.release()  # the copy's are scaled there
        made: tuple[Any, ...] = cast(Any, type(self.module).__reduce_ex__(self.module, protocol))
        make, args, state, *rest = made
        watch = self.watch
        if watch is not None and watch.module is self.module:
            hooks, with_kwargs = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
            methods = {
                name: _CopiedMethod(watch, state[name].stopdown_stack.original)
                for name in ("encode", "decode")
                if name in state
            }
            state = {
                **state,
                **methods,
                hooks: OrderedDict({_WATCH: watch.check_copy, **state[hooks]}),
                with_kwargs: OrderedDict({_WATCH: True, **state[with_kwargs]}),
            }
        return (make, args, state, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopyHook:
        if self.watch is not None and id(self.watch.module) not in memo:
            self.watch.warn_of_copy()
        return _CopyHook(copy.deepcopy(self.module, memo), None)


class _CopiedMethod:
    """Replacement of `encode` or `decode` in a deep copy of a scaled module, which checks each call.

    Pre-hooks don't intercept these methods.
    """

    def __init__(self, watch: CallWatch, method: Any) -> None:
        functools.update_wrapper(self, method)
        self._watch, self._method = watch, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.check_copy(self._method.__self__, args, kwargs, self._method.__name__)
        return self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopiedMethod:
        return _CopiedMethod(self._watch, copy.deepcopy(self._method, memo))
