"""Tests of captures: a component call as a flat graph with dtypes, paths and names."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from models.snapshots import assert_untouched
from models.uncapturable_models import Branching, Leaving
from stopdown.errors import CaptureError, warn_user
from stopdown.operations import read_calls
from stopdown.scaling.graph.capture import (
    capture_call,
    find_kept_buffers,
    flatten_call,
    module_path,
    note_answers,
)
from stopdown.scaling.graph.light_tracing import STACK_TRACES_OFF
from stopdown.scaling.graph.nodes import operation
from stopdown.scaling.rescale import rescale_


class Attention(nn.Module):
    """A call with a keyword, a nested argument, a flag and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *, tables: Any = None, scaled: bool = False) -> Any:
        x = self.second(self.first(x))
        if scaled:
            x = x * self.frequencies.to(x.dtype)
        return {"sample": x + tables[0].to(x.dtype)}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class Autocast(nn.Module):
    """A region under autocast and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            y = x.float().exp()
        with torch.no_grad():
            z = self.linear(x)
        return y + z


class Positions(nn.Module):
    """A table that is in the checkpoint for three rows, and computed for any other number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", self.compute(3))
        self.register_buffer("offset", torch.ones(4))

    def compute(self, rows: int) -> torch.Tensor:
        table = torch.zeros(rows + 1, 4)
        table.data[1:].copy_(torch.arange(rows)[:, None].expand(rows, 4))
        return table[1:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table if len(x) == len(self.table) else self.compute(len(x))
        return self.linear(x) + table.to(x.dtype) + self.offset


def _call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, 4),), {"tables": (torch.ones(4), None), "scaled": True}


def test_every_value_shows_the_dtype_it_will_have() -> None:
    """A module in fp32 captured in fp16 shows fp16 values; the module itself is not touched."""
    module = Attention()
    args, kwargs = _call()
    capture = capture_call(module, args, kwargs, dtype=torch.float16)
    linears = [n for n in capture.graph.graph.nodes if operation(n) == "linear"]
    assert [n.meta["val"].dtype for n in linears] == [torch.float16] * 2
    assert [module_path(n) for n in linears] == ["first", "second"]
    assert module.first.weight.dtype == torch.float32


def test_tied_weights_have_one_name() -> None:
    """Two placeholders of one tensor stand under the tensor's first name."""
    args, kwargs = _call()
    capture = capture_call(Attention(), args, kwargs, dtype=torch.float16)
    weights = [name for name in capture.parameters.values() if name.endswith("weight")]
    assert weights == ["first.weight"] * 2


def test_buffers_outside_the_checkpoint_keep_their_dtype() -> None:
    """Tables that the code computes for itself stay fp32 beside fp16 weights."""
    module = Attention()
    assert find_kept_buffers(module) == {"frequencies"}
    args, kwargs = _call()
    capture = capture_call(module, args, kwargs, dtype=torch.float16)
    name = next(k for k, v in capture.parameters.items() if v == "frequencies")
    node = next(n for n in capture.graph.graph.nodes if n.name == name)
    assert node.meta["val"].dtype == torch.float32


class Table(nn.Module):
    """Multiplies by a table that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.table


def test_a_buffer_that_a_product_reads_is_cast_with_the_weights() -> None:
    """Kept in fp32 it would meet fp16: tracing takes that, and a real run does not."""
    module = Table()
    assert find_kept_buffers(module) == {"table"}
    capture = capture_call(module, (torch.randn(2, 4),), dtype=torch.float16)
    assert capture.kept_buffers == frozenset()
    floats = [n.meta["val"].dtype for n in capture.graph.graph.nodes if "val" in n.meta]
    assert set(floats) == {torch.float16}


def test_bound_methods_are_calls() -> None:
    """A method of a module is captured like its forward."""
    capture = capture_call(Attention().encode, (torch.randn(3, 4),), dtype=torch.float16)
    assert [operation(n) for n in capture.graph.graph.nodes if n.op == "call_function"] == [
        "linear"
    ]


def test_inputs_are_named_in_the_order_of_the_call() -> None:
    """The tensors of a call, nested ones included, are as many as the graph's inputs."""
    args, kwargs = _call()
    capture = capture_call(Attention(), args, kwargs, dtype=torch.float16)
    assert len(capture.inputs) == len(flatten_call(args, kwargs)) == 2


def test_regions_are_walked_into() -> None:
    """What stands under autocast or no_grad is part of the flat graph."""
    capture = capture_call(Autocast(), (torch.randn(2, 4),), dtype=torch.float16)
    names = [operation(n) for n in capture.graph.graph.nodes if n.op == "call_function"]
    assert {"exp", "linear", "add"} <= set(names)
    assert not any("wrap" in name for name in names)


@pytest.mark.parametrize(("bias", "taken"), [(9.0, "x"), (-9.0, "-x")])
def test_a_branch_on_values_goes_as_it_really_went(bias: float, taken: str) -> None:
    """A real run answers the question; what was asked stays in the graph behind the outputs."""
    module = Branching()
    module.linear.bias.data.fill_(bias)
    capture = capture_call(module, (torch.randn(2, 2),), dtype=torch.float16)
    names = [operation(node) for node in capture.graph.graph.nodes]
    assert ("neg" in names) == (taken == "-x")
    assert "gt" in names
    assert (capture.answers, capture.outputs) == ((("__bool__", taken == "x"),), 1)


class ClampingInHalf(nn.Module):
    """Asks in fp16 alone whether a value is NaN or Inf, and anywhere for the sign of a sum."""

    def __init__(self, *, asks_too: bool) -> None:
        super().__init__()
        self.linear, self.asks_too = nn.Linear(2, 2), asks_too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = -x if self.asks_too and x.square().sum() >= 0 else x
        if x.dtype == torch.float16 and (torch.isinf(x).any() or ~torch.isfinite(x).all()):
            x = x.clamp(-64504, 64504)
        return x.exp() if self.asks_too and x.sum() > 1e9 else x


@pytest.mark.parametrize("asks_too", [False, True])
def test_a_test_for_inf_in_fp16_alone_is_answered_for_finite_values(asks_too: bool) -> None:
    """A run in fp32 is not asked; the answers to what it was asked stay with their questions."""
    module = ClampingInHalf(asks_too=asks_too)
    capture = capture_call(module, (torch.randn(2, 2),), dtype=torch.float16)
    names = {operation(node) for node in capture.graph.graph.nodes}
    assert not names & {"clamp", "exp"}
    assert ("neg" in names) == asks_too
    assert [answer for _, answer in capture.answers] == [True, False] * asks_too


def test_another_question_in_fp16_alone_is_refused() -> None:
    """What depends on values is not known without a run that was asked."""

    class AsksInHalf(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return -x if x.dtype == torch.float16 and x.sum() > 0 else x

    with pytest.raises(CaptureError):
        capture_call(AsksInHalf(2, 2), (torch.randn(2, 2),), dtype=torch.float16)


ASKING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item() > 0,
    "__bool__": lambda x: bool(x.sum() > 0),
    "__int__": lambda x: int(x.sum()),
    "__float__": lambda x: float(x.sum()),
    "__index__": lambda x: [0, 1][(x.sum() > 0).long()],
    "tolist": lambda x: x.tolist()[0][0] > 0,
    "__contains__": lambda x: 1 in x,
    "is_nonzero": lambda x: x.sum().is_nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: x.allclose(x),
}


class Asking(nn.Module):
    """A branch on what a tensor answers to one question."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.linear, self.question = nn.Linear(2, 2), question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if ASKING[self.question](x) else -self.linear(x)


def test_every_question_is_asked_below() -> None:
    """Those of the table of operations."""
    assert read_calls().asks == set(ASKING)


@pytest.mark.parametrize("question", ASKING)
def test_each_question_is_answered_by_a_real_run(question: str) -> None:
    """A call whose code asks it becomes a graph."""
    capture = capture_call(Asking(question), (torch.ones(2, 2),), dtype=torch.float16)
    names = [operation(node) for node in capture.graph.graph.nodes]
    assert ("linear" in names, "neg" in names) == (True, False)


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("module", [Autocast(), Leaving()])
def test_what_tracing_switches_off_is_as_it_was(module: nn.Module, collects: bool) -> None:
    """Stack traces, lazy graphs and the collector of garbage, after a failure as well."""
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(CaptureError):
            capture_call(module, (torch.randn(2, 4),), dtype=torch.float16)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert not getattr(torch.fx.config, STACK_TRACES_OFF, False)
    assert not torch.fx._lazy_graph_module._use_lazy_graph_module_flag


def test_a_warning_of_another_thread_is_heard_while_a_call_is_traced() -> None:
    """Tracing ignores warnings of the whole process, so one of Stopdown's waits until it is over."""
    other = Thread(target=warn_user, args=("Said meanwhile.",))

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if other.ident is None:
                other.start()
            other.join(0.5)
            return super().forward(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture_call(Model(4, 4), (torch.randn(2, 4),), dtype=torch.float16)
        other.join()
    assert "Said meanwhile." in [str(x.message) for x in caught]


def test_tracing_keeps_no_stack_traces() -> None:
    """They take a seventh of the time of a large model, and nobody reads them."""
    graph = capture_call(Attention(), *_call(), dtype=torch.float16).graph
    assert not any(node.stack_trace for node in graph.graph.nodes)


def test_what_is_written_through_data_is_in_the_graph() -> None:
    """Tracing does not see `x.data[...].copy_(y)`: a table made in `forward` would be a constant."""
    capture = capture_call(Positions(), (torch.zeros(5, 4),), dtype=torch.float32)
    assert not capture.constants
    assert "copy_" in [operation(node) for node in capture.graph.graph.nodes]


def test_a_table_that_another_size_does_without_is_named() -> None:
    """A buffer of the checkpoint that is read at one size only; one that is always read is not."""
    capture = capture_call(Positions(), (torch.zeros(3, 4),), dtype=torch.float16)
    assert capture.replaceable == {"table"}


class Unprintable:
    """An argument without a text, as flex attention's masks are while they are traced."""

    def __repr__(self) -> str:
        raise TypeError("unsupported format string")


class Part(Positions):
    """Takes another argument as well, which it ignores."""

    def forward(self, x: torch.Tensor, ignored: object = None) -> torch.Tensor:
        return super().forward(x)


class Inside(nn.Module):
    """Gives a part with a table an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.part(x, Unprintable())
        return made


def test_arguments_of_parts_are_told_apart_without_their_texts() -> None:
    """A part with a table is called with an object whose text cannot be made."""
    capture = capture_call(Inside(), (torch.zeros(3, 4),), dtype=torch.float16)
    assert capture.replaceable == {"part.table"}


def test_what_is_no_module_is_refused() -> None:
    """A plain function has no parameters to scale."""
    with pytest.raises(CaptureError, match="is neither a module nor a bound method of one"):
        capture_call(torch.sin, (torch.ones(1),), dtype=torch.float16)


class Drawing(nn.Module):
    """Adds noise of a generator that it is given and of the global one; reads a value on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x = self.linear(x) + torch.randn(x.shape, generator=generator) + torch.randn(x.shape)
        return x * 2 if x.mean().item() > 9 else x


def test_a_capture_draws_no_numbers_of_its_caller() -> None:
    """Generators that are given, and the global one, are where they were: the next call draws the same."""
    generator, module = torch.Generator().manual_seed(1), Drawing()
    before = generator.get_state(), torch.get_rng_state()
    kwargs = {"generator": generator}
    with contextlib.suppress(CaptureError):
        capture_call(module, (torch.zeros(2, 4),), kwargs, dtype=torch.float16)
    note_answers(module, (torch.zeros(2, 4),), kwargs)
    after = generator.get_state(), torch.get_rng_state()
    assert all(map(torch.equal, before, after))


def test_a_capture_leaves_no_code_behind() -> None:
    """`torch.fx` keeps the text of each graph that it writes, for tracebacks."""
    texts = torch.fx.graph_module._loader.eval_cache
    before = dict(texts)
    capture_call(
        nn.Sequential(nn.Linear(4, 4), nn.GELU()), (torch.zeros(1, 4),), dtype=torch.float16
    )
    assert texts == before


class Misfit(nn.Module):
    """Adds sizes that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_code_that_fails_without_values_writes_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch logs a traceback for each such error; here it is raised, and said once."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(CaptureError, match="broadcast"):
            capture_call(Misfit(), (torch.ones(4),), dtype=torch.float16)
    finally:
        log.removeHandler(caplog.handler)
    assert not [x for x in caplog.records if x.name == log.name]


MAPS: dict[str, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []


class Recorder:
    """An attention processor that keeps what it makes in variables of its file."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        from diffusers.models.attention_processor import AttnProcessor2_0

        if "first" not in MAPS:
            MAPS["first"] = hidden_states.mean()
        SEEN.append(hidden_states)
        made: torch.Tensor = AttnProcessor2_0()(attn, hidden_states, **kwargs)
        return made + MAPS["first"] * 0


def test_a_global_that_is_filled_is_named_and_keeps_no_fake_tensor() -> None:
    """`rescale_` ended in a raw error of the compiler, and the program computed with fake tensors after."""
    from diffusers.models.attention_processor import Attention

    MAPS.clear()
    SEEN[:] = [torch.ones(1)]
    module = Attention(query_dim=16, heads=2, dim_head=8, processor=Recorder())  # type: ignore[arg-type]
    module.eval().requires_grad_(False)
    x = torch.randn(1, 4, 16)
    with assert_untouched({"attention": module}), pytest.raises(CaptureError) as raised:
        capture_call(module, (x,), dtype=torch.float16)
    assert f"keeps tensors in {__name__}.MAPS, {__name__}.SEEN, outside" in raised.value.what
    assert not MAPS
    assert len(SEEN) == 1
    wanted = module(x)
    rescaling = rescale_(module, x)
    assert not rescaling.exponents
    assert torch.equal(module(x), wanted)
    assert not any(isinstance(x, FakeTensor) for x in (*MAPS.values(), *SEEN))
