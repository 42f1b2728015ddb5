"""Faster tracing by `torch.export`: skip intermediate results that capturing a call never reads.

Skipped are a stack trace and tensor metadata for each node, Python code for each graph, and a second search
for sizes that depend on values. Garbage collection would visit every node again and again. Stack traces,
code and the collector took a third of the time (2026-11-21).
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import _trace, exported_program
from torch.fx import GraphModule, graph_module
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from stopdown.interception.patches import Patches

STACK_TRACES_OFF = "do_not_emit_stack_traces"
"""Option of `torch.fx.config` that exists in 2.13.0 but not in 2.11.0."""


@contextlib.contextmanager
def light_tracing() -> Iterator[None]:
    """Make `torch.export` faster while the context is open, by skipping results that capturing never reads.

    Code that is still generated is dropped: `torch.fx` caches each text for tracebacks, 0.7 MiB in a repair
    of a tiny UNet (torch 2.13.0, 2026-11-25). Functions that a version of PyTorch doesn't have aren't
    replaced. Garbage collection is off meanwhile.
    """
    texts = graph_module._loader.eval_cache
    known = frozenset(texts)
    with _use_lazy_graph_module(True), Patches() as patches:
        if gc.isenabled():
            patches.defer(gc.enable)
            gc.disable()
        if hasattr(torch.fx.config, STACK_TRACES_OFF):
            patches.set_attribute(torch.fx.config, STACK_TRACES_OFF, True)
        for owner, name, lighter in LIGHTER:
            if (plain := getattr(owner, name, None)) is not None:
                patches.set_attribute(owner, name, _choose_here(lighter, plain))
        try:
            yield
        finally:
            for name in texts.keys() - known:
                texts.pop(name, None)
                linecache.cache.pop(name, None)


def _choose_here(lighter: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `lighter` in the current thread, and `plain` in all other threads."""
    own = threading.get_ident()

    def choose(*given: Any) -> Any:
        return (lighter if threading.get_ident() == own else plain)(*given)

    return choose


def _extract_nothing(*_: Any) -> None:
    """Replace PyTorch's `_extract_tensor_metadata` by a no-op: `node.meta["val"]` has the same
    information.
    """


_bind: Any = getattr(_trace, "_replace_unbacked_bindings", None)


def _bind_if_any(graph: GraphModule) -> None:
    """Run PyTorch's slow pass over unbacked symbolic sizes only if the traced graph has such sizes."""
    if any("unbacked_bindings" in node.meta for node in graph.graph.nodes):
        _bind(graph)


LIGHTER = (
    (proxy_tensor, "_extract_tensor_metadata", _extract_nothing),
    (exported_program, "_create_graph_module_for_export", _make_graph_module),
    (_trace, "_replace_unbacked_bindings", _bind_if_any),
)
"""Functions of PyTorch, by module and name, and what replaces each while a call is traced."""
