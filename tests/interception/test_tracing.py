"""Whether a call is traced."""

from __future__ import annotations

import threading

import torch
from torch import nn

from stopdown.interception.tracing import is_traced, without_compiler


def test_code_is_traced_while_it_is_exported() -> None:
    """A plain call of the same code is not."""
    seen = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(is_traced())
            return x + 1

    module = Asking()
    module(torch.ones(2))
    torch.export.export(module, (torch.ones(2),), strict=False)
    assert not seen[0]
    assert seen[1:]
    assert all(seen[1:])


def test_the_compiler_is_on_again_after_the_last_of_several_threads() -> None:
    """The one that came second found it off, and left it off for the whole process."""
    seen = []

    def note(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(torch.sin, backend=note)
    is_in, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with without_compiler():
            is_in.set()
            may_leave.wait()

    thread = threading.Thread(target=stay)
    with without_compiler():
        thread.start()
        is_in.wait()
    compiled(torch.ones(2))
    before = len(seen)
    may_leave.set()
    thread.join()
    compiled(torch.ones(2))
    assert (before, len(seen)) == (0, 1)
