"""One component call as a graph, with the dtype, module path and parameter name of every value.

The call is traced by `torch.export` (non-strict) on a shadow of the module whose parameters are
fake tensors in the dtype that the module is meant to run in. So no weight is read or copied, a
class too large for this machine is captured as well, and each value shows the dtype it will
really have: only what is fp16 there is bound by 65504. Regions that an author put under autocast or
`no_grad` are higher-order nodes in such a graph; they are walked into, so that what comes back is
flat. Code that asks tensors for their values (`mask.sum().tolist()`, `if x.any():`) is run once for
real, or without weights on what follows from the arguments alone. Its questions and answers are noted,
and while it is traced it gets the same answers. What was asked becomes an output of the graph, so that
nothing that decides the path is lost from sight.

Not covered: sizes that depend on values (`x[mask]`), tensors that a module makes once inside `forward`
and keeps, custom kernels: they raise `CaptureError` naming the line of code. Sizes are those of the call:
another resolution or length is another capture, and so are other answers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import io
import linecache
import logging
import re
import sys
import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node, graph_module
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx._symbolic_trace import _Patcher
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stopdown.component_call_names import is_inside
from stopdown.errors import WARNINGS_IGNORED, CaptureError, ignoring_warnings, take_first_line
from stopdown.interception.module_paths import ModulePaths, list_modules
from stopdown.interception.own_dtypes import list_own_dtypes, set_own_dtypes
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import kept_random
from stopdown.interception.tracing import CALLS_REPLACED
from stopdown.module_calls.call_signatures import Sizes, list_argument_sizes, sign_call
from stopdown.numerics import has_values, iterate_tensors
from stopdown.operations import CONVOLUTIONS, NORMS, read_calls
from stopdown.scaling.graph.argument_values import ArgumentValues, find_known, set_known
from stopdown.scaling.graph.mixed_dtypes import NO_OPERANDS, cast_operands, find_operands
from stopdown.scaling.graph.module_copies import copy_module
from stopdown.scaling.graph.nodes import is_kind
from stopdown.scaling.graph.readings import Readings
from stopdown.scaling.graph.repeated_modules import CallObserver, Note, Repeats
from stopdown.scaling_records import Operands

_PREFIX = "component"
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

_REGIONS = ("wrap", "tag_activation_checkpoint", "strict_mode")
"""How the names of operators begin that run their one body as it is, on the arguments behind it."""

_ONE_DTYPE = ("linear", *CONVOLUTIONS, "matrix")

Answers = tuple[tuple[str, Any], ...]
"""Questions that code asked of tensors, in order, each with the answer: `("item", 7)`."""


@dataclass(frozen=True)
class Capture:
    """One component call as a flat graph of ATen operations.

    Attributes:
        graph: placeholders are parameters, buffers and constants first, then the call's tensors.
        dtype: what the module's floating parameters were captured in.
        parameters: placeholder name to the name of the parameter or buffer; tied ones share one.
        constants: placeholder name to the tensor that the code made while it was traced, or to the
            generator of random numbers that it was given.
        inputs: placeholder names of the call's tensors, in the order of `flatten_call`.
        kept_buffers: buffers that the capture left in their own dtype.
        single_outputs: paths of the modules that return one tensor in every call of theirs.
        method: what was called of the module: `decode`; "" for the module itself.
        answers: what its code asked tensors for, and got, where that decides the path.
        outputs: how many tensors the call returns; the graph's outputs after them were asked for.
        replaceable: buffers and parameters that the code does without at another size: it computes others.
        operands: what was cast, or kept in fp32, because the code mixes dtypes.
        signature: of the call, as `sign_call` writes it.
        sizes: of the call, as `list_argument_sizes` has them.
        keeps_clamps: the code clamps at fp16's maximum in fp32 as well.
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
        args, kwargs: arguments of the call. Floating tensors of the module's dtype are taken as given in
            `dtype`; only shapes and dtypes of tensors matter.
        wide: names of parameters and buffers to keep in fp32.
        answers: answers to the code's questions about tensor values; None records them here if needed.
        operands: inputs to cast and parameters to keep in fp32 for code that mixes dtypes; None finds them
            here.

    Raises:
        CaptureError: the code cannot be traced; the error names the line at fault.
    """
    failure: CaptureError | None = None
    first = _Attempt(call, args, dict(kwargs or {}), dtype, wide, operands)
    drawn = kept_random(first.owner, args, kwargs or {})
    with WARNINGS_IGNORED, drawn, _quiet_fakes():  # and captures of two threads disturb each other
        for attempt in _list_attempts(first, answers):
            try:
                return _export(attempt)
            except CaptureError as error:
                failure = failure or error
    assert failure is not None
    raise failure


def find_call_operands(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype,
) -> Operands:
    """Find the casts that give each operation of a call operands of one dtype, without capturing it.

    Cost: one run on fake tensors.
    """
    with _quiet_fakes():
        return _ShadowCall(_Attempt(call, args, dict(kwargs or {}), dtype)).find_operands()


def read_call(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    blocked: Collection[str] = (),
) -> frozenset[int] | None:
    """Record how a call uses its parameters and arguments, as marks (`readings`).

    Return None if its code fails on tensors without values, for example because it asks for them.

    Args:
        blocked: names of tensors whose rows or columns differ in exponent.

    Cost: one run on fake tensors.
    """
    try:
        with _quiet_fakes():
            return _ShadowCall(_Attempt(call, args, dict(kwargs), dtype)).read(blocked)
    except Exception:  # whatever a model's code does on tensors without values
        return None


def _list_attempts(first: _Attempt, answers: Answers | None) -> Iterator[_Attempt]:
    """Yield ways to capture a call, cheapest first; each is for when those before have failed."""
    yield first
    yield replace(first, keeps_buffers=False)
    if _has_weights(first.owner):
        yield replace(first, is_real=True)
    if answers is None:
        with contextlib.suppress(Exception):  # a call that fails has none: say why untraced
            answers = note_answers(first.call, first.args, first.kwargs)
    if answers is not None:
        yield replace(first, answers=answers)
        yield replace(first, answers=answers, keeps_buffers=False)


@contextlib.contextmanager
def noting_answers(found: list[tuple[str, Any]]) -> Iterator[None]:
    """Append to `found` each question of this thread's code about tensor values, with its answer.

    Cost: a look at each torch function that is called.
    """
    with _Notes() as notes:
        yield
    found += notes.found


def add_answers(signature: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Add the answers to a call's questions to its signature: `forward(x[2d], reads 4)`.

    Long answers are hashed. Answers to tests for NaN and Inf are left out.
    """
    words = " ".join(str(x) for question, x in answers if not question.endswith(_OF_TEST))
    if not words:
        return signature
    words = words if len(words) <= _MOST_WORDS else hashlib.sha256(words.encode()).hexdigest()[:16]
    start, _, rest = signature.removesuffix(")").partition("(")
    return f"{start}({', '.join(filter(None, (rest, f'reads {words}')))})"


def strip_answers(signature: str) -> str:
    """Remove the answers that `add_answers` added to a signature."""
    return _READS.sub(")", signature)


def reads_values(signature: str) -> bool:
    """Return whether the code asked tensors for values in calls of a signature."""
    return strip_answers(signature) != signature


_OF_TEST = " of a test"
_MOST_WORDS = 60
_READS = re.compile(r"(, |(?<=\())reads [^,\]]*\)$")


def note_answers(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Answers:
    """Run a call, and return its code's questions about tensor values with their answers.

    A module without weights runs on fake tensors. Its code gets the values that follow from the arguments
    alone, and fails if it asks for others.

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
        CaptureError: the call is neither.
    """
    owner = call if isinstance(call, torch.nn.Module) else getattr(call, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        raise CaptureError(
            f"{call!r} is neither a module nor a bound method of one.",
            remedy="Pass the module itself, or for example vae.decode.",
        )
    return owner


def build_fake(factory: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """Build a module in `dtype` from the start, without memory for its weights.

    Code that reads values of tables while it builds (rates of dropped paths) has them on the host.
    """
    before, mode = torch.get_default_dtype(), FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_default_dtype(dtype)
    try:
        with mode:
            return factory().eval()
    except DataDependentOutputException:
        with torch.device("meta"):
            return _make_fake(factory().eval(), mode)
    finally:
        torch.set_default_dtype(before)


def _make_fake(module: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Replace the tensors of a module, which no other code holds, with fake ones on the host."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, own in part.named_parameters(recurse=False):
            if id(own) not in made:
                made[id(own)] = torch.nn.Parameter(_fake_like(own, mode), own.requires_grad)
            part.register_parameter(name, made[id(own)])
        for name, buffer in part.named_buffers(recurse=False):
            is_stored = name not in part._non_persistent_buffers_set
            part.register_buffer(name, _fake_like(buffer, mode), persistent=is_stored)
    return module


def _fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments: positional ones first, then keywords by name."""
    leaves, _ = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def sign_capture(capture: Capture) -> str:
    """Return a hash of a captured call's computation, without the values of its weights."""
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
    """Return the dotted path of the innermost module whose code made a value; "" for the component."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix(_PREFIX).removeprefix(".")


def module_classes(node: Node) -> list[str]:
    """Return the class names of the modules around a value, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [_class_name(entry[1]) for entry in stack.values()]


def call_key(node: Node) -> str:
    """Return the key of the module call that made a value; calls of the same module differ in it."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack))) if stack else ""


def name_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name; a tied one is under its first name only."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    named.update(module.named_buffers())
    return named


def mark_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a parameter; a fake one is marked in place, so nothing else may hold it."""
    if not isinstance(tensor, FakeTensor):
        return torch.nn.Parameter(tensor, requires_grad=False)
    tensor._is_param = True
    return tensor


def find_mode(module: torch.nn.Module) -> FakeTensorMode:
    """Return the fake mode of a module's parameters and buffers; a new one if none is fake."""
    for tensor in name_parameters(module).values():
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def detach_derived(module: torch.nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a module, with tensors computed from its parameters detached.

    `torch.nn.utils.weight_norm` leaves such a tensor as an attribute, and PyTorch refuses to copy it with
    its gradient history.
    """
    held = (x for part in module.modules() for x in vars(part).values())
    return {id(x): x.detach() for x in held if isinstance(x, torch.Tensor) and not x.is_leaf}


def renew_fakes(
    module: torch.nn.Module, mode: FakeTensorMode, known: Collection[int] = ()
) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a module, with its fake tensors renewed in `mode`.

    `deepcopy` must copy neither them nor their mode (torch 2.13.0, 2026-11-21). A mode knows storages by
    their addresses and frees each when it dies; a copy of it frees the same ones again, and code that runs
    much later meets freed memory. Empty tables (of hooks, a dozen per module) are in the memo because
    copying them takes a third of the time.

    Args:
        known: ids of tensors to leave out of the memo.
    """
    tables = [vars(part) for part in module.modules()]
    held = pytree.tree_leaves(tables)
    memo: dict[int, Any] = {
        id(x): type(x)()
        for table in tables
        for x in table.values()
        if type(x) in (OrderedDict, dict) and not x
    }
    memo |= detach_derived(module)
    for tensor in (x for x in held if isinstance(x, FakeTensor)):
        memo[id(tensor.fake_mode)] = mode
        if id(tensor) not in known:
            memo[id(tensor)] = _make_like(tensor, tensor.dtype, mode, real=False)
    return memo


@dataclass(frozen=True)
class _Attempt:
    """One way to capture a call; what is not named here is as `capture_call` takes it.

    Attributes:
        answers: to what the code asks tensors for; None lets nothing be asked.
        keeps_buffers: buffers outside the checkpoint stay in their own dtype.
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
    """Notes what code asks tensors for; or answers, from what was noted before.

    Code that asks only in fp16 whether a value is NaN or Inf, to clamp it (LDMBert), is told that it is
    finite: exponents keep it so.
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
            return answer  # a guard asks, and not the code
        if func is torch.Tensor.tolist:  # of a fake tensor it asks for one item after the other
            self.found += [("item", x) for x in args[0].flatten().tolist()]
        else:
            self.found.append((self._name(func.__name__, args), answer))
        return answer

    def _follow_test(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """Note the result on finite values of a test for NaN or Inf, or of several joined."""
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
        return f"{question}{_OF_TEST}" if id(args[0]) in self._tests else question

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
"""What tests for NaN and Inf say of finite values, and how code joins them."""


@functools.cache
def _list_questions() -> frozenset[Any]:
    """Return the functions and methods of torch that turn a tensor's values into Python numbers."""
    return frozenset(
        getattr(owner, name)
        for name in read_calls().asks
        for owner in (torch, torch.Tensor)
        if hasattr(owner, name)
    )


class _TracedData(TorchFunctionMode):
    """Takes `x.data` as `x.detach()`: the same storage, and unlike it a node of the graph.

    Tracing sees neither the getter nor what is written through it afterwards, as into a table of
    positions that is made in `forward` (torch 2.13.0, 2026-11-22).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_DATA:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


class _Call(torch.nn.Module):
    """A call as a module of tensors only: other arguments are closed over."""

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
        self._count = count  # attributes that are set while they are traced are set back

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        call = getattr(self.component, self._method) if self._method else self.component
        notes = _Notes(self._answers)
        with _TracedData(), contextlib.nullcontext() if self._answers is None else notes:
            output = call(*args, **kwargs)
        found = {id(x): x for x in iterate_tensors(output)}
        self._count(len(found))
        return (*found.values(), *notes.asked)


def _export(attempt: _Attempt) -> Capture:
    """Capture a call; if its code mixes dtypes, capture it again with the casts that this needs."""
    try:
        capture = _ShadowCall(attempt).export()
        mixed = find_mixed_operands(capture.graph) or _find_mixed_norms(capture.graph)
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
    """One call of a shadow of its module, ready to be traced."""

    def __init__(self, attempt: _Attempt) -> None:
        self._module, self._attempt = attempt.owner, attempt
        self._method = "" if attempt.call is self._module else getattr(attempt.call, "__name__", "")
        self._mode, own = find_mode(self._module), own_dtype(self._module)
        if own is None or attempt.dtype in list_own_dtypes(self._module):
            own = attempt.dtype  # it is cast in part, and called as its authors cast it
        self._shadow, self._kept = _make_shadow(attempt, self._mode)
        leaves, spec = pytree.tree_flatten((attempt.args, dict(sorted(attempt.kwargs.items()))))
        self._given = tuple(
            _make_like(x, attempt.dtype if x.dtype == own else x.dtype, self._mode, attempt.is_real)
            for x in leaves
            if isinstance(x, torch.Tensor)
        )
        self._counts: list[int] = []
        self._traced = _Call(
            self._shadow, self._method, leaves, spec, attempt.answers, self._counts.append
        ).eval()

    @property
    def _named(self) -> tuple[torch.nn.Module, str, tuple[Any, ...], dict[str, Any]]:
        """Module, method and arguments of the call."""
        return (
            self._module,
            self._method or "forward",
            self._attempt.args,
            self._attempt.kwargs,
        )

    def read(self, blocked: Collection[str]) -> frozenset[int]:
        """Record how the call uses its parameters and arguments, as marks (`readings`)."""
        patches = Patches()  # never undone: the shadow is thrown away with its hooks
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
        """Run the call's code, with the values of its arguments where it asks for some."""
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
        """Find the casts that give each operation of the call operands of one dtype."""
        fakes = contextlib.nullcontext() if self._attempt.is_real else self._mode
        with WARNINGS_IGNORED, torch.no_grad(), ignoring_warnings(Warning), fakes:
            return find_operands(lambda: self._traced(*self._given), self._shadow)

    def export(self) -> Capture:
        """Trace the call and return its capture."""
        notes: list[Note] = []
        _watch_outputs(self._shadow, notes)
        _watch_tables(self._shadow, self._kept, notes)
        with (
            _alone_in_thread(),
            torch.no_grad(),
            ignoring_warnings(Warning),
            _quiet_logs(),
            _light_tracing(),
        ):
            try:
                program = self._trace(notes)
            except Exception as error:
                raise describe_failure(error, self._module) from error
            graph, parameters, constants, inputs = _read_program(program, self._module)
            _refuse_lost_vmap(constants, self._module)
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
        """Export the call, tracing parts that are called alike once; if that fails, trace every part."""
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
    """Record for each module call, while the shadow runs, whether it returned one tensor.

    A module with several names (an activation that all layers share) is left out: anything attached to it
    acts in all of its places.
    """
    names = Counter(id(x) for _, x in shadow.named_modules(remove_duplicate=False))

    def is_single(args: Any, output: Any) -> bool:
        return isinstance(output, torch.Tensor)

    patches = Patches()  # never undone: the shadow is thrown away with its hooks
    for path, module in shadow.named_modules():
        if names[id(module)] == 1:
            hook = CallObserver(path, "output", is_single, notes)
            patches.defer(module.register_forward_hook(hook).remove)


def _list_singles(notes: Sequence[Note]) -> frozenset[str]:
    """Return the paths of the modules that returned one tensor in every call."""
    outputs = [(watch.path, single) for watch, single in notes if watch.kind == "output"]
    return frozenset(path for path, _ in outputs) - {path for path, single in outputs if not single}


_Calls = dict[str, tuple[Any, ...]]
"""Module path to the arguments of its last call, tensors as `_Shaped`."""


@dataclass(frozen=True)
class _Shaped:
    """What is kept of a tensor among arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _watch_tables(shadow: torch.nn.Module, kept: frozenset[str], notes: list[Note]) -> None:
    """Record the calls, while the shadow runs, of modules that may choose their tables by sizes.

    Such a module has floating buffers of its own outside `kept`, or floating parameters if it is not a
    layer of torch.
    """

    def shape(args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda x: _Shaped(tuple(map(int, x.shape)), x.dtype), (args, kwargs)
        )

    patches = Patches()  # never undone, as above
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
    """Find the tables that a module does without when a dimension of its arguments doubles or halves.

    An example is a table of positions that is learned for one number of frames and computed for others: a
    factor folded into it is lost there. Only one of several like modules is tried. The component's own
    parameters are not.
    """
    found: set[str] = set()
    known: dict[Any, frozenset[str]] = {}
    for path, call in calls.items():
        module = shadow.get_submodule(path)
        tables = {
            id(x): name for name, x in _list_tables(module) if path or name in module._buffers
        }
        tables = {x: name for x, name in tables.items() if f"{path}.{name}".strip(".") in used}
        key = type(module), _read_settings(module), str(call), frozenset(tables.values())
        if tables and key not in known:
            known[key] = _find_unread(module, call, tables, mode)
        found.update(f"{path}.{name}".strip(".") for name in (known[key] if tables else ()))
    return frozenset(found)


def _read_settings(module: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str, type(None))
    return tuple((name, x) for name, x in vars(module).items() if isinstance(x, plain))


def _find_unread(
    module: torch.nn.Module, call: tuple[Any, ...], tables: Mapping[int, str], mode: FakeTensorMode
) -> frozenset[str]:
    """Return the names of the tables that some call of other sizes leaves unread."""
    found: set[str] = set()
    for other in _list_resized(call):
        read = _Read()
        with contextlib.suppress(Exception), mode, read:  # most cannot change alone
            args, kwargs = pytree.tree_map_only(
                _Shaped, lambda x: torch.empty(x.shape, dtype=x.dtype), other
            )
            module.forward(*args, **kwargs)
            found.update(tables[x] for x in tables.keys() - read.seen)
    return frozenset(found)


def _list_resized(call: tuple[Any, ...]) -> Iterator[Any]:
    """Yield a call with one dimension of one tensor doubled or halved, for each dimension."""
    leaves, spec = pytree.tree_flatten(call)
    for number, leaf in enumerate(leaves):
        shape = leaf.shape if isinstance(leaf, _Shaped) else ()
        for dim, size in enumerate(shape):
            for other in (2 * size, *([size // 2] if size > 1 else [])):
                resized = (*shape[:dim], other, *shape[dim + 1 :])
                others = [*leaves[:number], replace(leaf, shape=resized), *leaves[number + 1 :]]
                yield pytree.tree_unflatten(others, spec)


class _Read(TorchFunctionMode):
    """Notes from which tensors others were made; a shape or a dtype may be asked for."""

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
    """Copy a module over fake parameters, or real ones if `is_real`, in the dtypes of an attempt.

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
        made = _make_like(tensor, wanted, mode, attempt.is_real)
        if isinstance(tensor, torch.nn.Parameter):
            made = mark_as_parameter(made)
        memo[id(tensor)] = made
    try:
        shadow = copy_module(module, memo)
    except Exception as error:
        raise describe_failure(error, module) from error
    patches = Patches()  # never undone: the shadow is thrown away
    cast_operands(shadow, operands, dtype, patches)
    set_own_dtypes(shadow, list_own_dtypes(module), dtype, patches)
    return shadow, kept


def casts_weights(module: torch.nn.Module) -> bool:
    """Return whether weights are cast to their input's dtype at each call, as ComfyUI's operations do.

    Such a module computes in the dtype of its arguments, so its weights stay as they are stored.
    """
    return any(getattr(part, "comfy_cast_weights", False) for part in list_modules(module))


def find_kept_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of buffers in fp32 or float64 outside the checkpoint.

    They hold the code's own tables (rotary frequencies, positions), which are meant to stay exact:
    positions in 16 bits collapse. Loading leaves them alone as well.
    """
    saved = module.state_dict(keep_vars=True)
    return frozenset(
        name
        for name, buffer in module.named_buffers()
        if buffer.dtype in (torch.float32, torch.float64) and name not in saved
    )


def _make_like(
    tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode, real: bool
) -> torch.Tensor:
    if real:
        return tensor.detach().to(dtype)
    if isinstance(tensor, FakeTensor) and tensor.dtype == dtype and tensor.fake_mode is mode:
        return tensor.detach()
    device = "cpu" if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device=device)


def own_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's first floating parameter; None if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _read_program(
    program: Any, module: torch.nn.Module
) -> tuple[GraphModule, dict[str, str], dict[str, Any], list[str]]:
    """Return the flat graph of an exported program, and the meaning of its placeholders.

    The latter are the parameters' names and the constants by placeholder, and a list of the inputs'
    placeholders.
    """
    names = name_aliases(module)
    parameters: dict[str, str] = {}
    constants: dict[str, Any] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = spec.target.removeprefix(f"{_PREFIX}.")
            parameters[spec.arg.name] = names.get(name, name)
        elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ):
            constants[spec.arg.name] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
    graph = inline_regions(program.graph_module)
    _complete_paths(graph, [path for path, _ in module.named_modules(remove_duplicate=False)])
    return graph, parameters, constants, inputs


def _refuse_lost_vmap(constants: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Refuse a graph that has lost its regions of `vmap`.

    PyTorch 2.6.0 leaves such regions out, and takes the values in them for constants.
    """
    is_batched = torch._C._functorch.is_batchedtensor
    if any(isinstance(x, torch.Tensor) and is_batched(x) for x in constants.values()):
        raise CaptureError(
            f"{type(module).__name__} cannot be captured as a graph: its code calls vmap, which "
            f"PyTorch {torch.__version__} leaves out of graphs.",
            remedy="Use a newer PyTorch (2.11 can), or run it in bf16 or fp32.",
        )


def _complete_paths(graph: GraphModule, paths: list[str]) -> None:
    """Complete the paths of modules that code reached from elsewhere.

    Tracing names a module by the code's way to it. SAT's mixins hold the transformer as a plain attribute,
    so its layers are named from there on (torch 2.13.0, 2026-11-22).
    """

    @functools.cache
    def complete(path: str) -> str:
        if not path or is_inside(path, _PREFIX):
            return path
        found = [known for known in paths if f".{known}".endswith(f".{path}")]
        return f"{_PREFIX}.{found[0]}" if len(found) == 1 else path

    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(complete(path) != path for path, _ in stack.values()):
            node.meta["nn_module_stack"] = {
                key: (complete(path), kind) for key, (path, kind) in stack.items()
            }


def find_mixed_operands(graph: GraphModule, *kinds: str) -> list[Node]:
    """Find operations whose floating operands differ in dtype.

    Tracing does not refuse them (measured for linear, 2026-11-21), a real run does.

    Args:
        kinds: kinds of operations to look at; by default matrix products and convolutions.
    """
    return [
        node
        for node in graph.graph.nodes
        if is_kind(node, *(kinds or _ONE_DTYPE)) and len(set(_float_dtypes(node))) > 1
    ]


def _find_mixed_norms(graph: GraphModule) -> list[Node]:
    """Find norms of an input in a wider dtype than their weights, which some kernels refuse."""
    return [
        node
        for node in graph.graph.nodes
        if is_kind(node, *NORMS) and len(_float_dtypes(node)) > 1
        if _float_dtypes(node)[0].itemsize > min(x.itemsize for x in _float_dtypes(node)[1:])
    ]


def _float_dtypes(node: Node) -> list[torch.dtype]:
    values = [x.meta.get("val") for x in node.all_input_nodes]
    return [x.dtype for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]


def name_aliases(module: torch.nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor."""
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in everything:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in everything}


def inline_regions(graph: GraphModule) -> GraphModule:
    """Return a graph with autocast and no-grad regions replaced by their bodies.

    Bodies of other operators (the score function of `flex_attention`) stay separate.
    """
    if not any(map(_is_region, graph.graph.nodes)):
        return graph
    flat = torch.fx.Graph(owning_module=graph)
    flat.output(_copy_nodes(graph, flat, {}))
    return _make_graph_module(graph, flat)


def _copy_nodes(source: GraphModule, flat: torch.fx.Graph, env: dict[Node, Any]) -> Any:
    """Copy a graph's nodes to the end of `flat`, and return the values of its output node."""
    for node in source.graph.nodes:
        if node in env or (_is_region_body(node) and all(map(_is_region, node.users))):
            continue
        if node.op == "output":
            return pytree.tree_map_only(Node, lambda x: env[x], node.args[0])
        if _is_region(node):
            env[node] = _copy_region(node, source, flat, env)
        elif _picks_from_region(node, env):
            env[node] = env[node.args[0]][node.args[1]]
        elif _is_region_body(node):
            name = f"body_{len(flat.nodes)}"
            assert flat.owning_module is not None  # `inline_regions` names it
            flat.owning_module.add_module(name, source.get_submodule(str(node.target)))
            env[node] = flat.get_attr(name)
        else:
            env[node] = flat.node_copy(node, lambda x: env[x])
    return None


def _copy_region(
    node: Node, source: GraphModule, flat: torch.fx.Graph, env: dict[Node, Any]
) -> Any:
    position = next(i for i, arg in enumerate(node.args) if _is_region_body(arg))
    body = source.get_submodule(str(node.args[position].target))  # type: ignore[union-attr]
    assert isinstance(body, GraphModule)
    operands = [env[x] if isinstance(x, Node) else x for x in node.args[position + 1 :]]
    holders = [n for n in body.graph.nodes if n.op == "placeholder"]
    return _copy_nodes(body, flat, dict(zip(holders, operands, strict=True)))


def _is_region(node: Node) -> bool:
    is_higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    if not is_higher or not node.target.name().startswith(_REGIONS):  # type: ignore[union-attr]
        return False
    return any(_is_region_body(arg) for arg in node.args)


def _is_region_body(value: Any) -> bool:
    if not isinstance(value, Node) or value.op != "get_attr":
        return False
    owner = value.graph.owning_module
    return isinstance(getattr(owner, str(value.target), None), GraphModule)


def _picks_from_region(node: Node, env: dict[Node, Any]) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    return isinstance(env.get(node.args[0]), (tuple, list))  # type: ignore[arg-type]


def describe_failure(error: Exception, module: torch.nn.Module) -> CaptureError:
    """Describe why a module's code did not run on fake tensors, with the line that stopped it."""
    reason = take_first_line(error)
    return CaptureError(
        f"{type(module).__name__} cannot be captured as a graph: {reason} ({_blame(error)}).",
        expected="Capturing needs code whose control flow does not depend on the values of tensors.",
        remedy="Run it in bf16 or fp32, or keep the module at fault outside the captured call.",
    )


def _blame(error: BaseException) -> str:
    """Return the last line of model code in an error's traceback, as file, line and text."""
    frames = list(_frames(error))
    ours = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    frame = (ours or frames)[-1] if frames else None
    if frame is None:
        return "no line is known"
    return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}: {frame.line}"


def _frames(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    while error is not None:
        yield from traceback.extract_tb(error.__traceback__)
        error = error.__cause__


def _class_name(kind: Any) -> str:
    return kind.__name__ if inspect.isclass(kind) else str(kind).rpartition(".")[2]


@contextlib.contextmanager
def _alone_in_thread() -> Iterator[None]:
    """Trace calls of this thread only, one thread at a time.

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
def _light_tracing() -> Iterator[None]:
    """Trace without unread results, which take a third of the time (2026-11-21).

    They are a stack trace for each node and Python code for each graph. Garbage collection is off too: it
    visits every node again and again. Code that is still generated is dropped: `torch.fx` keeps each text
    for tracebacks, 0.7 MiB in a repair of a tiny UNet (torch 2.13.0, 2026-11-25).
    """
    texts = graph_module._loader.eval_cache
    known = frozenset(texts)
    with _use_lazy_graph_module(True), Patches() as patches:
        if gc.isenabled():
            patches.defer(gc.enable)
            gc.disable()
        if hasattr(torch.fx.config, STACK_TRACES_OFF):
            patches.set_attribute(torch.fx.config, STACK_TRACES_OFF, True)
        try:
            yield
        finally:
            for name in texts.keys() - known:
                texts.pop(name, None)
                linecache.cache.pop(name, None)


STACK_TRACES_OFF = "do_not_emit_stack_traces"
"""Switch of `torch.fx.config` that 2.13.0 has, and 2.11.0 has not."""


@contextlib.contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Suppress the logged traceback of code that fails on fake tensors; its error is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Suppress stderr and logging up to the level of errors while tracing; failures are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # half a graph is printed before it fails
            yield
    finally:
        logging.disable(before)
