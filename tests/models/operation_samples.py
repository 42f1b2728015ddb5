"""Calls of operations with arguments that torch's own tests use, as graphs of ATen operations."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from stopdown.module_calls.mixed_dtypes import NO_OPERANDS
from stopdown.operations import read_operations
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.graph.nodes import operation


@dataclass(frozen=True)
class Sample:
    """One call: its graph, and the tensors that it was made with, in the order of the placeholders."""

    graph: GraphModule
    tensors: tuple[torch.Tensor, ...]

    @property
    def capture(self) -> Capture:
        """The graph as a component call of which every tensor is an input."""
        names = tuple(node.name for node in self.graph.graph.nodes if node.op == "placeholder")
        return Capture(
            self.graph, torch.float32, parameters={}, constants={}, inputs=names,
            kept_buffers=frozenset(), component="Sample", single_outputs=frozenset(), method="",
            answers=(), outputs=0, replaceable=frozenset(), operands=NO_OPERANDS,
        )  # fmt: skip


@functools.cache
def find_infos() -> Mapping[str, list[Any]]:
    """Name of an operation to what torch's tests know of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    switches = torch.backends.disable_global_flags.__globals__
    switches["__allow_nonbracketed_mutation_flag"] = True  # the import forbids torch's switches
    found: dict[str, list[Any]] = {}
    for info in op_db:
        for name in {info.name.rpartition(".")[2], info.aten_name or ""}:
            found.setdefault(name, []).append(info)
    return found


def list_known() -> list[str]:
    """The operations of the table that torch's tests have arguments for."""
    return [name for name in read_operations() if name in find_infos()]


def draw_samples(name: str, most: int) -> Iterator[Sample]:
    """Calls of an operation in fp32, each whose graph holds it."""
    found = 0
    for info in find_infos()[name]:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts in beta
            drawn = list(itertools.islice(draw_arguments(info), 3 * most))
        for sample in drawn:
            traced = trace(info.op, sample)
            if traced and any(operation(n) == name for n in traced.graph.graph.nodes):
                found += 1
                yield traced
            if found == most:
                return


def draw_integer_samples(name: str, most: int) -> Iterator[Sample]:
    """Calls in which integers or booleans stand for one floating tensor, or for all of them."""
    for info in find_infos()[name]:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts in beta
            drawn = list(itertools.islice(draw_arguments(info), most))
        for sample in drawn:
            leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
            for changed, more in _list_integer_arguments(leaves):
                (first, *rest), named = pytree.tree_unflatten(changed, spec)
                given = SimpleNamespace(input=first, args=rest, kwargs={**named, **more})
                traced = trace(info.op, given)
                if traced and any(operation(n) == name for n in traced.graph.graph.nodes):
                    yield traced


def _list_integer_arguments(leaves: list[Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments with integers in place of floating tensors, and further ones by name."""
    floats = {
        number: torch.round(3 * x).long()
        for number, x in enumerate(leaves)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout is torch.strided
    }
    for number, whole in floats.items():
        for one in (whole, whole > 0):
            yield [one if i == number else x for i, x in enumerate(leaves)], {}
    for more in ({}, {"dtype": torch.float32}):
        yield [floats.get(i, x) for i, x in enumerate(leaves)], dict(more)


def draw_arguments(info: Any) -> Iterator[Any]:
    """What `info.sample_inputs` gives, drawn when it is asked for.

    That looks for a test case in the stack twice, and notes for each sample where CUDA was seeded.
    """
    given = iter(info.sample_inputs_func(info, "cpu", torch.float32, False))
    while True:
        torch.default_generator.manual_seed(1234)
        random.seed(1234)
        np.random.seed(1234)
        try:
            yield next(given)
        except StopIteration:
            return


def trace(function: Any, sample: Any) -> Sample | None:
    """The graph of one call; None where it cannot be traced."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    given = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided for x in given):
        return None
    tensors = tuple(x.clone() for x in given)  # what lies around a view is no part of a sample

    def call(*given: torch.Tensor) -> Any:
        waiting = iter(given)
        args, kwargs = pytree.tree_unflatten(
            [next(waiting) if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )
        return function(*args, **kwargs)

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*tensors)
            graph(*tensors)  # `as_strided` may read beyond the copy of a view
    except Exception:  # torch's tracer has many; what cannot be traced is no sample
        return None
    return Sample(graph, tensors)
