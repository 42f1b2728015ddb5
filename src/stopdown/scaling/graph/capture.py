"""Capture one call of a module as a graph, with the dtype, module path and parameter name of every node.

Everything else of the core reads such a graph instead of the model's code. The call is traced by
`torch.export` (non-strict) on a copy of the module whose parameters are fake tensors, in the dtype in which
the module will run. So no weight is read or copied, and a model too large for this machine can be captured
as well. Each node has the dtype that its result will really have: only those in fp16 are bounded by 65504.
Regions under autocast or `no_grad` are higher-order nodes in such a graph; they are inlined. Code that
reads tensor values (`mask.sum().tolist()`, `if x.any():`) is first run for real or, without weights, with
the values that follow from the arguments alone. Its questions and answers are recorded, and tracing replays
the answers. The tensors asked for become outputs of the graph, so that it contains everything that decides
the path.

Not covered: sizes that depend on data (`x[mask]`), tensors that a module makes once inside `forward`
and caches, custom kernels: they raise `CaptureError` with the line of code. Sizes are those of the
call: another resolution or length needs another capture, and so do other answers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx._symbolic_trace import _Patcher
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown.component_call_names import is_inside
from stopdown.errors import WARNINGS_IGNORED, CaptureError, ignoring_warnings
from stopdown.fake_tensors.argument_values import ArgumentValues, find_known, set_known
from stopdown.fake_tensors.capture_failures import describe_failure, name_class
from stopdown.fake_tensors.fake_modules import find_mode, make_like, mark_as_parameter, renew_fakes
from stopdown.fold_names import name_parameters
from stopdown.interception.module_paths import ModulePaths
from stopdown.interception.own_dtypes import list_own_dtypes, set_own_dtypes
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import kept_random
from stopdown.interception.tracing import CALLS_REPLACED
from stopdown.module_calls.answers import OF_TEST, add_answers
from stopdown.module_calls.call_signatures import Sizes, list_argument_sizes, sign_call
from stopdown.module_calls.kept_state import KeptGlobals
from stopdown.module_calls.mixed_dtypes import NO_OPERANDS, cast_operands, find_operands
from stopdown.number_formats import list_some
from stopdown.numerics import has_values, iterate_tensors
from stopdown.operations import read_calls
from stopdown.scaling.graph.captured_regions import inline_regions
from stopdown.scaling.graph.light_tracing import light_tracing
from stopdown.scaling.graph.mixed_operands import find_mixed_norms, find_mixed_operands
from stopdown.scaling.graph.module_copies import copy_module
from stopdown.scaling.graph.readings import Readings
from stopdown.scaling.graph.repeated_modules import CallObserver, Note, Repeats
from stopdown.scaling_records import Operands

PREFIX = "component"
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

Answers = tuple[tuple[str, Any], ...]
"""Tensor values that a call's code turned into Python numbers, in order: name of the read and result,
`("item", 7)`."""


@dataclass(frozen=True)
class Capture:
    """One component call as a flat graph of ATen operations.

    Attributes:
        graph: placeholders are parameters, buffers and constants first, then the call's tensors.
        dtype: dtype of the module's floating parameters in the graph.
        parameters: maps each placeholder name to the name of the parameter or buffer; tied ones have
            one name.
        constants: maps each placeholder name to a tensor that the code made while it was traced, or to
            a random number generator among the arguments.
        inputs: placeholder names of the call's tensors, in the order of `flatten_call`.
        kept_buffers: buffers that the capture left in their own dtype.
        component: class name of the module.
        single_outputs: paths of the modules that return one tensor in all of their calls.
        method: called method, such as `decode`; "" for the module itself.
        answers: tensor values that the code read, and that may decide its path.
        outputs: number of tensors that the call returns. Further outputs of the graph are those whose
            values were read.
        replaceable: buffers and parameters that the code ignores in calls of another size, for which
            it computes new ones.
        operands: inputs that are cast and parameters kept in fp32 because the code mixes dtypes.
        signature: signature of the call, as in `sign_call`.
        keeps_clamps: whether the code clamps at fp16's maximum in fp32 as well.
        sizes: sizes of the call's arguments, as in `list_argument_sizes`.

    Examples:
        >>> capture = capture_call(torch.nn.Linear(4, 2), (torch.ones(1, 4),), dtype=torch.float16)
        >>> capture.component, capture.dtype, sorted(capture.parameters.values())
        ('Linear', torch.float16, ['bias', 'weight'])
    """

    graph: GraphModule
    dtype: torch.dtype
    parameters: Mapping[str, str]
    constants: Mapping[str, Any]
    inputs: tuple[str, ...]
    kept_buffers: frozenset[str]
    component: str
    single_outputs: frozenset[str]
    method: str
    answers: Answers
    outputs: int
    replaceable: frozenset[str]
    operands: Operands
    signature: str = ""
    keeps_clamps: bool = False
    sizes: Sizes = ()


def capture_call(
    call: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype,
    wide: frozenset[str] = frozenset(),
    answers: Answers | None = None,
    operands: Operands | None = None,
) -> Capture:
    """Capture one call of a module, or of its bound method, as the graph of a run in `dtype`.

    Args:
        call: a module, or a bound method of one. Its weights may be real, fake or on `meta`.
        args, kwargs: arguments of the call. Floating tensors in the module's dtype count as tensors in
            `dtype`. Only shapes and dtypes of tensors matter.
        dtype: floating dtype of the module's weights in the graph, such as `torch.float16`.
        wide: names of parameters and buffers to keep in fp32.
        answers: results for the tensor values that the code reads; None records them here if needed.
        operands: inputs to cast and parameters to keep in fp32 for code that mixes dtypes; None finds
            them here.

    Returns:
        The graph, flat, of ATen operations, with the names of weights and inputs. The module is unchanged.

    Raises:
        CaptureError: if the code can't be traced; the error shows the line at fault. Or `call` is neither
            a module nor a bound method of one.

    Cost: seconds for a large model, on tensors without values. Code that reads values is also run once
    on its own weights.

    Examples:
        >>> module = torch.nn.Linear(4, 2)
        >>> capture = capture_call(module, (torch.ones(1, 4),), dtype=torch.float16)
        >>> [node.name for node in capture.graph.graph.nodes][-2:]
        ['linear', 'output']
    """
    failure: CaptureError | None = None
    first = _Attempt(call, args, dict(kwargs or {}), dtype, wide, operands)
    drawn, found = kept_random(first.owner, args, kwargs or {}), None
    with WARNINGS_IGNORED, drawn, _quiet_fakes(first.owner) as left:  # one thread at a time
        for attempt in _list_attempts(first, answers):
            try:
                found = _export(attempt)
                break
            except CaptureError as error:
                failure = failure or error
    if left:
        raise CaptureError(
            f"{type(first.owner).__name__} can't be captured as a graph: its code keeps tensors in "
            f"{list_some(left)}, outside of the module.",
            expected="Another call would read them there, with other exponents or none.",
            remedy="Make them in each call, or keep them as buffers of the module.",
        )
    if found is not None:
        return found
    assert failure is not None
    raise failure


def find_call_operands(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype,
) -> Operands:
    """Find the casts that a call needs because its code mixes dtypes in one operation, without
    capturing it.

    Args:
        dtype: dtype in which the module will run.

    Cost: one run on fake tensors.
    """
    with _quiet_fakes(owner_of(call)):
        return _ShadowCall(_Attempt(call, args, dict(kwargs or {}), dtype)).find_operands()


def read_call(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    blocked: Collection[str] = (),
) -> frozenset[int] | None:
    """Record how a call uses its parameters and arguments, as a set of hashes that two calls can be
    compared by.

    A hash is that of a torch function call and of how its inputs were computed (`readings`). Return
    None if the code fails on tensors without values, for example because it reads some.

    Args:
        dtype: dtype in which the module will run.
        blocked: names of tensors whose rows or columns are scaled by different powers of two.

    Cost: one run on fake tensors.
    """
    try:
        with _quiet_fakes(owner_of(call)):
            return _ShadowCall(_Attempt(call, args, dict(kwargs), dtype)).read(blocked)
    except Exception:  # model code may raise anything
        return None


def _list_attempts(first: _Attempt, answers: Answers | None) -> Iterator[_Attempt]:
    """Yield ways to capture a call, cheapest first; the caller tries the next one if tracing fails."""
    yield first
    yield replace(first, keeps_buffers=False)
    if _has_weights(first.owner):
        yield replace(first, is_real=True)
    if answers is None:
        with contextlib.suppress(Exception):  # a failing call has none; report that
            answers = note_answers(first.call, first.args, first.kwargs)
    if answers is not None:
        yield replace(first, answers=answers)
        yield replace(first, answers=answers, keeps_buffers=False)


@contextlib.contextmanager
def noting_answers(found: list[tuple[str, Any]]) -> Iterator[None]:
    """Append to `found` each tensor value that this thread's code turns into a Python number inside the
    block.

    Examples are `.item()` and `if x.any():`. Entries are pairs of the function's name and its result.

    Cost: a check of each torch function that is called.
    """
    with _Notes() as notes:
        yield
    found += notes.found


def note_answers(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Answers:
    """Run a call, and return the tensor values that its code turns into Python numbers, for tracing to
    replay.

    A module without weights runs on fake tensors. Its code then gets the values that follow from the
    arguments alone, and fails if it reads others.

    Cost: one forward of the module as it is.
    """
    owner, notes = owner_of(call), _Notes()
    if not _has_weights(owner):
        dtype = own_dtype(owner) or torch.float32
        _ShadowCall(_Attempt(call, args, dict(kwargs), dtype)).ask(notes)
    else:
        with torch.no_grad(), kept_random(owner, args, kwargs), notes:
            call(*args, **kwargs)
    return tuple(notes.found)


def _has_weights(module: torch.nn.Module) -> bool:
    weights = name_parameters(module).values()
    return not any(isinstance(x, FakeTensor) or x.is_meta for x in weights)


def owner_of(call: Callable[..., Any]) -> torch.nn.Module:
    """Return the module of a call: the module itself, or the owner of a bound method.

    Raises:
        CaptureError: if the call is neither.
    """
    owner = call if isinstance(call, torch.nn.Module) else getattr(call, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        raise CaptureError(
            f"{call!r} is neither a module nor a bound method of one.",
            remedy="Pass the module itself, or for example vae.decode.",
        )
    return owner


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments, nested ones included: positional ones first, then
    keywords by name.
    """
    leaves, _ = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def sign_capture(capture: Capture) -> str:
    """Return a hash of a captured call's operations, constants and argument signature, to recognise an
    equal graph.

    The weights' values don't count.
    """
    made = hashlib.sha256(repr((capture.parameters, capture.answers, capture.operands)).encode())
    for node in capture.graph.graph.nodes:
        target = node.target if isinstance(node.target, str) else str(node.target)
        made.update(repr((node.name, target, node.args, node.kwargs, module_path(node))).encode())
    for name, constant in capture.constants.items():
        made.update(name.encode())
        if isinstance(constant, torch.Tensor) and has_values(constant):
            values = constant.detach().cpu().contiguous().view(-1).view(torch.uint8)
            made.update(values.numpy().tobytes())
    return f"{made.hexdigest()} {capture.signature}"


def module_path(node: Node) -> str:
    """Return the path of the innermost module whose code computed a node; "" for the captured module
    itself.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix(PREFIX).removeprefix(".")


def module_classes(node: Node) -> list[str]:
    """Return the class names of the modules whose `forward` was running at a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [name_class(entry[1]) for entry in stack.values()]


@dataclass(frozen=True)
class _Attempt:
    """Options for one attempt at capturing a call; those not listed are arguments of `capture_call`.

    Attributes:
        answers: results for the tensor values that the code reads; None if it may read none.
        is_real: copy the module with its real weights, not with fake ones.
        keeps_buffers: leave buffers outside the checkpoint in their own dtype.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    wide: frozenset[str] = frozenset()
    operands: Operands | None = None
    answers: Answers | None = None
    is_real: bool = False
    keeps_buffers: bool = True

    @property
    def owner(self) -> torch.nn.Module:
        return owner_of(self.call)


class _Notes(TorchFunctionMode):
    """Torch function mode that records each tensor value that code reads as a Python number, or replays
    a record.

    If code tests only in fp16 whether an activation is NaN or Inf, to clamp it (LDMBert), the replayed
    result is that it is finite: scaling keeps it so.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.asked: list[torch.Tensor] = []
        self._left = None if answers is None else list(answers)
        self._tests: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _list_questions():
            return self._follow_test(func.__name__, args, func(*args, **(kwargs or {})))
        if self._left is not None:
            return self._answer(func.__name__, args)
        answer = func(*args, **(kwargs or {}))
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("stopdown."):
            return answer  # a guard reads it, not the model's code
        if func is torch.Tensor.tolist:  # on a fake tensor it reads items one by one
            self.found += [("item", x) for x in args[0].flatten().tolist()]
        else:
            self.found.append((self._name(func.__name__, args), answer))
        return answer

    def _follow_test(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """Remember what a test such as `isinf(x).any()` returns if all values are finite, for later
        replays.

        Scaling keeps values finite, so code that reads the test's result in a replay has to get that one.

        Args:
            name: name of the torch function that was called.
            result: its result, which is returned unchanged.
        """
        tested = [self._tests.get(id(x)) for x in args if isinstance(x, torch.Tensor)]
        known = [x[1] for x in tested if x is not None]
        if name in _TESTS:
            says = _TESTS[name]
        elif name in _JOINED_TESTS and known and len(known) == len(tested):
            says = _JOINED_TESTS[name](known)
        else:
            return result
        self._tests[id(result)] = result, says
        return result

    def _name(self, question: str, args: tuple[Any, ...]) -> str:
        return f"{question}{OF_TEST}" if id(args[0]) in self._tests else question

    def _answer(self, asked: str, args: tuple[Any, ...]) -> Any:
        assert self._left is not None
        question = self._name(asked, args)
        noted, answer = self._left[0] if self._left else ("nothing more", None)
        if noted == question:
            self.asked += [x for x in args if isinstance(x, torch.Tensor)]
            del self._left[0]
            return answer
        if question == asked:
            raise CaptureError(f"The code asks for {question} where a real run asked for {noted}.")
        return self._tests[id(args[0])][1]


_TESTS = {"isinf": False, "isnan": False, "isfinite": True}
_JOINED_TESTS: Mapping[str, Callable[[list[bool]], bool]] = {
    **dict.fromkeys(("any", "__or__", "logical_or", "bitwise_or"), any),
    **dict.fromkeys(("all", "__and__", "logical_and", "bitwise_and"), all),
    **dict.fromkeys(("__invert__", "logical_not", "bitwise_not"), lambda x: not x[0]),
}
"""Results of combined tests for NaN and Inf, from those of the single tests for finite values."""


@functools.cache
def _list_questions() -> frozenset[Any]:
    """Return the torch functions and methods that turn a tensor's values into Python numbers, such as
    `item`.
    """
    return frozenset(
        getattr(owner, name)
        for name in read_calls().asks
        for owner in (torch, torch.Tensor)
        if hasattr(owner, name)
    )


class _TracedData(TorchFunctionMode):
    """Torch function mode that replaces `x.data`, which tracing misses, by `x.detach()`, which is traced.

    Both share the storage. Tracing records neither the getter nor later writes through its result, such
    as into a table of positions that is made in `forward` (torch 2.13.0, 2026-11-22).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_DATA:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


class _Call(torch.nn.Module):
    """Wraps a call as a module whose only inputs are its tensors, as `torch.export` needs; the rest is
    fixed.
    """

    def __init__(
        self,
        component: torch.nn.Module,
        method: str,
        leaves: list[Any],
        spec: Any,
        answers: Answers | None,
        count: Callable[[int], None],
    ):
        super().__init__()
        self.component, self._answers = component, answers
        self._method, self._leaves, self._spec = method, leaves, spec
        self._count = count  # export resets attributes set while tracing

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        call = getattr(self.component, self._method) if self._method else self.component
        notes = _Notes(self._answers)
        with _TracedData(), contextlib.nullcontext() if self._answers is None else notes:
            output = call(*args, **kwargs)
        if any(isinstance(x, Iterator) for x in pytree.tree_leaves(output)):
            raise TypeError("it returns a generator, whose values can't be seen")
        found = {id(x): x for x in iterate_tensors(output)}
        self._count(len(found))
        return (*found.values(), *notes.asked)


def _export(attempt: _Attempt) -> Capture:
    """Capture a call; if its code mixes dtypes in one operation, capture it again with the casts that
    it needs.
    """
    try:
        capture = _ShadowCall(attempt).export()
        mixed = find_mixed_operands(capture.graph) or find_mixed_norms(capture.graph)
        failure = None
    except CaptureError as error:
        capture, mixed, failure = None, [], error
    if not mixed and capture is not None:
        return capture
    if attempt.operands is None and (found := _ShadowCall(attempt).find_operands()):
        return _export(replace(attempt, operands=found))
    if capture is None:
        assert failure is not None
        raise failure
    if capture.kept_buffers and find_mixed_operands(capture.graph):
        raise CaptureError(
            f"{capture.component}:{module_path(mixed[0])} mixes dtypes when the buffers "
            f"{', '.join(sorted(capture.kept_buffers))} keep theirs.",
            expected="A matrix product and a convolution take operands of one dtype.",
        )
    return capture


class _ShadowCall:
    """One call of a weightless copy of a module, to be traced or run without touching the original."""

    def __init__(self, attempt: _Attempt) -> None:
        self._module, self._attempt = attempt.owner, attempt
        self._method = "" if attempt.call is self._module else getattr(attempt.call, "__name__", "")
        self._mode, own = find_mode(self._module), own_dtype(self._module)
        if own is None or attempt.dtype in list_own_dtypes(self._module):
            own = attempt.dtype  # partly cast: called in its authors' dtypes
        self._shadow, self._kept = _make_shadow(attempt, self._mode)
        leaves, spec = pytree.tree_flatten((attempt.args, dict(sorted(attempt.kwargs.items()))))
        self._given = tuple(
            make_like(x, attempt.dtype if x.dtype == own else x.dtype, self._mode, attempt.is_real)
            for x in leaves
            if isinstance(x, torch.Tensor)
        )
        self._counts: list[int] = []
        self._traced = _Call(
            self._shadow, self._method, leaves, spec, attempt.answers, self._counts.append
        ).eval()

    @property
    def _named(self) -> tuple[torch.nn.Module, str, tuple[Any, ...], dict[str, Any]]:
        """Module, method name and arguments of the call."""
        return (
            self._module,
            self._method or "forward",
            self._attempt.args,
            self._attempt.kwargs,
        )

    def read(self, blocked: Collection[str]) -> frozenset[int]:
        """Run the call and return the hashes of its torch function calls, to compare with another
        call's (`readings`).

        Args:
            blocked: names of tensors whose rows or columns are scaled by different powers of two.
        """
        patches = Patches()  # never undone: the copy is discarded
        paths = ModulePaths(self._shadow, patches)
        readings = Readings(paths, _ShadowCall.read.__code__, blocked)
        for name, tensor in name_parameters(self._shadow).items():
            readings.name(tensor, "parameter", name)
        for number, tensor in enumerate(self._given):
            readings.name(tensor, "input", number)
        with WARNINGS_IGNORED, torch.no_grad(), ignoring_warnings(Warning), self._mode, readings:
            outputs = self._traced(*self._given)
        readings.note_outputs(list(outputs))
        return frozenset(readings.found)

    def ask(self, notes: _Notes) -> None:
        """Run the call on fake tensors, so that `notes` records the tensor values that its code reads.

        Values are known where they follow from the arguments alone.
        """
        given = iter(self._given)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda _: next(given),
            (self._attempt.args, dict(sorted(self._attempt.kwargs.items()))),
        )
        for fake, value in zip(
            self._given, flatten_call(self._attempt.args, self._attempt.kwargs), strict=True
        ):
            set_known(fake, find_known(value))
        call = getattr(self._shadow, self._method) if self._method else self._shadow
        fakes = contextlib.ExitStack()
        with WARNINGS_IGNORED, torch.no_grad(), ignoring_warnings(Warning), fakes:
            for mode in (self._mode, ArgumentValues(), notes):
                fakes.enter_context(mode)
            call(*args, **kwargs)

    def find_operands(self) -> Operands:
        """Find the casts that bring the operands of each operation in the call to one dtype."""
        fakes = contextlib.nullcontext() if self._attempt.is_real else self._mode
        with WARNINGS_IGNORED, torch.no_grad(), ignoring_warnings(Warning), fakes:
            return find_operands(lambda: self._traced(*self._given), self._shadow)

    def export(self) -> Capture:
        """Trace the call with `torch.export`, and return the graph with what is known of its nodes.

        Raises:
            CaptureError: if the code can't be traced.
        """
        notes: list[Note] = []
        _watch_outputs(self._shadow, notes)
        _watch_tables(self._shadow, self._kept, notes)
        with (
            _alone_in_thread(),
            torch.no_grad(),
            ignoring_warnings(Warning),
            _quiet_logs(),
            light_tracing(),
        ):
            try:
                program = self._trace(notes)
            except Exception as error:
                raise describe_failure(error, self._module) from error
            graph, parameters, constants, inputs = _read_program(program, self._module)
            _refuse_lost_vmap(constants, self._module)
            _leave_out_fakes(graph, constants, self._module)
            holders = (x for x in graph.graph.nodes if x.op == "placeholder" and x.users)
            used = {parameters[x.name] for x in holders if x.name in parameters}
            replaceable = _find_replaceable(self._shadow, _list_calls(notes), used, self._mode)
        singles = _list_singles(notes)
        return Capture(
            graph=graph,
            dtype=self._attempt.dtype,
            parameters=parameters,
            constants=constants,
            inputs=tuple(inputs),
            kept_buffers=self._kept,
            component=type(self._module).__name__,
            single_outputs=singles,
            method=self._method,
            answers=self._attempt.answers or (),
            outputs=self._counts[-1],
            replaceable=replaceable,
            operands=self._attempt.operands or NO_OPERANDS,
            signature=add_answers(sign_call(*self._named), self._attempt.answers or ()),
            sizes=list_argument_sizes(*self._named),
        )

    def _trace(self, notes: list[Note]) -> Any:
        """Export the call, copying nodes of repeated blocks; if that fails, trace every block."""
        export = functools.partial(torch.export.export, self._traced, self._given, strict=False)
        if self._attempt.answers is not None or self._attempt.is_real:
            return export()
        repeats = Repeats(self._shadow, notes)
        try:
            with repeats.copying():
                return export()
        except Exception:
            if not repeats.copied:
                raise
        notes.clear()
        self._counts.clear()
        return export()


def _watch_outputs(shadow: torch.nn.Module, notes: list[Note]) -> None:
    """Register hooks on the copy that record, for each module call, whether it returns one tensor.

    Modules with several names, such as an activation that all layers share, are left out: a hook on one
    acts in all of its places.
    """
    names = Counter(id(x) for _, x in shadow.named_modules(remove_duplicate=False))

    def is_single(args: Any, output: Any) -> bool:
        return isinstance(output, torch.Tensor)

    patches = Patches()  # never undone: the copy is discarded
    for path, module in shadow.named_modules():
        if names[id(module)] == 1:
            hook = CallObserver(path, "output", is_single, notes)
            patches.defer(module.register_forward_hook(hook).remove)


def _list_singles(notes: Sequence[Note]) -> frozenset[str]:
    """Return the paths of the modules that returned one tensor in every call, so that their output can
    be multiplied.
    """
    outputs = [(watch.path, single) for watch, single in notes if watch.kind == "output"]
    return frozenset(path for path, _ in outputs) - {path for path, single in outputs if not single}


_Calls = dict[str, tuple[Any, ...]]
"""Maps each module path to the arguments of the module's last call, with `_Shaped` for tensors."""


@dataclass(frozen=True)
class _Shaped:
    """Shape and dtype of a tensor among a call's arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _watch_tables(shadow: torch.nn.Module, kept: frozenset[str], notes: list[Note]) -> None:
    """Register hooks that record the arguments of modules with tables (position embeddings and the like).

    Such a module may read another table, or compute one, if sizes differ; `_find_replaceable` finds out by
    calling it again. It has floating buffers of its own outside `kept`, or floating parameters if it is
    not a layer of torch.

    Args:
        kept: names of the buffers that keep their dtype.
        notes: list to which the hooks append.
    """

    def shape(args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda x: _Shaped(tuple(map(int, x.shape)), x.dtype), (args, kwargs)
        )

    patches = Patches()  # never undone: the copy is discarded
    for path, module in shadow.named_modules():
        names = [name for name, _ in _list_tables(module)]
        if any(f"{path}.{name}".strip(".") not in kept for name in names):
            hook = CallObserver(path, "table", shape, notes)
            patches.defer(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _list_calls(notes: Sequence[Note]) -> _Calls:
    return {watch.path: call for watch, call in notes if watch.kind == "table"}


def _list_tables(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_buffers(recurse=False)]
    if not type(module).__module__.startswith("torch.nn."):
        named += module.named_parameters(recurse=False)
    return [(name, x) for name, x in named if x.is_floating_point()]


def _find_replaceable(
    shadow: torch.nn.Module, calls: _Calls, used: Collection[str], mode: FakeTensorMode
) -> frozenset[str]:
    """Find position tables and the like that a module ignores once a dimension of its arguments doubles
    or halves.

    An example is a table of positions that is learned for one number of frames and computed for others:
    a factor folded into it would be lost then. Of modules that are alike, only one is tried. Parameters
    of the captured module itself are never tried.

    Args:
        calls: arguments of each module's last call, by path.
        used: names of the parameters that the captured call reads.
    """
    found: set[str] = set()
    known: dict[Any, frozenset[str]] = {}
    for path, call in calls.items():
        module = shadow.get_submodule(path)
        tables = {
            id(x): name for name, x in _list_tables(module) if path or name in module._buffers
        }
        tables = {x: name for x, name in tables.items() if f"{path}.{name}".strip(".") in used}
        key = type(module), _read_settings(module), _sign(call), frozenset(tables.values())
        if tables and key not in known:
            known[key] = _find_unread(module, call, tables, mode)
        found.update(f"{path}.{name}".strip(".") for name in (known[key] if tables else ()))
    return frozenset(found)


_Plain = bool | int | float | str | None


def _sign(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key that is equal for calls with alike arguments; objects are alike only to themselves."""
    leaves, spec = pytree.tree_flatten(call)
    return spec, *(x if isinstance(x, _Shaped | _Plain) else id(x) for x in leaves)


def _read_settings(module: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((name, x) for name, x in vars(module).items() if isinstance(x, _Plain))


def _find_unread(
    module: torch.nn.Module, call: tuple[Any, ...], tables: Mapping[int, str], mode: FakeTensorMode
) -> frozenset[str]:
    """Return the names of a module's tables that it ignores in a call with some other size.

    Nothing may be folded into such a table, as that would be lost at the other size.

    Args:
        call: positional and keyword arguments of a call, with `_Shaped` for tensors.
        tables: maps the ids of the module's tables to their names.
    """
    found: set[str] = set()
    for other in _list_resized(call):
        read = _Read()
        eager = torch.compiler.set_stance("force_eager")  # flex attention would compile each size
        with contextlib.suppress(Exception), eager, mode, read:  # most sizes can't change alone
            args, kwargs = pytree.tree_map_only(
                _Shaped, lambda x: torch.empty(x.shape, dtype=x.dtype), other
            )
            module.forward(*args, **kwargs)
            found.update(tables[x] for x in tables.keys() - read.seen)
    return frozenset(found)


def _list_resized(call: tuple[Any, ...]) -> Iterator[Any]:
    """Yield variants of a call's arguments, each with one dimension of one tensor doubled or halved."""
    leaves, spec = pytree.tree_flatten(call)
    for number, leaf in enumerate(leaves):
        shape = leaf.shape if isinstance(leaf, _Shaped) else ()
        for dim, size in enumerate(shape):
            for other in (2 * size, *([size // 2] if size > 1 else [])):
                resized = (*shape[:dim], other, *shape[dim + 1 :])
                others = [*leaves[:number], replace(leaf, shape=resized), *leaves[number + 1 :]]
                yield pytree.tree_unflatten(others, spec)


class _Read(TorchFunctionMode):
    """Torch function mode that records the ids of tensors whose values are used, not only their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            given = pytree.tree_leaves((args, kwargs))
            self.seen.update(id(x) for x in given if isinstance(x, torch.Tensor))
        return result


def _make_shadow(attempt: _Attempt, mode: FakeTensorMode) -> tuple[torch.nn.Module, frozenset[str]]:
    """Copy a module for tracing, with fake parameters (real ones if `is_real`) in the dtypes that an
    attempt asks for.

    Return the copy, and the names of the buffers left in their own dtype.
    """
    module, dtype, operands = attempt.owner, attempt.dtype, attempt.operands or NO_OPERANDS
    wide = {*attempt.wide, *operands.fp32_parameters}
    kept = find_kept_buffers(module) if attempt.keeps_buffers else frozenset[str]()
    named = name_parameters(module)
    memo = renew_fakes(module, mode, {id(tensor) for tensor in named.values()})
    for name, tensor in named.items():
        wanted = dtype if tensor.is_floating_point() and name not in kept else tensor.dtype
        wanted = torch.float32 if name in wide else wanted
        made = make_like(tensor, wanted, mode, attempt.is_real)
        if isinstance(tensor, torch.nn.Parameter):
            made = mark_as_parameter(made)
        memo[id(tensor)] = made
    try:
        shadow = copy_module(module, memo)
    except Exception as error:
        raise describe_failure(error, module) from error
    patches = Patches()  # never undone: the copy is discarded
    cast_operands(shadow, operands, dtype, patches)
    set_own_dtypes(shadow, list_own_dtypes(module), dtype, patches)
    return shadow, kept


def find_kept_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of fp32 or float64 buffers that aren't saved in checkpoints, and so aren't cast
    to fp16.

    They are tables that the code computes (rotary frequencies, positions), which have to stay exact: in
    16 bits, positions would coincide. Loading doesn't cast them either.
    """
    saved = module.state_dict(keep_vars=True)
    return frozenset(
        name
        for name, buffer in module.named_buffers()
        if buffer.dtype in (torch.float32, torch.float64) and name not in saved
    )


def own_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's first floating parameter; None if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _read_program(
    program: Any, module: torch.nn.Module
) -> tuple[GraphModule, dict[str, str], dict[str, Any], list[str]]:
    """Return an exported program's graph, flattened, and the meaning of its placeholders.

    Returns:
        The graph; parameter names and constants by placeholder name; names of the inputs' placeholders.
    """
    names = name_aliases(module)
    parameters: dict[str, str] = {}
    constants: dict[str, Any] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = spec.target.removeprefix(f"{PREFIX}.")
            parameters[spec.arg.name] = names.get(name, name)
        elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ):
            constants[spec.arg.name] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
    graph = inline_regions(program.graph_module)
    _complete_paths(graph, [path for path, _ in module.named_modules(remove_duplicate=False)])
    return graph, parameters, constants, inputs


def _refuse_lost_vmap(constants: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Raise an error if tracing lost the `vmap` regions of the code, so that the graph is wrong.

    PyTorch 2.6.0 omits such regions, and treats the values in them as constants.
    """
    is_batched = torch._C._functorch.is_batchedtensor
    if any(isinstance(x, torch.Tensor) and is_batched(x) for x in constants.values()):
        raise CaptureError(
            f"{type(module).__name__} can't be captured as a graph: its code calls vmap, which "
            f"PyTorch {torch.__version__} leaves out of graphs.",
            remedy="Use a newer PyTorch (2.11 can), or run it in bf16 or fp32.",
        )


def _leave_out_fakes(
    graph: GraphModule, constants: dict[str, Any], module: torch.nn.Module
) -> None:
    """Remove constants without values from a graph if the nodes that use them decide nothing.

    PyTorch 2.13.0 leaves one behind `vmap` with `out_dims` other than 0, and a node that nothing uses.

    Raises:
        CaptureError: if a result depends on one. Code that keeps a tensor in a global has one from a trace.
    """
    fakes = {name for name, x in constants.items() if isinstance(x, FakeTensor)}
    if not fakes:
        return
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if node.name in fakes or any(x in found for x in node.all_input_nodes):
            found[node] = None
    user = next((x for x in found if x.op != "placeholder"), None)
    for node in reversed(found):
        if not node.users and (node.op == "placeholder" or not node.is_impure()):
            graph.graph.erase_node(node)
            constants.pop(node.name, None)
    if user is not None and not fakes.isdisjoint(constants):
        place = f"{type(module).__name__}:{module_path(user)}".removesuffix(":")
        raise CaptureError(
            f"{place} can't be captured as a graph: {user.name} takes a tensor that the code made in "
            "another call and kept outside of the module.",
            expected="Such a tensor has no values if it was made while a call was traced.",
            remedy="Make it in each call, or keep it as a buffer of the module.",
        )
    graph.recompile()


def _complete_paths(graph: GraphModule, paths: list[str]) -> None:
    """Rewrite nodes' module paths to those of `named_modules`, where code called a module by another
    attribute.

    Tracing names a module by the attributes that the code used. SAT's mixins hold the transformer as a
    plain attribute, so its layers' paths begin there (torch 2.13.0, 2026-11-22).
    """

    @functools.cache
    def complete(path: str) -> str:
        if not path or is_inside(path, PREFIX):
            return path
        found = [known for known in paths if f".{known}".endswith(f".{path}")]
        return f"{PREFIX}.{found[0]}" if len(found) == 1 else path

    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(complete(path) != path for path, _ in stack.values()):
            node.meta["nn_module_stack"] = {
                key: (complete(path), kind) for key, (path, kind) in stack.items()
            }


def name_aliases(module: torch.nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor, so that tied
    weights agree.
    """
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in everything:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in everything}


@contextlib.contextmanager
def _alone_in_thread() -> Iterator[None]:
    """Restrict tracing to this thread's calls, and let one thread trace at a time.

    The tracer patches functions that call modules and read their attributes, in every thread of the
    process.
    """
    own = threading.get_ident()
    put: Any = vars(_Patcher)["patch_method"]

    def put_here(self: Any, kind: type, name: str, new: Any, deduplicate: bool = True) -> None:
        before: Any = getattr(kind, name)

        @functools.wraps(new)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == own else before)(*args, **kwargs)

        put(self, kind, name, choose if threading.get_ident() == own else new, deduplicate)

    with CALLS_REPLACED, Patches() as patches:
        patches.set_class_attribute(_Patcher, "patch_method", put_here)
        yield


@contextlib.contextmanager
def _quiet_fakes(owner: torch.nn.Module) -> Iterator[list[str]]:
    """Suppress the logged traceback of code that fails on fake tensors; the error is still raised.

    The list has the names of the global variables in which the code left fake tensors, once they were
    taken out at the end.

    Args:
        owner: the module that runs.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    kept, left = KeptGlobals(owner), list[str]()
    try:
        yield left
    finally:
        log.disabled = before
        left += kept.take_out_fakes()


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Suppress stderr and log messages up to errors while tracing; failures are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # failures print half a graph
            yield
    finally:
        logging.disable(before)
