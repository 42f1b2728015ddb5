"""Modules that are called alike are traced once, and give the graph that tracing each of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from stopdown.scaling.graph import repeated_modules
from stopdown.scaling.graph.capture import Capture, capture_call, sign_capture
from stopdown.scaling.trials.residual import with_stream
from stopdown.scaling_records import ResidualStream

SIZE, BLOCKS = 4, 6


class Block(nn.Module):
    """A block with a part of its own, whose code counts how often it runs."""

    ran: ClassVar[list[nn.Module]] = []
    heard: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU(), nn.Linear(SIZE, SIZE))
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        self.ran.append(self)
        y = x + self.layers(self.norm(x))
        left, right = y.chunk(2, dim=-1)
        return y, {**others, "halves": [left, right], "given": x}


class Scaled(Block):
    """A block with a number of its own."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        y, others = super().forward(x, others)
        return self.factor * y, others


class Counting(Block):
    """A block that keeps how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        self.calls += 1
        y, others = super().forward(x, others)
        return self.calls * y, others


class Listing(Block):
    """A block that changes what it is given."""

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        others["seen"] = others.get("seen", 0) + 1
        return super().forward(x, others)


class Writing(Block):
    """A block that writes into what it is given."""

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        y, others = super().forward(x, others)
        return x.add_(y), others


class Constant(Block):
    """A block that makes a table of numbers."""

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        y, others = super().forward(x, others)
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(y.dtype), others


class Reaching(Block):
    """A block that reads what is in no argument and no weight of its own."""

    held: Any = None

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        y, others = super().forward(x, others)
        if self.held[0] is None:
            self.held[0] = y
        return y + self.held[0], others


class Numbered(Block):
    """A block with a number, which its code reads where there is a cache."""

    def __init__(self, number: int, cached: bool) -> None:
        super().__init__()
        self.layer_idx, self.cached = number, cached

    def forward(self, x: torch.Tensor, others: dict[str, Any]) -> Any:
        if self.cached:
            x = x * (self.layer_idx + 1)
        return super().forward(x, others)


class Model(nn.Module):
    """Blocks in a row, between two layers."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(make(i) for i in range(BLOCKS))
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        x, others = self.first(x), dict[str, Any]()
        for block in self.blocks:
            x, others = block(x, others)
        return self.last(x), others["halves"], others["given"]


def capture(model: nn.Module, **options: Any) -> tuple[Capture, int]:
    """Capture a call; beside it, how often code of blocks ran."""
    Block.ran.clear()
    made = capture_call(model, (torch.zeros(2, SIZE),), dtype=torch.float16, **options)
    return made, len(Block.ran)


def dump(made: Capture) -> list[Any]:
    """Everything that is read of a capture's nodes."""
    nodes: list[Any] = []
    for node in made.graph.graph.nodes:
        value = node.meta.get("val")
        tensors = value if isinstance(value, (list, tuple)) else [value]
        kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors if x is not None]
        stack = list(node.meta.get("nn_module_stack", {}).items())
        nodes.append((node.name, str(node.target), str(node.args), str(node.kwargs), stack, kinds))
    return [nodes, sign_capture(made), made.single_outputs, made.replaceable, made.parameters]


def capture_each(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Capture:
    """Capture a call with the code of every block run."""
    with monkeypatch.context() as patch:
        patch.setattr(
            repeated_modules.Repeats, "_call", lambda _, tracer, module, trace, *given: trace()
        )
        return capture(model, **options)[0]


def test_blocks_that_are_alike_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a block runs for the first two, whose arguments differ, and the graph is the same."""
    model = Model(lambda i: Block())
    made, ran = capture(model)
    assert ran == 2
    assert dump(made) == dump(capture_each(model, monkeypatch))


def test_blocks_under_casts_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of a residual stream are copied with the blocks that have them."""
    model = Model(lambda i: Block())
    ends = tuple(f"blocks.{i}.layers.2" for i in range(BLOCKS))
    starts = tuple(f"blocks.{i}.layers.0" for i in range(BLOCKS))
    norms = tuple(f"blocks.{i}.norm" for i in range(BLOCKS))
    kept = tuple(f"{norm}.{name}" for norm in norms for name in ("weight", "bias"))
    stream = ResidualStream(("first", *ends), (*starts, "last"), norms, kept, returns=True)
    with with_stream(model, stream, torch.float16) as wide:
        made, ran = capture(model, wide=wide)
        each = capture_each(model, monkeypatch, wide=wide)
    assert ran == 2
    assert dump(made) == dump(each)
    assert torch.float32 in {
        x.meta["val"].dtype for x in made.graph.graph.nodes if x.name == "add_3"
    }


def test_a_block_that_casts_otherwise_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of casts the dtypes count, and the modules that have them."""
    model = Model(lambda i: Block())
    stream = ResidualStream(("blocks.3.layers.2",), ("blocks.4",), returns=True)
    with with_stream(model, stream, torch.float16) as wide:
        made, ran = capture(model, wide=wide)
        each = capture_each(model, monkeypatch, wide=wide)
    assert ran == 4
    assert dump(made) == dump(each)


KINDS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "own numbers": (lambda i: Scaled(factor=1.0 + i % 3), 4),
    "changed modules": (lambda i: Counting(), BLOCKS),
    "changed containers": (lambda i: Listing(), BLOCKS),
    "written arguments": (lambda i: Writing(), BLOCKS),
    "numbers that are read": (lambda i: Numbered(i, cached=True), BLOCKS),
    "constants": (lambda i: Constant(), BLOCKS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_do_more_than_their_nodes_are_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are not alike, or that change what no node says, give the graph of each one's code."""
    make, runs = KINDS[kind]
    model = Model(make)
    made, ran = capture(model)
    each = capture_each(Model(make), monkeypatch)
    assert ran == runs
    assert dump(made) == dump(each)


def test_a_number_that_no_code_reads_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are numbered run once, unless their code asks for the number; and keep it."""
    model = Model(lambda i: Numbered(i, cached=False))
    made, ran = capture(model)
    assert ran == 2
    assert dump(made) == dump(capture_each(model, monkeypatch))
    assert [block.layer_idx for block in model.blocks] == list(range(BLOCKS))
    assert "layer_idx" not in vars(Numbered)


def test_a_block_that_reads_a_value_of_another_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is in no argument is read by the code of each block."""

    def trace(take: Callable[[nn.Module], Capture]) -> Capture:
        held = [None]
        monkeypatch.setattr(Reaching, "held", held)
        return take(Model(lambda i: Reaching()))

    made = trace(lambda model: capture(model)[0])
    assert len(Block.ran) == BLOCKS
    assert dump(made) == dump(trace(lambda model: capture_each(model, monkeypatch)))


def test_hooks_of_others_hear_of_every_call() -> None:
    """A module with hooks that are not Stopdown's is called each time."""
    model = Model(lambda i: Block())
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: Block.heard.append(number))
    Block.heard.clear()
    capture(model)
    assert Block.heard == list(range(BLOCKS))


def test_code_that_fails_on_copies_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose copied parts lead to an error is traced anew, part by part."""
    plain = repeated_modules.Repeats._copy

    def fail(self: Any, *given: Any) -> Any:
        plain(self, *given)
        raise RuntimeError("no copies")

    monkeypatch.setattr(repeated_modules.Repeats, "_copy", fail)
    made, ran = capture(Model(lambda i: Block()))
    assert ran == BLOCKS + 2
    assert made.single_outputs >= {f"blocks.{i}.layers" for i in range(BLOCKS)}
