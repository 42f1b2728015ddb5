"""Make gradients of a repaired call right although its repair is off when the backward pass comes.

Under `stopdown run` exponents and casts are on a module for one call. A backward pass would read other
weights than the call did, and its gradients would be those of scaled weights. So the outputs of such a
call keep no graph of it. If a backward pass reaches them, the call is made again in fp32, from the weights
as they are, and that is differentiated.

**Does not catch** weights and arguments that a script writes to between the call and its backward pass;
gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.interception.randomness import save_random
from stopdown.module_calls.outermost_calls import silenced

Restore = Callable[[], None]


def graft_gradients(
    module: torch.nn.Module,
    method: str,
    given: tuple[tuple[Any, ...], Mapping[str, Any]],
    output: Any,
    restore: Restore,
) -> Any:
    """Return a call's output, detached from its graph, with gradients that come from repeating the call
    in fp32.

    Args:
        given: the call's arguments, positional and by name.
        restore: puts the generators of random numbers into the state that the call began with.

    Cost: nothing before a backward pass; then a forward and a backward of the module in fp32.
    """
    leaves, structure = pytree.tree_flatten(output)
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not places:
        return output
    call = _LaterCall(module, method, given, places, restore)
    found = _Later.apply(call, [leaves[i].detach() for i in places], *call.wanted)
    for place, tensor in zip(places, found, strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, structure)


class _LaterCall:
    """A call that is repeated in fp32 if a backward pass asks for its gradients.

    Attributes:
        wanted: parameters and arguments that gradients may be asked of.
        places: positions of the outputs that have gradients, among all values of the output.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        method: str,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        places: list[int],
        restore: Restore,
    ) -> None:
        self.places, self._restore = places, restore
        self._caller = _Caller(module, method)
        self._leaves, self._structure = pytree.tree_flatten((given[0], dict(given[1])))
        self._names = [n for n, x in self._caller.named_parameters() if x.requires_grad]
        self._given = [i for i, x in enumerate(self._leaves) if _wants_gradient(x)]
        parameters = dict(self._caller.named_parameters())
        self.wanted = [parameters[n] for n in self._names] + [self._leaves[i] for i in self._given]

    def differentiate(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """Repeat the call in fp32, and return the gradients with respect to `wanted`.

        Args:
            gradients: those with respect to the outputs.
        """
        tensors = {**dict(self._caller.named_parameters()), **dict(self._caller.named_buffers())}
        wide = {name: _widen(x) for name, x in tensors.items()}
        leaves = list(map(_widen, self._leaves))
        wanted = [wide[n] for n in self._names] + [leaves[i] for i in self._given]
        for tensor in wanted:
            tensor.requires_grad_()
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        restore_now = save_random(next(iter(wide.values())).device, leaves)
        self._restore()
        with torch.enable_grad(), silenced():
            output = torch.func.functional_call(self._caller, wide, args, kwargs)
        restore_now()
        made = pytree.tree_leaves(output)
        pairs = [(made[i], x) for i, x in zip(self.places, gradients, strict=True)]
        return torch.autograd.grad(
            [x for x, _ in pairs],
            wanted,
            [gradient.to(x.dtype) for x, gradient in pairs],
            allow_unused=True,
        )


class _Caller(torch.nn.Module):
    """Wraps a module so that `torch.func.functional_call` can call any of its methods."""

    def __init__(self, module: torch.nn.Module, method: str) -> None:
        super().__init__()
        self.module, self._method = module, method
        self.train(module.training)

    def train(self, mode: bool = True) -> _Caller:
        """Set the mode of this wrapper alone; the wrapped module keeps its own."""
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module's method, as `functional_call` can call only `forward`."""
        if self._method == "forward":
            return self.module(*args, **kwargs)
        return getattr(self.module, self._method)(*args, **kwargs)


class _Later(torch.autograd.Function):
    """Autograd function that passes outputs on, and has a `_LaterCall` compute their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: _LaterCall, outputs: list[torch.Tensor], *_wanted: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.call.differentiate(gradients))


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _widen(value: Any) -> Any:
    """Return a floating tensor's copy in fp32 (or wider), without its graph; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
