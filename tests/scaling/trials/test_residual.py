"""An fp32 residual stream: exact in fp32, finite and nearer in fp16, matrices in fp16, and gone after."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.nn import functional

from models.rescaling_models import WAYS, make_example, make_overflowing, run_calls, scale_weights
from models.snapshots import compare_snapshot, take_snapshot
from stopdown.errors import CaptureError, OptionError, ScalingError
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.mixed_dtypes import NO_OPERANDS
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph.capture import capture_call, module_path
from stopdown.scaling.graph.nodes import is_kind
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import call_search, measurement, residual
from stopdown.scaling.trials.call_search import plan_stream
from stopdown.scaling.trials.measurement import Captures
from stopdown.scaling.trials.observed_calls import ObservedCalls
from stopdown.scaling.trials.residual import demand_agreement, find_stream, open_fp32_modules

CASES = ["CogVideoX rotary", "T5", "SD UNet", "Flux"]


def measure_error(module: torch.nn.Module, calls: list[Any], dtype: torch.dtype, by: Any) -> float:
    """Relative 2-norm error against fp32 of the module cast to a dtype; infinite with NaN."""
    reference = run_calls(calls, torch.float32)
    cast = cast_(module, dtype, by)
    outputs = run_calls(calls, dtype)
    cast.undo()
    if not all(bool(x.isfinite().all()) for x in outputs):
        return float("inf")
    return max(relative_l2(x, y) for x, y in zip(outputs, reference, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_an_fp32_residual_is_exact_finite_and_gone(name: str) -> None:
    """In fp32 every bit stays; in fp16 it is finite and nearer than bf16; undo restores every bit."""
    module, calls = make_overflowing(name)
    before, reference = take_snapshot(module), run_calls(calls, torch.float32)
    bf16 = measure_error(module, calls, torch.bfloat16, None)
    rescaling = rescale_(module, calls=calls, residual="fp32")
    assert rescaling.residual == "fp32"
    assert rescaling.fp32_modules == ()
    assert all(map(torch.equal, run_calls(calls, torch.float32), reference))
    assert measure_error(module, calls, torch.float16, rescaling) < bf16 / 6
    rescaling.undo()
    assert compare_snapshot(before, module) == []


class Shortcuts(torch.nn.Module):
    """A stream that a small layer and a large one read with no norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
        self.shortcut = torch.nn.Linear(64, 8)
        self.wide: torch.nn.Module | None = torch.nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.down(self.up(self.norm(x)).relu())
        moved = torch.cat([x, x]).transpose(0, 1)
        found = self.shortcut(moved)
        return found if self.wide is None else torch.cat([found, self.wide(moved)], -1)


def test_small_layers_that_read_the_stream_itself_are_in_fp32() -> None:
    """They are what its loose bounds scale down most; one of more than 3 % of the work stays in fp16."""
    capture = capture_call(Shortcuts().eval(), (torch.zeros(4, 3, 8),), {}, dtype=torch.float16)
    kept = find_stream(Shortcuts(), [capture], rows=True)
    assert {"shortcut"} == set(kept.cast_input_up) - {"norm"}
    assert {"shortcut.weight", "shortcut.bias"} <= set(kept.kept)
    assert {"up", "down", "wide"} <= set(kept.cast_input_down)
    first = Shortcuts()
    for name in ("embed", "norm", "up", "down", "wide"):
        delattr(first, name)  # the class reports the dtype of its first parameter
    assert "shortcut.weight" not in find_stream(first, [capture], rows=True).kept
    plain = find_stream(Shortcuts(), [capture])
    assert "shortcut" in plain.cast_input_down
    assert "shortcut.weight" not in plain.kept


def test_a_call_of_another_size_keeps_the_stream_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which layers are small depends on sizes; calls that are repaired together need the same casts."""
    module, observed = Shortcuts().eval().requires_grad_(False), ObservedCalls(residual="fp32")
    for length, share in ((3, 0.03), (5, 0.0)):
        monkeypatch.setattr(residual, "MOST_WIDE_FLOPS", share)
        x = torch.full((4, length, 8), 1e4)
        observed.observe(module, ComponentCall(Callee("", module, "forward", "call"), (x,)))
    assert len(observed.measured) == 2
    assert observed.stream is not None
    assert "shortcut.weight" in observed.stream.kept


def test_a_lora_on_such_a_layer_is_in_fp32() -> None:
    """It is given the stream, which fp16 does not hold."""
    torch.manual_seed(0)
    module, x = Shortcuts().eval().requires_grad_(False), torch.randn(4, 3, 8)
    module.embed.weight.mul_(2.0**20)
    module.shortcut.weight.mul_(2.0**-10)
    module.wide = None  # what reads the stream in fp16 would scale it down
    layer = inject_adapter_in_model(
        LoraConfig(target_modules=["shortcut"], init_lora_weights=False), copy.deepcopy(module)
    )
    adapter = {n: p * 2.0**-6 for n, p in layer.state_dict().items() if "lora_" in n}
    layer.load_state_dict(adapter, strict=False)
    expected = layer.requires_grad_(False)(x)
    rescaling = rescale_(module, (x,), residual="fp32")
    cast_(module, torch.float16, rescaling)
    inject_adapter_in_model(LoraConfig(target_modules=["shortcut"]), module)
    module.load_state_dict({n: p.half() for n, p in adapter.items()}, strict=False)
    for name, parameter in module.requires_grad_(False).named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half()
    assert relative_l2(module(x.half()).float(), expected) < 2e-3


@pytest.mark.thorough
def test_it_is_nearer_than_without() -> None:
    """On the SD UNet, whose rescaled error is the largest, the fp32 stream takes a third of it off."""
    errors = {}
    for kept in (None, "fp32"):
        module, calls = make_overflowing("SD UNet")
        rescaling = rescale_(module, calls=calls, residual=kept)
        errors[kept] = measure_error(module, calls, torch.float16, rescaling)
    assert errors["fp32"] < 0.67 * errors[None]


@pytest.mark.thorough
def test_products_of_matrices_stay_in_fp16() -> None:
    """Every linear of the transformer computes in fp16 but the three outside of its blocks that
    multiply one row: they read the timestep. Its norms compute in fp32."""
    module, calls = make_overflowing("CogVideoX rotary")
    cast_(module, torch.float16, rescale_(module, calls=calls, residual="fp32"))
    linears = {n: x for n, x in module.named_modules() if isinstance(x, torch.nn.Linear)}
    wide = {name for name, x in linears.items() if x.weight.dtype != torch.float16}
    assert wide == {"time_embedding.linear_1", "time_embedding.linear_2", "norm_out.linear"}
    norm: Any = module.get_submodule("transformer_blocks.0.norm1.norm")
    assert norm.weight.dtype == torch.float32


FP32_MODULES = {"transformer_blocks.0.attn1.to_q": False, "transformer_blocks.0.attn1": True}
"""Modules of a CogVideoX transformer that may stay in fp32, to whether they write the stream."""


@pytest.mark.thorough
@pytest.mark.parametrize("path", FP32_MODULES)
def test_an_fp32_module_beside_an_fp32_stream_gets_fp32(path: str) -> None:
    """Its inputs are not cast to fp16 inside it, and what it adds to the stream stays fp32."""
    module, calls = make_overflowing("CogVideoX rotary")
    bf16 = measure_error(module, calls, torch.bfloat16, None)
    rescaling = rescale_(module, calls=calls, residual="fp32")
    seen: list[torch.dtype] = []
    scaling = replace(rescaling.scaling, fp32_modules=(path,))
    cast = cast_(module, torch.float16, scaling)

    def note(owner: Any, args: Any, output: Any) -> None:
        seen.extend(x.dtype for x in iterate_tensors(output))

    known = {"__name__": "stopdown", "iterate_tensors": iterate_tensors}
    see = FunctionType(
        note.__code__, known, closure=note.__closure__
    )  # a user's takes exponents off
    after = module.get_submodule(path).register_forward_hook(see)
    outputs = run_calls(calls, torch.float16)
    after.remove()
    cast.undo()
    assert set(seen) == {torch.float32 if FP32_MODULES[path] else torch.float16}
    reference = run_calls(calls, torch.float32)
    assert max(map(relative_l2, outputs, reference)) < bf16 / 6


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "bits", "opened", "most"),
    [("CogVideoX sinusoidal", 15, "patch_embed", 0.0), ("PixArt", 9, ".attn2", 0.02)],
)
def test_products_inside_an_fp32_module_are_done_in_fp16(
    name: str, bits: int, opened: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums with a table that nothing scales are fp32, and the linears beside them are not."""
    module, calls = make_example(name)
    scale_weights(module, WAYS["encoder projection"], bits)
    before, reference = take_snapshot(module), run_calls(calls, torch.float32)
    bf16 = measure_error(module, calls, torch.bfloat16, None)
    rescaling = rescale_(module, calls=calls)
    stream = rescaling.scaling.stream
    assert stream is not None
    assert [path.endswith(opened) for path in stream.cast_output_down] == [True]
    assert (rescaling.fp32_modules, rescaling.residual) == ((), "native")
    assert rescaling.scaling.fp32_flops <= most
    assert all(map(torch.equal, run_calls(calls, torch.float32), reference))
    assert measure_error(module, calls, torch.float16, rescaling) < bf16 / 6
    cast = cast_(module, torch.float16, rescaling)
    inside = module.get_submodule(stream.cast_output_down[0])
    linears = [x for x in inside.modules() if isinstance(x, torch.nn.Linear | torch.nn.Conv2d)]
    assert {x.weight.dtype for x in linears} == {torch.float16}
    cast.undo()
    rescaling.undo()
    assert compare_snapshot(before, module) == []
    monkeypatch.setattr(call_search, "open_fp32_modules", lambda *given: None)
    assert rescale_(module, calls=calls).fp32_modules == stream.cast_output_down


def test_an_fp32_module_without_products_inside_stays_one() -> None:
    """There is nothing to open in a linear."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert open_fp32_modules(module, None, ("0",), []) is None


def test_an_unknown_residual_is_refused() -> None:
    """The message says what there is."""
    with pytest.raises(OptionError, match='residual="fp32"'):
        rescale_(torch.nn.Linear(2, 2), (torch.ones(1, 2),), residual="fp64")


class Mixing(torch.nn.Module):
    """What a stream that was put wrongly does: it gives a product or a norm fp32 beside fp16."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "linear":
            return functional.linear(x.float(), self.inner.weight).to(x.dtype)
        if self.kind == "layer_norm":
            return functional.layer_norm(x.float(), (4,), self.inner.bias).to(x.dtype)
        return self.inner(x).float() if self.kind == "output" else self.inner(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("linear", r"Mixing: \(linear\) would be given fp32 and fp16 together"),
        ("layer_norm", r"Mixing: \(layer_norm\) would be given fp32 and fp16 together"),
        ("output", r"Mixing would return another dtype than without it"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(kind: str, said: str) -> None:
    """Tracing takes operands of two dtypes; a real run does not."""
    x = (torch.randn(2, 4),)
    plain, streamed = (
        capture_call(Mixing(k), x, dtype=torch.float16, operands=NO_OPERANDS) for k in ("", kind)
    )
    demand_agreement(plain, plain)
    with pytest.raises(ScalingError, match=said):
        demand_agreement(plain, streamed)


class WideBehindAngle(torch.nn.Module):
    """An angle, whose tangent nothing may scale, and an output that fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.atan(self.embed(x) * 9e4))


def test_a_wide_output_behind_fp32_sums_of_the_whole_module() -> None:
    """What it returns stays fp32: cast down before its exponent is taken off, or after, it is Inf."""
    torch.manual_seed(0)
    module = WideBehindAngle().eval().requires_grad_(False)
    module.out.weight.mul_(2.0**20)
    x = torch.randn(3, 4)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    stream = rescaling.scaling.stream
    assert stream is not None
    assert (stream.cast_output_down, list(rescaling.scaling.outputs)) == (("",), [0])
    assert torch.equal(module(x), reference)
    with cast_(module, torch.float16, rescaling):
        output = module(x.half())
    assert output.dtype == torch.float32
    assert output.isfinite().all()


SPLITS = {
    "chunk": lambda x: x.chunk(2, dim=-1),
    "split": lambda x: x.split(x.shape[-1] // 2, dim=-1),
    "unbind": lambda x: x.unflatten(-1, (2, -1)).unbind(-2),
    "slices": lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
}
PRODUCTS = {
    "sdpa": functional.scaled_dot_product_attention,
    "matmul": lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v,
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v),
    "baddbmm": lambda q, k, v: (
        torch.baddbmm(
            torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype), q, k.transpose(1, 2)
        ).softmax(-1)
        @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(-1), v
    ),
}


class _FusedCross(torch.nn.Module):
    """Cross attention with norms of query and key, whose key and value are one projection of text."""

    def __init__(self, split: Any, product: Any) -> None:
        super().__init__()
        self.enter, self.text = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.norm, self.text_norm = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
        self.to_q, self.to_kv = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32)
        self.to_out = torch.nn.Linear(16, 16)
        self.split, self.product = split, product

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x, text = self.enter(x), self.text(text)
        text = text + self.text_norm(text)
        key, value = self.split(self.to_kv(text))
        query = functional.rms_norm(self.to_q(self.norm(x)), (16,))
        x = x + self.to_out(self.product(query, functional.rms_norm(key, (16,)), value))
        return self.to_out(self.norm(x))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("split", SPLITS)
def test_parts_of_one_projection_have_the_dtype_of_the_others(split: str, product: str) -> None:
    """Query, key and value have one dtype under a stream, however a projection of several is split."""
    torch.manual_seed(0)
    module = _FusedCross(SPLITS[split], PRODUCTS[product]).eval().requires_grad_(False)
    for layer in (module.enter, module.to_out):
        layer.weight.mul_(2.0**12)
    x, text = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    call = (module, (x, text), {})
    stream = plan_stream(module, [call], Captures())
    assert "to_kv" in stream.cast_input_down
    assert not {"to_q", "to_kv"} & {*stream.cast_output_up}
    expected = module(x, text)
    rescaling = rescale_(module, calls=[call], residual="fp32")
    cast_(module, torch.float16, rescaling)
    found = module(x.half(), text.half())
    assert relative_l2(found.float(), expected) < 0.004


def test_a_stream_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not run as it is has no answers: the stream is refused, and nothing is raised."""
    torch.manual_seed(0)
    module = _FusedCross(SPLITS["chunk"], PRODUCTS["sdpa"]).eval().requires_grad_(False)
    call = (module, (torch.randn(2, 5, 16), torch.randn(2, 3, 16)), {})

    def fail(*given: Any) -> Any:
        raise RuntimeError("Expected query, key, and value to have the same dtype")

    def refuse(*given: Any, **options: Any) -> Any:
        if "wide" in options:
            raise CaptureError("it can't be captured")
        return capture_call(*given, **options)

    monkeypatch.setattr(measurement, "note_answers", fail)
    monkeypatch.setattr(measurement, "capture_call", refuse)
    with pytest.raises(ScalingError, match="it can't be captured"):
        plan_stream(module, [call], Captures())


def test_a_stream_is_no_rewriting_of_the_graph_without_it() -> None:
    """T5's norms cast their result to their input's dtype: the graph in fp16 holds fp16, whatever comes.

    So each call is captured with and without its stream. Casts put into the first graph would leave the
    stream in fp16 behind every norm.
    """
    module, calls = make_example("T5")
    call, captures = calls[0], Captures()
    stream = plan_stream(module, [call], captures)
    plain, streamed = captures.take(call, None), captures.take(call, stream)
    assert len(_list_halving_casts(plain)) > 0 == len(_list_halving_casts(streamed))


def _list_halving_casts(capture: Any) -> list[str]:
    """The modules in which the code of a layer norm casts to fp16."""
    return [
        path
        for node in capture.graph.graph.nodes
        if is_kind(node, "cast") and node.meta["val"].dtype == torch.float16
        if (path := module_path(node)).endswith("layer_norm")
    ]
