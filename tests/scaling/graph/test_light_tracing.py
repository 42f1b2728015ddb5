"""Calls are traced without what nobody reads, and PyTorch is as it was afterwards."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn
from torch.export import _trace, exported_program
from torch.fx.experimental import proxy_tensor

from stopdown.errors import CaptureError
from stopdown.scaling.graph import light_tracing
from stopdown.scaling.graph.capture import capture_call

REPLACED = (
    (proxy_tensor, "_extract_tensor_metadata"),
    (exported_program, "_create_graph_module_for_export"),
    (_trace, "_replace_unbacked_bindings"),
)


class Untraceable(nn.Linear):
    """Raises while it is traced."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no graph")


def test_no_node_has_metadata_that_its_value_has_as_well() -> None:
    """Metadata and code took a sixth of the time of a capture."""
    capture = capture_call(nn.Linear(4, 4), (torch.ones(2, 4),), dtype=torch.float16)
    assert all(node.meta.get("tensor_meta") is None for node in capture.graph.graph.nodes)
    assert all("val" in x.meta for x in capture.graph.graph.nodes if x.op != "output")


def test_functions_of_pytorch_are_as_they_were() -> None:
    """Also after code that can't be traced."""
    before = [getattr(owner, name) for owner, name in REPLACED]
    with light_tracing.light_tracing():
        inside = [getattr(owner, name) for owner, name in REPLACED]
    assert not any(x is y for x, y in zip(inside, before, strict=True))
    with pytest.raises(CaptureError):
        capture_call(Untraceable(), (torch.ones(2, 4),), dtype=torch.float16)
    assert [getattr(owner, name) for owner, name in REPLACED] == before


def test_another_thread_gets_metadata_while_a_call_is_traced() -> None:
    """What compiles at the same time reads it."""
    found = list[object]()

    def extract() -> None:
        found.append(proxy_tensor._extract_tensor_metadata(torch.ones(2)))

    with light_tracing.light_tracing():
        other = Thread(target=extract)
        other.start()
        other.join()
        extract()
    assert found[0] is not None
    assert found[1] is None


def test_a_pytorch_without_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions have some of them by other names; the graph is the same."""
    module, given = nn.Linear(4, 4), (torch.ones(2, 4),)
    expected = capture_call(module, given, {}, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(light_tracing, "LIGHTER", ())
        patch.setattr(light_tracing, "STACK_TRACES_OFF", "a_switch_that_is_not_there")
        found = capture_call(module, given, {}, dtype=torch.float16)
    assert [str(x) for x in found.graph.graph.nodes] == [str(x) for x in expected.graph.graph.nodes]
    assert not hasattr(torch.fx.config, "a_switch_that_is_not_there")
