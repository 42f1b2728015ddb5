"""`ComponentCall`: one call of a component as a value, with its target and arguments.

Layers, recordings, replays and dry runs all pass on a `ComponentCall`. It decides which arguments keep
their dtype between components (`keeps`). This module also changes, signs and casts nested tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from stopdown.errors import OptionError, take_one_line
from stopdown.interception.arguments import (
    Change,
    Keeps,
    Replaced,
    count_writes,
    put_back,
    replace_tensor,
    replace_tensors,
)
from stopdown.interception.autocast import without_autocast
from stopdown.interception.randomness import Restore, find_weights_device, save_random
from stopdown.module_calls.callee import DIFFUSERS_KEEPS, Callee
from stopdown.module_calls.kept_state import list_containers
from stopdown.module_calls.outermost_calls import is_plain
from stopdown.module_calls.step_caches import save_caches
from stopdown.numerics import (
    HALVES,
    bound_values,
    cast_mask,
    is_readable,
    iterate_tensors,
)
from stopdown.out_of_memory import is_out_of_memory

PlainCall = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A call without its component: function, positional and keyword arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class ComponentCall:
    """One call of a component, or of another method that is intercepted.

    Attributes:
        callee: the module, its method and the name of the call in records.
        args: positional arguments, as the program passed them.
        kwargs: keyword arguments.
        below: the function that continues the call: the next layer inwards, finally the method itself. None
            for a call that isn't being made, such as an example.
        made_up: whether the call was derived from another one, and not made by the program.

    Examples:
        >>> module = torch.nn.Linear(4, 2)
        >>> call = ComponentCall(Callee("denoiser", module, "forward", "denoise"), (torch.ones(1, 4),))
        >>> list(call.named)
        ['input']
    """

    callee: Callee
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    below: Callable[..., Any] | None = None
    made_up: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name; positional ones without a name of their own are `*2`, by their place."""
        places = (f"*{i}" for i in range(len(self.callee.argument_names), len(self.args)))
        names = (*self.callee.argument_names, *places)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def key(self) -> str:
        """The signature that calls with the same graph share: method, shapes, dtypes, plain arguments."""
        return f"{self.callee.method}|{sign_arguments(self.args, self.kwargs)}"

    def proceed(self) -> Any:
        """Continue an intercepted call in the next layer inwards, and return its output."""
        assert self.below is not None
        return self.below(*self.args, **self.kwargs)

    def proceed_with(self, change: Change, keeps: Keeps) -> Any:
        """Continue the call with every tensor changed, except in arguments whose names `keeps` accepts.

        The caller's lists and mappings are restored after the call, except for items that the component
        replaced.
        """
        assert self.below is not None
        args, kwargs, replaced = replace_tensors(
            self.args, self.kwargs, change, names=self.callee.argument_names, keeps=keeps
        )
        try:
            return self.below(*args, **kwargs)
        finally:
            put_back(replaced)

    def proceed_in(
        self, dtype: torch.dtype, leaves: Collection[str] = (), wide: Collection[int] = ()
    ) -> Any:
        """Continue the call with floating arguments cast to `dtype`, and cast its outputs back.

        Arguments that the call `keeps` aren't cast, except from 16 bits to fp32: models such as HunyuanDiT
        compute in the dtype of their timesteps. Tensors in objects, such as a key/value cache that an
        earlier call filled in another format, are cast during the call. The output is cast as by
        `bring_back`, except that of a decoder, which is the picture and isn't computed with.

        Args:
            leaves: names of further arguments that aren't cast.
            wide: indices of the output tensors that the component's code returns in fp32 by itself.
        """
        came_as = self.came_as

        def keeps(name: str) -> bool:
            if name in leaves or not self.keeps(name):
                return name in leaves
            floats = (x for x in iterate_tensors(self.named.get(name)) if x.is_floating_point())
            return dtype != torch.float32 or any(x.dtype not in HALVES for x in floats)

        with _casting_objects((self.args, self.kwargs), dtype):
            output = self.proceed_with(functools.partial(_cast, dtype=dtype), keeps)
        if came_as is None or self.callee.stage == "decode":
            return output
        return bring_back(output, dtype, came_as, wide)

    @property
    def came_as(self) -> torch.dtype | None:
        """The dtype of the first floating argument that is cast; None without one."""
        return find_float_dtype(self.named, self.keeps)

    def list_beyond(self, dtype: torch.dtype) -> list[str]:
        """Return the names of arguments with finite values that a cast to `dtype` would turn into Inf.

        Masks are left out, because their casts keep them finite.

        Cost: if `dtype` is fp16, a host read for each argument tensor that wasn't checked before.
        """
        named = self.named.items() if dtype == torch.float16 else ()
        return [
            name
            for name, value in named
            if not (self.keeps(name) or is_mask(name))
            and not all(stays_finite(x, dtype) for x in iterate_tensors(value))
        ]

    @property
    def is_given_finite(self) -> bool:
        """Whether the arguments hold no NaN and no Inf, except for -Inf in masks.

        Cost: a host read for each floating argument.
        """
        return all(
            _bring_to_finite(name, x) is x
            for name, value in self.named.items()
            for x in iterate_tensors(value)
        )

    def bring_to_finite(self) -> ComponentCall:
        """Return the call with NaN and Inf in its arguments replaced by 0, so that activations can be
        measured.

        Cost: a host read for each floating argument.
        """
        return self if self.is_given_finite else self.with_arguments(_clean)

    def with_arguments(self, change: Callable[[str, Any], Any]) -> ComponentCall:
        """Return the call with each argument replaced by the result of a function of its name and value."""
        names = (*self.callee.argument_names, *[""] * len(self.args))
        args = tuple(change(name, x) for name, x in zip(names, self.args, strict=False))
        return replace(
            self, args=args, kwargs={name: change(name, x) for name, x in self.kwargs.items()}
        )

    def begin_again(self, module: torch.nn.Module | None = None) -> Any:
        """Repeat the call from its outermost layer, on another module if one is given."""
        owner = self.callee.owner if module is None else module
        return self.callee.bind(owner)(*self.args, **self.kwargs)

    def keeps(self, name: str) -> bool:
        """Return whether the argument of this name keeps its dtype when others are cast, as timesteps
        and positions do.
        """
        return is_kept(name, self.callee.keeps)

    def place(self, module: torch.nn.Module) -> PlainCall:
        """Return the call as (function, args, kwargs) for another module, with tensors moved to that
        one's device.
        """
        device = next(itertools.chain(module.parameters(), module.buffers())).device
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(device), (self.args, self.kwargs)
        )
        return self.callee.bind(module), args, kwargs

    def save(
        self, module: torch.nn.Module, device: torch.device | None = None
    ) -> tuple[Restore, ...]:
        """Save the states of random generators and step caches before a call changes them, so that it
        can be repeated.

        Args:
            device: on which random numbers are drawn; None for that of the module's weights.

        Returns:
            Functions that restore them.
        """
        device = device or find_weights_device(module)
        return save_random(device, (*self.args, *self.kwargs.values())), save_caches(module)


@contextlib.contextmanager
def _casting_objects(arguments: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast the tensors in objects among a call's arguments in the block, and put back those that the call
    didn't replace.
    """
    replaced: list[Replaced] = []
    cast = functools.partial(_cast, dtype=dtype)
    for container, is_inside in list(list_containers(arguments, set())):
        if is_inside and not isinstance(container, set):
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, tensor in [(key, x) for key, x in items if isinstance(x, torch.Tensor)]:
                if tensor.dtype in (*HALVES, torch.float32) and tensor.dtype != dtype:
                    container[key] = made = replace_tensor(tensor, cast, replaced)
                    replaced.append(Replaced(tensor, made, container, key))
    try:
        yield
    finally:
        put_back(replaced)


def is_kept(name: str, keeps: tuple[str, ...] = DIFFUSERS_KEEPS) -> bool:
    """Return whether the argument of this name keeps its dtype when others are cast.

    Args:
        keeps: glob patterns of such names, as `*timestep*`, and of exceptions, as `!timestep_cond`. The
            last one that matches decides.
    """
    found = [x for x in keeps if fnmatch.fnmatchcase(name, x.removeprefix("!"))]
    return bool(found) and not found[-1].startswith("!")


def is_mask(name: str) -> bool:
    """Return whether an argument of this name is an attention mask or bias."""
    return "mask" in name or "bias" in name


Values = TypeVar("Values", float, torch.Tensor)


def find_meant(name: str, values: Values) -> Values:
    """Return where an argument's values are right: finite, or -Inf in a mask, which hides a score.

    Args:
        name: of the argument.
        values: a number, or a floating tensor of any shape.

    Returns:
        A bool of Python, or a tensor of them with the shape of `values`.
    """
    is_finite = abs(values) < math.inf
    return is_finite | (values == -math.inf) if is_mask(name) else is_finite


def _clean(name: str, value: Any) -> Any:
    return map_tensors(value, functools.partial(_bring_to_finite, name))


def _bring_to_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with NaN and Inf replaced by 0, or the tensor itself if it has none.

    Args:
        name: of the argument; a mask keeps its -Inf.
    """
    if not (tensor.is_floating_point() and is_readable(tensor) and is_plain()):
        return tensor
    with torch.no_grad(), without_autocast():
        is_meant = find_meant(name, tensor)
        return tensor if bool(is_meant.all()) else torch.where(is_meant, tensor, 0.0)


_HELD: MutableMapping[torch.Tensor, tuple[int, bool]] = WeakIdKeyDictionary()
"""Tensor → its number of in-place writes when it was checked, and whether it stays finite in fp16."""


def stays_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast to `dtype` turns no finite value of a tensor into Inf; True if values can't
    be read.

    Inf and NaN that the tensor has already are ignored.

    Cost: a host read, once for each tensor; none unless another dtype is cast to fp16.
    """
    is_wider = dtype == torch.float16 and tensor.dtype != dtype
    if not (is_wider and is_readable(tensor) and is_plain()):
        return True
    writes = count_writes(tensor)
    known = _HELD.get(tensor)
    if known is not None and known[0] == writes:
        return known[1]
    with torch.no_grad(), without_autocast():
        bounds = bound_values([tensor])
        assert bounds is not None
        found = bool((bounds.to(dtype).isfinite() | ~bounds.isfinite()).all())
    if writes is not None:
        _HELD[tensor] = (writes, found)
    return found


def are_finite(value: Any) -> bool:
    """Return whether all tensors in a nested structure are finite; those that can't be read don't count.

    Cost: a host read.
    """
    bounds = bound_values([x for x in iterate_tensors(value) if is_readable(x)])
    return bounds is None or not is_plain() or bool(bounds.isfinite().all())


def narrow_if_finite(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor to a dtype, or return it unchanged if finite values would become Inf."""
    return _cast(tensor, dtype) if stays_finite(tensor, dtype) else tensor


def bring_back(
    output: Any, computed_in: torch.dtype, came_as: torch.dtype, wide: Collection[int] = ()
) -> Any:
    """Cast a call's output to the dtype of its arguments, except tensors that must stay in fp32.

    A tensor stays in fp32 if the code returns it so although it computes in 16 bits, or if it would
    overflow in `came_as`.

    Args:
        computed_in: dtype that the component computed in.
        came_as: dtype of the call's arguments.
        wide: indices of output tensors that stay in fp32 as well.

    Cost: if `came_as` has the smaller range, a pass over each cast tensor, and a host read.
    """
    kept = {id(x) for number, x in enumerate(iterate_tensors(output)) if number in wide}
    largest = torch.finfo(came_as).max

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_own = computed_in.itemsize < tensor.dtype.itemsize  # its code made it wide
        if is_own or not tensor.is_floating_point() or tensor.dtype == came_as:
            return tensor
        if id(tensor) in kept:
            return tensor.float()
        cast = tensor.to(came_as)
        if largest >= torch.finfo(tensor.dtype).max or are_finite(cast):
            return cast
        is_lost = bool((tensor.isfinite() & ~cast.isfinite()).any())
        return tensor.float() if is_lost else cast

    return map_tensors(output, cast, keeps=is_kept)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a nested structure with floating tensors cast to `dtype`.

    Timesteps and positions in dicts aren't cast, and neither are tensors that would overflow.
    """
    return map_tensors(value, functools.partial(narrow_if_finite, dtype=dtype), keeps=is_kept)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cast_mask(tensor, dtype) if tensor.is_floating_point() else tensor


def map_tensors(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    keeps: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Return a nested structure with `change` applied to every tensor.

    Lists, tuples, dicts, dataclasses and an autoencoder's latent distribution are copied. Other objects
    stay as they are: a cache is its caller's as well.

    Args:
        keeps: whether a dict's value under this name stays unchanged.
    """
    again = functools.partial(map_tensors, change=change, keeps=keeps)

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, dict):
            changed = {k: x if keeps(str(k)) else again(x) for k, x in leaf.items()}
            return changed if type(leaf) is dict else _set_items(copy.copy(leaf), changed)
        if isinstance(leaf, (list, tuple)):  # a class of these that pytree does not know
            return type(leaf)(map(again, leaf))
        # what an autoencoder encodes to: a mean and a spread, which is sampled later
        is_sampled = callable(getattr(leaf, "sample", None)) and callable(
            getattr(leaf, "mode", None)
        )
        if is_sampled or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
            named = (
                [x.name for x in dataclasses.fields(leaf)] if not is_sampled else list(vars(leaf))
            )
            leaf = copy.copy(leaf)
            for name in named:
                object.__setattr__(leaf, name, again(getattr(leaf, name)))  # it may be frozen
        return leaf

    return pytree.tree_map(visit, value, is_leaf=lambda x: isinstance(x, dict))


def _set_items(table: Any, items: Mapping[Any, Any]) -> Any:
    for key, item in items.items():
        table[key] = item
    return table


def sign_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a string that is equal for calls with the same graph: tensors' shapes and dtypes, and
    plain arguments.
    """
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return "|".join([str(spec), *map(_sign, leaves)])


def _sign(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    plain = (bool, int, float, str, bytes, type(None), torch.dtype)
    return repr(leaf) if isinstance(leaf, plain) else type(leaf).__name__


def find_float_dtype(
    arguments: dict[str, Any], keeps: Callable[[str], bool] = is_kept
) -> torch.dtype | None:
    """Return the dtype of the first floating tensor among a call's arguments; None without one.

    Args:
        keeps: returns whether the argument of a name is left out, as it isn't cast.
    """
    found: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.extend([tensor.dtype] * tensor.is_floating_point())
        return tensor

    map_tensors(arguments, note, keeps=keeps)
    return next(iter(found), None)


def explain_call(function: str, call: Callable[[], Any], error: Exception) -> None:
    """Run a user's example call by itself, and raise an `OptionError` if it fails even so.

    Then the fault is in the example, and not in the function that was given it.

    Args:
        function: name of that function.
        error: what it raised.
    """
    try:
        with torch.no_grad():
            call()
    except Exception as own:
        if not is_out_of_memory(own):
            raise OptionError(
                f"The call that was given to {function} fails as it is: {type(own).__name__}: "
                f"{take_one_line(own, 200)}.",
                expected="Exponents are found for calls that run, in the dtype of the weights.",
                remedy="Give the arguments that the module runs with now.",
            ) from error
