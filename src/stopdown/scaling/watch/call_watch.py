"""Whether the exponents in a module hold for each call of it: asked before the call, by its signature.

A layer outside of all others compares the signature and the sizes of a call with those that the exponents
were found for. Other sizes are compared once, by a run without values: what is folded has to be read as it
was then (`readings`). A call of another signature, or that reads otherwise, is traced once, without
values, and the equations of its graph say what holds (`call_exponents`): the call goes on as it is; or
arguments are multiplied before it and outputs behind it; or exponents are found that hold for all
signatures, where somebody does that; or the module runs the call without its exponents, in fp32. The
exponents are put back when a call needs them.

**Catches** calls of the module and of its methods `encode` and `decode` with other optional arguments,
sizes, flags and outputs, and with other attributes, parts and code of the module; calls of a part alone;
results of unmeasured signatures that are not finite; tensors that a call puts into its caller's containers
and caches; weights that were rewritten; gradients of folded weights, and backward passes after the
exponents have changed.
**Does not catch** what `call_signatures`, `readings` and `module_settings` do not; sizes that lead code
elsewhere which asks tensors for their values; what `torch.compile` made of the module, where another
module calls it, and calls inside of other compiled code; a part that is called by `part.forward(...)`,
while another thread calls the module, or inside of compiled code; parameters that another method of the
module uses itself; weights that are written through `.data` or in inference mode, and single values of a
matrix; tensors that the module keeps in attributes for others to read.
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
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from stopdown.diagnosis import REFUSALS, is_refusal
from stopdown.errors import ScalingError, warn_user
from stopdown.interception.autocast import without_autocast
from stopdown.interception.component_locks import find_lock
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.numerics import (
    bound_values,
    has_values,
    is_readable,
    iterate_tensors,
)
from stopdown.scaling.bounds.input_limits import name_inputs
from stopdown.scaling.calls.call import (
    ComponentCall,
    HeldContainers,
    find_float_dtype,
    is_held,
    map_tensors,
)
from stopdown.scaling.calls.call_interception import (
    PartCall,
    Rank,
    find_slot,
    has_layer,
    put_layer,
    show_parts,
)
from stopdown.scaling.calls.call_signatures import list_sizes, sign_call
from stopdown.scaling.calls.callee import GENERAL_KEEPS, Callee
from stopdown.scaling.calls.entrances import BeyondError
from stopdown.scaling.calls.outermost_calls import is_plain, listen
from stopdown.scaling.folding.folds import (
    call_unmeasured,
    find_folded_parts,
    narrow,
    widen_outputs,
)
from stopdown.scaling.graph.capture import (
    add_answers,
    noting_answers,
)
from stopdown.scaling.watch.call_exponents import CallEnds
from stopdown.scaling.watch.exponent_switch import ExponentSwitch, ReplacedError
from stopdown.scaling.watch.folded_weights import FoldedWeights
from stopdown.scaling.watch.known_calls import PLAIN, Key, KnownCalls, cast_arguments, find_path
from stopdown.scaling.watch.range_notes import RangeNotes
from stopdown.scaling_records import Scaling

Extend = Callable[[ComponentCall, str], bool]
"""Finds exponents that hold for one more call, given how it differs from others, and puts them on; returns
whether it did."""

WAITING = "stopdown_weights_wait"
"""Attribute of a module whose weights wait elsewhere between calls."""

_WATCH = "stopdown_call_watch"
"""Attribute of a module under which its watch is found."""

_FILLED = "such calls put tensors into their arguments"
_NOT_FINITE = "gave values that are not finite, or other outputs"
_READ = "its code read other values, and went another way"
_WHOLE = "Call the whole component, or take the exponents off first (.undo(), or leave the guard)."
_CODE = (
    "Replace functions and parts, and put hooks on, before the plan, guard or rescaling: take it off "
    "(.undo(), or leave the guard), and make it anew."
)


@dataclass(frozen=True)
class WatchOptions:
    """Whom a watch tells, and who helps it.

    Attributes:
        name: of the component, for messages; "" for the module's class.
        extend: finds exponents for a further signature; None if nothing does.
        announce: told of each signature once that is run without exponents.
        remedy: for calls that the exponents do not hold for.
        stays: the exponents are never taken off for a call: one that they do not hold for is refused.
    """

    name: str = ""
    extend: Extend | None = None
    announce: Callable[[str], None] = warn_user
    remedy: str = (
        "Put the plan on with a guard, which finds exponents for such calls: "
        "stopdown.guard(pipe, plan)."
    )
    stays: bool = False


class _Thread(threading.local):
    """The call of an unmeasured signature that a thread makes: its watch, and what is multiplied."""

    scaled: tuple[CallWatch, CallEnds] | None = None


_thread = _Thread()


class CallWatch(SameInCopies):
    """What is before the calls of a module while exponents are folded in."""

    def __init__(
        self,
        module: torch.nn.Module,
        scaling: Scaling,
        put: Callable[[Patches], None],
        options: WatchOptions,
        *,
        casts: bool = True,
    ) -> None:
        """
        Args:
            module: as it is without the exponents.
            casts: the module is cast as well, so it runs in fp32 without its exponents.
        """
        self.module, self.scaling, self._options, self._casts = module, scaling, options, casts
        self.known = KnownCalls(module, scaling)
        self.weights = FoldedWeights(module, scaling, self._name, casts=casts)
        self.switch = ExponentSwitch(module, put, self.weights, self.known.settings, casts=casts)
        self.switch.parts = [
            PartCall(module, Callee(path, part, "forward", "part", GENERAL_KEEPS), self._enter)
            for path, part in module.named_modules()
            if path and next(part.parameters(), None) is not None
        ]
        self._own, self._slots = Patches(), set[str]()
        self._thread = threading.local()
        self._texts = _Texts(options.announce)
        self._ranges = RangeNotes(self._name, scaling, options.announce)

    @property
    def _name(self) -> str:
        return self._options.name or type(self.module).__name__

    def put_on(self, patches: Patches) -> None:
        """Fold the exponents in and watch the calls, until `patches` is undone."""
        patches.defer(self._remove)
        self.switch.switch_on()
        self._own.set_attribute(self.module, _WATCH, self)
        if "__reduce_ex__" not in vars(self.module):
            self._own.set_attribute(self.module, "__reduce_ex__", CopyHook(self.module))
        self.follow()
        callee = Callee("", self.module, "forward", "decode", GENERAL_KEEPS)
        put_layer(self.module, "forward", self._enter_whole, self._own, Rank.EXPONENTS, callee)
        for method in ("encode", "decode"):
            if callable(getattr(self.module, method, None)):
                self._put_layer(method, method)
        put_layer(self.module, "compile", self._compile, self._own, Rank.EXPONENTS)
        listen(self._meet, self._own)
        self._own.set_attribute(self.module, "_replicate_for_data_parallel", self._refuse_replicas)
        for part in find_folded_parts(self.module, self.scaling):
            self._own.set_attribute(part, "stopdown_copies", _PartCopies(self))
        show_parts(self.switch.parts)
        self.known.settings.note()

    def accept_settings(self) -> None:
        """Accept the module's present settings as those that exponents were found for."""
        self.known.settings.note()

    def take_help(self, options: WatchOptions) -> None:
        """Tell others, and be helped by them, from now on: a guard that comes or goes."""
        self._options = options
        self._texts.announce = self._ranges.announce = options.announce

    def follow(self) -> None:
        """Watch the code that calls go through now, if the module was compiled since."""
        slot = find_slot(Callee("", self.module, "forward", "call"))
        slot = "_call_impl" if slot == "forward" else slot
        if slot not in self._slots:
            self._put_layer(slot, "forward")

    def _compile(self, call: ComponentCall) -> None:
        call.proceed()
        self.follow()

    @contextlib.contextmanager
    def _meet(self, module: torch.nn.Module, method: str) -> Iterator[None]:
        """Lead the calls of the module's `torch.compile` wrapper through the watch."""
        with Patches() as layers:
            if method == "forward" and getattr(module, "_orig_mod", None) is self.module:
                put_layer(module, "forward", self._lead_now, layers, Rank.EXPONENTS)
                ends = partial(scale_ends, self.module)
                put_layer(module, "forward", ends, layers, Rank.ENDS)
            yield

    def _lead_now(self, call: ComponentCall) -> Any:
        """Make a call with the present watch, which may have replaced this one since the call began."""
        watch = find_watch(self.module)
        return call.proceed() if watch is None else watch.lead(call)

    def _put_layer(self, slot: str, method: str) -> None:
        self._slots.add(slot)
        callee = Callee(
            "", self.module, method, "decode", GENERAL_KEEPS
        )  # outputs stay as they are
        put_layer(self.module, slot, self._enter, self._own, Rank.EXPONENTS, callee)
        slot = "forward" if slot == "_call_impl" else slot  # inside of a guard
        put_layer(self.module, slot, partial(scale_ends, self.module), self._own, Rank.ENDS, callee)

    def _remove(self) -> None:
        self._own.undo()
        self._ranges.read(waits=True)
        self.switch.remove()

    def _refuse_replicas(self) -> None:
        raise ScalingError(
            f"torch.nn.DataParallel cannot copy {self._name} while it has exponents.",
            expected="The copies would compute with the weights of the first.",
            remedy="Take the exponents off first (.undo(), or leave the guard), or start a process for "
            "each device.",
        )

    def warn_of_copy(self) -> None:
        self._texts.say_once(
            f"A part of {self._name} was copied, and its weights are scaled: without the exponents of "
            "the parts around it they are those of another model. Copy it without the plan, guard or "
            "rescaling."
        )

    def check_copy(
        self, copied: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse a call of a deep copy that its exponents do not hold for: they cannot be taken off there.

        A copy without weights is of a forecast, and runs every call.
        """
        if not any(has_values(x) for x in copied.parameters()):
            return
        key = sign_call(copied, method, args, kwargs), list_sizes(copied, method, args, kwargs)
        if not self.known.holds_for_copy(key, method, args, kwargs):
            what = self.known.describe_difference(key, method)
            raise ScalingError(
                f"A copy of {self._name} was called {what}; its exponents were found for other calls.",
                expected="A copy of a planned or repaired module keeps its exponents for good.",
                remedy=f"Copy it without the plan. {self._options.remedy}",
            )

    @property
    def has_call_here(self) -> bool:
        """Whether this thread is inside of a call that the watch let through."""
        return getattr(self._thread, "is_inside", False)

    # Around a call

    def lead(self, call: ComponentCall) -> Any:
        """Make a call of code compiled from the module, in which layers do not run."""
        callee = Callee("", call.callee.owner, "forward", "decode", GENERAL_KEEPS)
        return self._enter(replace(call, callee=callee))

    def _enter(self, call: ComponentCall) -> Any:
        if self.has_call_here:
            return call.proceed()
        key = self.sign(call)
        held = HeldContainers(call)
        try:
            if key not in self.known.verdicts:
                self._judge(key, call, held)
            ends = self.known.verdicts[key]
            if ends is not None:
                is_good, output, why, key = self._call_on(key, ends, call, held)
                if is_good:
                    return output
                if why != _READ:
                    self._give_up(key, call, why)
                elif key not in self.known.verdicts:
                    self._judge(key, call, held)
            return self._call_off(key, call)
        except ReplacedError:
            return call.begin_again()

    def _call_on(
        self, key: Key, ends: CallEnds, call: ComponentCall, held: HeldContainers
    ) -> tuple[bool, Any, str, Key]:
        """Make a call with the exponents on; return whether they hold for it, its output, and why not.

        Returns:
            Last the key of the call, with the values that its code read if it reads some.
        """
        ambient = without_autocast() if self._casts else contextlib.nullcontext()
        why, answers = _NOT_FINITE, list[Any]()
        reads = self.known.reads_values(key) and is_plain()
        with self.using(is_on=True), ambient:
            self.weights.check()
            is_known = ends is PLAIN
            restores = () if is_known and not (held or reads) else self._save(call)
            try:
                with noting_answers(answers) if reads else contextlib.nullcontext():
                    is_good, output = (
                        (True, self._call_planned(call))
                        if is_known
                        else self._call_scaled(ends, call)
                    )
            except BeyondError as error:
                if not self._casts:
                    raise
                is_good, output, why = False, None, error.what.rstrip(".")
            is_filled = held.is_filled
            if is_good and reads and not self.switch.is_removed:
                key = add_answers(key[0], answers), key[1]
                if not self.known.holds_for_read(key, tuple(answers), call):
                    is_good, why = False, _READ
            if is_good and not is_filled:
                return True, self._track(call, output), "", key
            for restore in (*restores, held.restore):
                restore()
            if self.switch.is_removed:  # a guard put exponents on that are for such calls
                raise ReplacedError
        return False, None, _FILLED if is_filled and why == _NOT_FINITE else why, key

    def _call_off(self, key: Key, call: ComponentCall) -> Any:
        """Make a call with the exponents off; say so once the module has shown that it takes such calls."""
        try:
            with self.using(is_on=False):
                output = self._track(call, self._call_bare(call))
        except REFUSALS as error:
            if not (self._casts and self.known.settings.is_other_code and is_refusal(error)):
                raise
            what = self.known.describe_difference(key, call.callee.method)
            raise ScalingError(
                f"{self._name} was called {what}, and stopped at operands of two dtypes: such calls "
                "run without its exponents, in fp32.",
                expected="Code that was put on since computes in the dtype of what it is given.",
                remedy=_CODE,
            ) from error
        self._texts.say_kept(key)
        return output

    def _enter_whole(self, call: ComponentCall) -> Any:
        """Make a call of `forward` itself, which passes by the module's hooks, as one of the module."""
        if self.has_call_here or getattr(self._thread, "is_led", False):
            return call.proceed()
        self._thread.is_led = True  # what is compiled may come here again
        try:
            return self.module(*call.args, **call.kwargs)
        finally:
            self._thread.is_led = False

    def _track(self, call: ComponentCall, output: Any) -> Any:
        """Have backward passes refused that would be wrong, and say once that gradients are in fp16."""
        if not torch.is_grad_enabled() or not is_plain():
            return output
        if self.switch.is_on:
            self.weights.refuse_gradients(self.switch.patches)
        now = self.switch.changes

        def check(gradient: torch.Tensor) -> None:
            if self.switch.changes != now:
                raise ScalingError(
                    f"The exponents of {self._name} were changed or taken off between a call and its "
                    "backward pass.",
                    expected="A backward pass reads the weights that the call read.",
                    remedy="Make it before the plan, guard or rescaling is taken off, and before calls "
                    "with other arguments.",
                )

        for tensor in iterate_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(check)
        is_asked = any(x.requires_grad for x in iterate_tensors((call.args, call.kwargs)))
        if is_asked and self.weights.has_half:
            self._texts.say_once(
                f"Gradients by inputs of {self._name} are computed in fp16, which loses small ones. "
                "Multiply the loss by a power of two, such as 1024, and divide the gradients by it."
            )
        return output

    def _save(self, call: ComponentCall) -> tuple[Callable[[], object], ...]:
        device = next((x.device for x in self.module.parameters()), torch.device("cpu"))
        return call.save(self.module, device)

    def sign(self, call: ComponentCall) -> Key:
        """Return a call's signature, with settings changed since exponents were put on, and its sizes."""
        with self.switch.held():
            if not self.switch.is_used:  # what a call sets is not what leads it elsewhere
                self.known.settings.read()
            others = self.known.settings.describe()
        path = find_path(call)
        owner = call.callee.owner if path else self.module
        given = owner, call.callee.method, call.args, call.kwargs
        signature = f"{path}:{sign_call(*given)}".removeprefix(":")
        sizes = list_sizes(*given) if is_plain() else ()  # those of transformed code are no numbers
        if not others:
            return signature, sizes
        start, _, rest = signature.removesuffix(")").partition("(")
        return f"{start}({', '.join(filter(None, (rest, *others)))})", sizes

    @contextlib.contextmanager
    def using(self, *, is_on: bool) -> Iterator[None]:
        """Run a call of this thread with the exponents on or off."""
        with self.switch.using(is_on=is_on):
            self._thread.is_inside = True
            try:
                yield
            finally:
                self._thread.is_inside = False

    def _is_guarded(self, call: ComponentCall) -> bool:
        return has_layer(call.callee.owner, find_slot(call.callee), Rank.GUARD)

    def _call_planned(self, call: ComponentCall) -> Any:
        """Make a call that exponents were found for; report it once if it exceeds the measured ranges."""
        output, method = call.proceed(), call.callee.method
        is_noted = self.scaling.inputs and is_plain()
        if is_noted and not (self._is_guarded(call) or self.switch.is_removed):
            names = call.callee.argument_names
            self._ranges.note(method, name_inputs(call.args, call.kwargs, names), output)
        return output

    def _call_scaled(self, ends: CallEnds, call: ComponentCall) -> tuple[bool, Any]:
        """Make a call of an unmeasured signature; return whether it is all right, and its output."""
        if ends.inputs and len(list(_list_tensors(call))) != ends.given:
            return False, None  # others than those that were traced
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
            if not self.is_in_force:  # it was repaired: the output is that of other exponents
                return True, output
        made = {id(x): x for x in iterate_tensors(output)}
        is_known = not ends.outputs or len(made) == ends.returned
        is_unread = self._is_guarded(call) or not is_plain()
        return is_known and (is_unread or _is_finite(list(made.values()))), output

    def scale(self, ends: CallEnds, call: ComponentCall) -> Any:
        """Multiply arguments before a call, and outputs behind it."""
        given = _scale_inputs(ends, call, narrows=self._casts)
        output = call_unmeasured(self.module, given.proceed)
        there = self.scaling.outputs if call.callee.method == "forward" else {}  # by its own hook
        numbers = {*ends.outputs, *there}
        left = {n: ends.outputs.get(n, 0) - there.get(n, 0) for n in numbers}
        left = {n: x for n, x in left.items() if x}
        return widen_outputs(left, self.module, (), output) if left else output

    @property
    def is_in_force(self) -> bool:
        """Whether the exponents of this watch are on the module, put there by it or once more since."""
        watch: CallWatch | None = vars(self.module).get(_WATCH)
        return watch is not None and watch.scaling is self.scaling

    def _call_bare(self, call: ComponentCall) -> Any:
        """Make a call without the exponents; outputs that fit are cast to the dtype of the arguments."""
        if not self._casts:
            return call.proceed()
        came_as = find_float_dtype(call.named, call.keeps)
        with without_autocast():
            output = call.proceed_in(torch.float32)
        wanted = came_as or torch.float16
        return map_tensors(output, partial(narrow, wanted))

    # What holds for a signature

    def _judge(self, key: Key, call: ComponentCall, held: HeldContainers) -> None:
        """Find the verdict on calls of a new signature or new sizes.

        Args:
            held: the contents of the call's arguments, which a trace may change.
        """
        method, path = call.callee.method, find_path(call)
        args, kwargs = cast_arguments(call)
        ends = None
        if not held.has_kept_tensors:
            ends = self.known.find_ends(key, method, args, kwargs, path)
        held.restore()
        is_other_code = self.known.settings.describe()  # earlier calls would run it as well by now
        can_extend = not (path or is_other_code or held.has_objects)  # nor would a cache be as then
        if ends is None and can_extend and self._options.extend is not None:
            what = self.known.describe_difference(key, method, names_sizes=False)
            with find_lock(self.module).changing():
                if not (self.switch.is_removed or key in self.known.verdicts):
                    self._options.extend(replace(call, args=args, kwargs=kwargs), what)
            if self.switch.is_removed:
                raise ReplacedError
        with self.switch.held():
            if key not in self.known.verdicts:
                if ends is None:
                    self._give_up(key, call, "they do not hold for that")
                self.known.verdicts[key] = ends

    def _give_up(self, key: Key, call: ComponentCall, why: str) -> None:
        """Run calls of a signature and sizes without exponents from now on; it is said once one has run."""
        path, method = find_path(call), call.callee.method
        what = (
            f"`{self._name}:{path}` was called alone"
            if path
            else f"{self._name} was called {self.known.describe_difference(key, method)}"
        )
        remedy = _WHOLE if path else self._options.remedy
        remedy = _CODE if self.known.settings.is_other_code else remedy
        waits = vars(self.module).get(WAITING, False)
        if waits or self._options.stays or any(x.is_meta for x in self.module.parameters()):
            raise ScalingError(
                f"{what}; its exponents were found for other calls, and {why}.",
                expected="Its exponents stay on until they are taken off with .undo()."
                if self._options.stays
                else "Its weights are stored elsewhere between calls, so its exponents stay on.",
                remedy=remedy,
            )
        self.known.refuse(key)
        self._texts.keep(
            key,
            f"{what}; its exponents were found for other calls, and {why}. Such calls run without "
            f"exponents{', in fp32' if self._casts else ''}: correct, but slower. {remedy}",
        )


class _Texts:
    """What the user of a module is told, each text once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce, self._said = announce, set[str]()
        self._kept: dict[Key, str] = {}

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.announce(text)

    def keep(self, key: Key, text: str) -> None:
        """Say it once such a call has run."""
        self._kept[key] = text

    def say_kept(self, key: Key) -> None:
        if text := self._kept.pop(key, ""):
            self.announce(text)


def note_weights(module: torch.nn.Module) -> None:
    """Know the weights of a module that arrived after its exponents were put on."""
    watch = vars(module).get(_WATCH)
    if watch is not None:
        watch.weights.note_arrived()


@contextlib.contextmanager
def exponents_on(module: torch.nn.Module) -> Iterator[None]:
    """Keep a module's exponents on inside the block, also if its last call ran without them."""
    watch = find_watch(module)
    with contextlib.nullcontext() if watch is None else watch.using(is_on=True):
        yield


def find_watch(module: torch.nn.Module) -> CallWatch | None:
    """Return the module's present watch; another thread may have replaced exponents since a call began."""
    watch: CallWatch | None = vars(module).get(_WATCH)
    if watch is None or watch.module is not module:
        return None
    watch.follow()
    return watch


def scale_ends(module: torch.nn.Module, call: ComponentCall) -> Any:
    """Make a call with its ends multiplied as the exponents need, if its signature needs that.

    This layer is next to the module, beneath casts and a guard, so a guard keeps, repairs and compares the
    program's own values. A replay under other exponents comes here, too, and is not multiplied.
    """
    found = _thread.scaled
    if found is None or found[0].module is not module or not found[0].is_in_force:
        return call.proceed()
    _thread.scaled = None  # code that is compiled may come here again
    try:
        return found[0].scale(found[1], call)
    finally:
        _thread.scaled = found


def has_passed(module: torch.nn.Module) -> bool:
    """Return whether the module's watch, if any, let this thread's call through."""
    watch = find_watch(module)
    return watch is None or watch.has_call_here


def holds_for(module: torch.nn.Module, call: ComponentCall) -> bool:
    """Return whether a call is right, unchanged, with the exponents that are on a module now."""
    watch = find_watch(module)
    if watch is None or not watch.switch.is_on:
        return True
    return watch.known.verdicts.get(watch.sign(call)) is PLAIN


def _scale_inputs(ends: CallEnds, call: ComponentCall, *, narrows: bool = False) -> ComponentCall:
    """Multiply arguments by their exponents.

    Args:
        narrows: cast arguments to fp16 that it could not hold before.
    """
    if not ends.inputs:
        return call
    leaves, spec = pytree.tree_flatten((call.args, dict(sorted(call.kwargs.items()))))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    for number, exponent in ends.inputs.items():
        given = leaves[places[number]]
        scaled, is_beyond = given * 2.0**exponent, narrows and not is_held(given, torch.float16)
        leaves[places[number]] = narrow(torch.float16, scaled) if is_beyond else scaled
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return replace(call, args=args, kwargs=kwargs)


def _list_tensors(call: ComponentCall) -> Iterator[torch.Tensor]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    yield from (x for x in leaves if isinstance(x, torch.Tensor))


def _is_finite(tensors: list[torch.Tensor]) -> bool:
    """Return whether all readable values are finite. Cost: a host read."""
    bounds = bound_values([x for x in tensors if is_readable(x)])
    return bounds is None or bool(bounds.isfinite().all())


@dataclass
class CopyHook:
    """In the place of a module's `__reduce_ex__`: deep copies of it check their calls.

    A deep copy has the exponents and casts of the module, and one of these of its own.
    """

    module: torch.nn.Module

    def __call__(self, protocol: Any) -> Any:
        kind = type(self.module)
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            return self.pickle(protocol)
        made: tuple[Any, ...] = cast(Any, kind.__reduce_ex__(self.module, protocol))
        make, args, state, *rest = made
        watch: CallWatch | None = vars(self.module).get(_WATCH)
        hooks, with_kwargs = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
        if watch is not None and _WATCH not in state[hooks]:
            stacks = {name: state[name] for name in ("encode", "decode") if name in state}
            state = {
                **state,
                **{
                    name: _CopiedMethod(watch, x.stopdown_stack.original)
                    for name, x in stacks.items()
                },
                hooks: OrderedDict({_WATCH: _CopyCheck(watch), **state[hooks]}),
                with_kwargs: OrderedDict({_WATCH: True, **state[with_kwargs]}),
            }
        return (make, args, state, *rest)

    def pickle(self, protocol: Any) -> Any:
        return type(self.module).__reduce_ex__(self.module, protocol)


@dataclass(frozen=True)
class _CopyCheck(SameInCopies):
    watch: CallWatch

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.watch.check_copy(module, "forward", args, kwargs)


class _CopiedMethod:
    """In the place of a copy's `encode` or `decode`, which no pre-hook sees."""

    def __init__(self, watch: CallWatch, method: Any) -> None:
        functools.update_wrapper(self, method)
        self._watch, self._method = watch, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.check_copy(self._method.__self__, self._method.__name__, args, kwargs)
        return self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopiedMethod:
        return _CopiedMethod(self._watch, copy.deepcopy(self._method, memo))


@dataclass
class _PartCopies:
    """An attribute of parts that hold scaled weights: says once that somebody copies one of them alone."""

    watch: CallWatch

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        if id(self.watch.module) not in memo:
            self.watch.warn_of_copy()


def watch_calls(
    module: torch.nn.Module,
    scaling: Scaling,
    put: Callable[[Patches], None],
    patches: Patches,
    options: WatchOptions | None = None,
    *,
    casts: bool = True,
) -> None:
    """Put exponents on a module so that they are off for calls that they do not hold for.

    Args:
        put: folds them in and casts the module; its patches take them off.
        patches: take all of it off.
        casts: the module is cast as well, so it runs in fp32 without its exponents.
    """
    if scaling.exponents or scaling.multiplies or scaling.eps or scaling.outputs:
        CallWatch(module, scaling, put, options or WatchOptions(), casts=casts).put_on(patches)
    else:
        put(patches)
