"""Tests of each repair on faults that need it, and of what is told when none can help."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from models import pipeline_calls
from models.drawn_graphs import RandomGraph
from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.errors import NonFiniteError, StopdownWarning
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.numerics import relative_l2
from stopdown.records import ComponentPlan, Scaling
from stopdown.runtime import fault_handler
from stopdown.runtime.guard import Guard, guard
from stopdown.runtime.repairs import Component, name_action
from stopdown.runtime.session import Session

MODULE_PATH = "transformer_blocks.1.ff"


def make_pipeline(name: str, dtype: torch.dtype = torch.float16) -> Any:
    """A pipeline that has run once."""
    return pipeline_calls.make_used_pipeline(name, dtype=dtype)


def run_faulty(name: str, component: str, **fault: Any) -> tuple[Guard, float]:
    """The guard after a run with a fault, and the distance of its pixels from those of fp32."""
    is_bug = fault["kind"] not in ("range", "clamp")
    wide, pipe = make_pipeline(name, torch.float32), make_pipeline(name)
    with inject(wide, component, **({"step": 99} if is_bug else fault)):
        reference = call_pipeline(wide, name)
    with (
        assert_untouched(pipe),
        inject(pipe, component, **fault),
        guard(pipe, announce=quiet) as handle,
    ):
        pixels = call_pipeline(pipe, name)
    return handle, float(np.sqrt(np.mean((pixels - reference) ** 2)))


def have_bf16(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    """As on a device with bf16 of its own, or without."""
    monkeypatch.setattr(Session, "has_bf16", lambda *_: answer)


@pytest.mark.usefixtures("each_device")
def test_a_module_with_a_fault_inside_is_kept_in_fp32() -> None:
    """NaN that one module writes in fp16 alone: it goes to fp32, and everything else stays."""
    handle, error = run_faulty(
        "cogvideox", "transformer", step=1, kind="frame", module_path=MODULE_PATH, lasting=True
    )
    (repair,) = handle.repairs
    assert (repair.action, repair.module_path) == ("fp32-module", f"transformer:{MODULE_PATH}")
    assert (repair.kind, repair.step, repair.replays, repair.tried) == ("written", 1, 1, ())
    assert "only this module runs in fp32" in repair.reason
    assert error < 2e-3
    (seen,) = (call for call in handle.record.calls if call.component == "transformer")
    assert seen.precisions == ("fp16", "fp32")


@pytest.mark.usefixtures("each_device")
def test_a_long_repair_is_announced_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large component the fault is told at once, then once what was done; of a small one only that."""
    told: list[str] = []
    for large in (1, 10**8):
        monkeypatch.setattr(fault_handler, "LARGE", large)
        pipe = make_pipeline("cogvideox")
        fault = inject(pipe, "transformer", step=0, kind="frame", lasting=True)
        with fault, guard(pipe, announce=told.append):
            call_pipeline(pipe, "cogvideox")
    before, *after = told
    assert before.startswith("`transformer` returned ")
    assert "at step 1 of " in before
    assert "Looking for the cause and a repair: with 0.0 billion parameters" in before
    assert len(after) == 2
    assert after[0] == after[1]


@pytest.mark.usefixtures("each_device")
def test_a_warning_names_the_line_that_called_the_pipeline() -> None:
    """Not a line of Stopdown or PyTorch: whoever reads it finds the call in a file of theirs."""
    pipe = make_pipeline("cogvideox")
    fault = inject(pipe, "transformer", step=1)
    with fault, guard(pipe), pytest.warns(StopdownWarning) as caught:
        call_pipeline(pipe, "cogvideox")
    assert [x.filename for x in caught] == [pipeline_calls.__file__]


@pytest.mark.usefixtures("each_device")
def test_a_repair_that_changes_shapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite frames that are fewer than the call at fault gave are no repair; the next one is tried."""
    have_bf16(monkeypatch, True)
    call = Component.call

    def lose_a_frame(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        is_fp32_module = "fp32-module" in map(name_action, self.applied)
        return (output[0][:, 1:],) if is_fp32_module else output

    monkeypatch.setattr(Component, "call", lose_a_frame)
    handle, _ = run_faulty(
        "cogvideox", "transformer", step=1, kind="frame", module_path=MODULE_PATH, lasting=True
    )
    (repair,) = handle.repairs
    assert repair.action == "bf16"
    assert (
        repair.tried[0]
        == "fp32-module: it returned 2x1x4x4x4 where the failed call returned 2x2x4x4x4."
    )


@pytest.mark.usefixtures("each_device")
def test_fp32_layers_keep_what_a_decoder_remembers() -> None:
    """Wan's blocks write the frames before into a list of their caller's: none is lost in fp32."""
    handle, error = run_faulty(
        "wan", "vae.decode", step=0, kind="nan", module_path="decoder.up_blocks.0", lasting=True
    )
    (repair,) = handle.repairs
    assert (repair.action, repair.tried) == ("fp32-module", ())
    assert error < 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "action", "stream"), [(278, "rescaled", True), (201, "fp32-module", False)]
)
def test_a_finite_repair_further_off_than_bf16_is_not_believed(
    seed: int, action: str, stream: bool
) -> None:
    """Exponents alone leave these 10 and 18 % off, bf16 1 %: an fp32 stream or module is tried next."""
    with torch.no_grad():
        module = RandomGraph(seed).half()
        given = module.given.half()
        wide = copy.deepcopy(module).float()(given.float())
        brain = relative_l2(copy.deepcopy(module).bfloat16()(given.bfloat16()), wide)
        with guard(module, announce=quiet) as handle:
            found = module(given)
            (state,) = handle.session.components.values()
            scalings = [x.scaling for x in state.applied if x.scaling is not None]
    (repair,) = handle.repairs
    assert repair.action == action
    assert repair.tried[0].startswith("rescaled: the result isn't that of fp32: it is 0.1")
    assert [x.stream is not None for x in scalings] == [True] * stream
    assert relative_l2(found, wide) < brain / 4


def test_a_repair_of_a_call_that_draws_numbers_is_not_compared() -> None:
    """In fp32 and bf16 it draws others: exponents are kept, whatever their result is."""
    with torch.no_grad():
        module = RandomGraph(278).half()
        last = module.last.forward
        module.last.forward = lambda x: last(x) + torch.randn_like(last(x))
        with guard(module, announce=quiet) as handle:
            module(module.given.half())
    (repair,) = handle.repairs
    assert (repair.action, repair.tried) == ("rescaled", ())


@pytest.mark.parametrize(("has_bf16", "action"), [(True, "bf16"), (False, "fp32")])
@pytest.mark.usefixtures("each_device")
def test_a_fault_of_the_whole_component_casts_it(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, action: str
) -> None:
    """Without a module to blame the component is cast: to bf16 where that is native, else to fp32."""
    have_bf16(monkeypatch, has_bf16)
    handle, error = run_faulty("cogvideox", "transformer", step=1, kind="nan", lasting=True)
    (repair,) = handle.repairs
    assert (repair.action, repair.module_path, repair.replays) == (action, "transformer", 1)
    assert error < 1e-2


@pytest.mark.usefixtures("each_device")
def test_others_follow_a_component_that_was_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flux asks its text encoder for a dtype and casts what the transformer gets to it."""
    have_bf16(monkeypatch, True)
    handle, error = run_faulty("flux", "text_encoder_2", step=0, kind="nan", lasting=True)
    assert [repair.action for repair in handle.repairs] == ["bf16"]
    assert error < 1e-2


def test_a_small_component_gets_its_arguments_in_the_format_of_its_plan() -> None:
    """When another was cast, a rescaled one gets fp16, though most of its weights stay in fp32."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2).half(), torch.nn.Linear(9, 9))
    state = Component(module, applied=(ComponentPlan("x", precision="fp16", scaling=Scaling()),))
    callee = Callee("x", module, "forward", "forward")
    call = ComponentCall(callee, (torch.ones(1, 2),), below=lambda x: x.dtype)
    assert state.call(call, is_mixed=True) == torch.float16


@pytest.mark.usefixtures("each_device")
def test_a_component_that_is_stored_in_8_bits_gets_what_it_computes_in() -> None:
    """When another was cast, one with layerwise casting isn't given its arguments in fp8."""
    module = torch.nn.Sequential(
        torch.nn.Linear(9, 9).to(torch.float8_e4m3fn), torch.nn.LayerNorm(9).half()
    )
    callee = Callee("x", module, "forward", "forward")
    call = ComponentCall(callee, (torch.ones(1, 9),), below=lambda x: x.dtype)
    assert Component(module).call(call, is_mixed=True) == torch.float16


def test_what_fails_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remedy that cannot be had is named with the reason, and the next one is taken."""
    have_bf16(monkeypatch, False)
    monkeypatch.setattr(Component, "_find_scaling", fail_to_scale)
    handle, _ = run_faulty("cogvideox", "transformer", step=0, kind="clamp", lasting=True)
    (repair,) = handle.repairs
    assert repair.tried == ("rescaled: no exponents today",)
    assert repair.action == "fp32-module"


def fail_to_scale(*_: Any) -> None:
    """As where a graph cannot be captured."""
    raise RuntimeError("no exponents today\nand more")


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_saturation_is_seen_although_it_is_finite() -> None:
    """Values that a clamp brought back are a fault, and a rescaled component needs no clamp."""
    handle, error = run_faulty("cogvideox", "transformer", step=1, kind="clamp", lasting=True)
    (repair,) = handle.repairs
    assert (repair.action, repair.kind, repair.step) == ("rescaled", "clamped", 1)
    assert repair.module_path == "transformer:patch_embed.proj"
    assert "1 clamp at fp16's maximum took effect in " in repair.evidence
    assert error < 2e-3


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_a_clamp_of_the_authors_is_seen() -> None:
    """T5 turns Inf in its stream into 64504 and goes on: finite, wrong, and found."""
    wide, pipe = make_pipeline("cogvideox", torch.float32), make_pipeline("cogvideox")
    pixels = []
    with assert_untouched(wide), assert_untouched(pipe):
        scales = [scale_stream(wide.text_encoder), scale_stream(pipe.text_encoder)]
        pixels.append(call_pipeline(wide, "cogvideox"))
        plain = call_pipeline(pipe, "cogvideox")
        with guard(pipe, announce=quiet) as handle:
            pixels.append(call_pipeline(pipe, "cogvideox"))
        for undo in scales:
            undo()
    assert np.isfinite(plain).all()
    assert [(x.action, x.kind) for x in handle.repairs] == [("rescaled", "clamped")]
    assert np.sqrt(np.mean((pixels[1] - pixels[0]) ** 2)) < 2e-3


def scale_stream(encoder: torch.nn.Module) -> Any:
    """Make a T5's residual stream larger than fp16; what comes back makes it as it was."""
    exponents = {"shared": 13, ".o.": 15, ".wo.": 15}
    named = [
        (weight, bits)
        for name, weight in encoder.named_parameters()
        for part, bits in exponents.items()
        if part in name
    ]
    kept = [weight.detach().clone() for weight, _ in named]
    with torch.no_grad():
        for weight, bits in named:
            weight.mul_(2.0**bits)

    def undo() -> None:
        with torch.no_grad():
            for (weight, _), before in zip(named, kept, strict=True):
                weight.copy_(before)

    return undo


@pytest.mark.usefixtures("each_device")
def test_bad_arguments_are_traced_to_the_component_before() -> None:
    """With `warn` a text encoder's NaN reaches the transformer, which is not blamed for it."""
    pipe = make_pipeline("cogvideox")
    with (
        inject(pipe, "text_encoder", step=0, kind="row", lasting=True),
        guard(pipe, on_fault="warn", announce=quiet) as handle,
    ):
        call_pipeline(pipe, "cogvideox")
    first = next(r for r in handle.repairs if r.component == "transformer")
    assert (first.kind, first.action, first.module_path) == ("input", "none", "text_encoder")
    assert first.evidence.startswith(
        "It came from `text_encoder`, as reported. `transformer` was called with it as "
        "encoder_hidden_states: `transformer` returned "
    )


@pytest.mark.usefixtures("each_device")
def test_warn_says_it_once(recwarn: pytest.WarningsRecorder) -> None:
    """Each component that gives bad values is told of once, and looked at once."""
    pipe = make_pipeline("cogvideox")
    with (
        inject(pipe, "transformer", step=0, kind="row", lasting=True),
        guard(pipe, on_fault="warn") as handle,
    ):
        call_pipeline(pipe, "cogvideox", steps=3)
    told = [w for w in recwarn if issubclass(w.category, StopdownWarning)]
    assert [str(w.message).partition(" returned ")[0] for w in told] == [
        "`transformer`",
        "It came from `transformer`, as reported. `vae.decode` was called with it as z: `vae.decode`",
    ]
    transformer = [r for r in handle.repairs if r.component == "transformer"]
    assert [r.kind for r in transformer] == ["written", "unknown", "unknown"]
    assert transformer[1].reason == "Not looked at again."


@pytest.mark.usefixtures("each_device")
def test_a_weight_is_blamed_and_not_repaired() -> None:
    """A NaN in a weight is named by its path; no precision helps, and none is tried."""
    pipe = make_pipeline("cogvideox")
    weight = pipe.transformer.proj_out.bias
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.nan
    try:
        with guard(pipe, announce=quiet) as handle, pytest.raises(NonFiniteError) as caught:
            call_pipeline(pipe, "cogvideox")
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert "The weight transformer:proj_out.bias isn't finite." in str(caught.value)
    assert [(r.kind, r.action, r.replays) for r in handle.repairs] == [("weight", "none", 0)]


@pytest.mark.usefixtures("each_device")
def test_what_has_no_repair_ends_the_run() -> None:
    """In fp32 there is nothing wider: the run stops, and says what was seen."""
    pipe = make_pipeline("cogvideox", torch.float32)
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=1, lasting=True),
        guard(pipe, announce=quiet) as handle,
        pytest.raises(NonFiniteError, match=r"in fp32 at step 2 of 2\. The fault begins at"),
    ):
        call_pipeline(pipe, "cogvideox")
    assert [repair.action for repair in handle.repairs] == ["none"]


@pytest.mark.usefixtures("each_device")
def test_block_maxima_come_with_the_same_read() -> None:
    """Largest magnitudes by block and step equal those of hooks, and cost no further host read."""
    pipe = make_pipeline("cogvideox", torch.float32)
    seen: list[float] = []
    hook = pipe.transformer.transformer_blocks[1].register_forward_hook(
        lambda module, args, output: seen.append(max(float(x.abs().max()) for x in output))
    )
    with assert_untouched(pipe), guard(pipe, maxima=True) as handle:
        call_pipeline(pipe, "cogvideox")
    hook.remove()
    found = [
        m
        for m in handle.record.maxima
        if m.path == "transformer_blocks.1" and m.precision == "fp32"
    ]
    assert [(m.component, m.step, m.amax) for m in found] == [
        ("transformer", 0, seen[0]),
        ("transformer", 1, seen[1]),
    ]
    assert {m.component for m in handle.record.maxima} == {
        *("text_encoder", "transformer", "vae.decode")
    }
    assert handle.record.host_reads == sum(call.calls for call in handle.record.calls)
    with guard(pipe) as handle:
        call_pipeline(pipe, "cogvideox")
    assert handle.record.maxima == ()


def count_kept() -> Counter[str]:
    """How many objects of captures, modules and tensors are alive."""
    gc.collect()
    kinds = (torch.fx.Node, torch.fx.Graph, torch.Tensor, torch.nn.Module)
    return Counter(type(x).__name__ for x in gc.get_objects() if issubclass(type(x), kinds))


@pytest.mark.thorough
def test_what_repairs_make_goes_with_them() -> None:
    """Memory does not grow from repair to repair, nor from one `rescale_` to the next."""
    pipe = testing.make_pipeline("sd", overflow="unet")
    call = {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(1, 7, pipe.unet.config.cross_attention_dim),
    }
    counts = []
    for _ in range(3):
        stopdown.rescale_(pipe.unet, (), call).undo()
        with guard({"unet": pipe.unet.half()}, announce=lambda text: None) as handle:
            pipe.unet(**{k: x.half() if x.is_floating_point() else x for k, x in call.items()})
            assert [x.action for x in handle.repairs] == ["rescaled"]
        pipe.unet.float()
        counts.append(count_kept())
    assert counts[1] == counts[2]
