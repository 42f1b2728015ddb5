"""Tests of the guard beside others: torch.compile, offload, layerwise casting, step caches, itself."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import stopdown
from models import pipeline_calls
from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, quiet
from models.snapshots import assert_untouched, compare_snapshot, take_snapshot
from stopdown import testing
from stopdown.component_calls.pipeline_interception import put_run_layer
from stopdown.errors import NonFiniteError
from stopdown.interception.patches import Patches
from stopdown.runtime.guard import Guard, guard
from stopdown.runtime.repairs import Component
from stopdown.runtime.session import Session

# FasterCache, which calls itself experimental, makes grids in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")

COMPILED = "flux"
HOOKED = "cogvideox"


def make_pipeline(name: str, dtype: torch.dtype = torch.float16) -> Any:
    """A pipeline of its own for each test, run once before."""
    pipe = testing.make_pipeline(name, dtype=dtype)
    call_pipeline(pipe, name)
    return pipe


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, nothing left after."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compile_whole(pipe: Any) -> None:
    """As `pipe.transformer = torch.compile(pipe.transformer)`."""
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


def compile_in_place(pipe: Any) -> None:
    """As `pipe.transformer.compile()`."""
    pipe.transformer.compile(backend="eager")


def compile_blocks(pipe: Any) -> None:
    """As `pipe.transformer.compile_repeated_blocks()`."""
    pipe.transformer.compile_repeated_blocks(backend="eager")


WAYS = (
    compile_in_place,
    pytest.param(compile_whole, marks=pytest.mark.slow),
    pytest.param(compile_blocks, marks=pytest.mark.slow),
)


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compile_", WAYS)
def test_compiled_before_it_is_not_compiled_again(compile_: Callable[[Any], None]) -> None:
    """The guard stands around compiled code: no graph break, no compilation, the same bits."""
    pipe = make_pipeline(COMPILED)
    compile_(pipe)
    plain = call_pipeline(pipe, COMPILED)
    counters.clear()
    with assert_untouched(pipe), guard(pipe) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, COMPILED), plain)
    assert (dict(counters["frames"]), dict(counters["graph_break"])) == ({}, {})
    assert {c.component: c.calls for c in handle.record.calls}["transformer"] == 2
    (said,) = handle.record.unwatched
    assert said.startswith("transformer: inside of compiled code neither clamps nor blocks")


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compile_", WAYS[:2])
def test_compiled_after_it_is_watched_all_the_same(compile_: Callable[[Any], None]) -> None:
    """Compiling a guarded pipeline compiles the model alone, once, and the watch moves around it."""
    pipe = make_pipeline(COMPILED)
    plain = call_pipeline(pipe, COMPILED)
    with guard(pipe) as handle:
        compile_(pipe)
        counters.clear()
        np.testing.assert_array_equal(call_pipeline(pipe, COMPILED), plain)
        call_pipeline(pipe, COMPILED)
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    assert {c.component: c.calls for c in handle.record.calls}["transformer"] == 4


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
def test_what_was_compiled_is_watched_from_the_next_run_on() -> None:
    """A text encoder, which is called before a run's steps are set, too."""
    pipe = make_pipeline(COMPILED)
    with guard(pipe) as handle:
        pipe.text_encoder.compile(backend="eager")
        call_pipeline(pipe, COMPILED)
    assert {c.component: c.calls for c in handle.record.calls}["text_encoder"] == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_what_was_compiled_too_late_is_said() -> None:
    """Where a caller makes the loop himself, a text encoder is called before anyone can see it."""
    pipe = make_pipeline(COMPILED)
    with guard(pipe) as handle:
        pipe.text_encoder.compile(backend="eager")
        pipe.encode_prompt("a", "a", max_sequence_length=16)
        pipe.scheduler.set_timesteps(2, mu=1.0)
    assert "text_encoder" not in {c.component for c in handle.record.calls}
    assert handle.record.unwatched[-1] == (
        "text_encoder: it was compiled or replaced under the guard; calls before the next run's "
        "first step weren't watched."
    )


@pytest.mark.parametrize("is_program", [False, True])
def test_a_method_that_is_replaced_is_watched(is_program: bool) -> None:
    """As some step caches and tilings do it; the replaced methods went past the guard without a word."""
    pipe = make_pipeline("sd")
    program = {"unet": (pipe.unet, "forward"), "vae": pipe.vae} if is_program else pipe
    with guard(program) as handle:
        call_pipeline(pipe, "sd")
        before = {x.component: x.calls for x in handle.record.calls}
        own = {}
        for module, method in ((pipe.unet, "forward"), (pipe.vae, "decode")):
            own[method] = types.MethodType(vars(type(module))[method], module)
            setattr(module, method, own[method])
        call_pipeline(pipe, "sd")
        after = {x.component: x.calls for x in handle.record.calls}
    assert after == {name: 2 * calls for name, calls in before.items()}
    assert {"unet", "vae.decode"} <= after.keys()
    assert (pipe.unet.forward, pipe.vae.decode) == (own["forward"], own["decode"])


def test_a_method_that_is_called_before_it_is_watched_again_is_said() -> None:
    """A pipeline's decoder that its caller calls between two runs."""
    pipe = make_pipeline("sd")
    with guard(pipe) as handle:
        pipe.vae.decode = types.MethodType(vars(type(pipe.vae))["decode"], pipe.vae)
        pipe.vae.decode(torch.zeros(1, 4, 8, 8, dtype=torch.float16))
        assert handle.record.unwatched == ()
        call_pipeline(pipe, "sd")
    assert handle.record.unwatched == (
        "vae.decode: its method was replaced under the guard; calls before the next one of text_encoder "
        "weren't watched.",
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compile_", WAYS)
def test_compiled_code_is_repaired(compile_: Callable[[Any], None]) -> None:
    """The layer is named, exponents reach the compiled code, and are gone from it afterwards."""
    wide = testing.make_pipeline(COMPILED, overflow="transformer")
    reference = call_pipeline(wide, COMPILED)
    pipe = testing.make_pipeline(COMPILED, overflow="transformer", dtype=torch.float16)
    compile_(pipe)
    with np.errstate(invalid="ignore"):
        assert np.isnan(call_pipeline(pipe, COMPILED)).any()
        with assert_untouched(pipe), guard(pipe, announce=quiet) as handle:
            pixels = call_pipeline(pipe, COMPILED)
        (repair,) = handle.repairs
        assert (repair.action, repair.kind, repair.replays) == ("rescaled", "range", 1)
        assert repair.module_path.startswith("transformer:")
        assert np.sqrt(np.mean((pixels - reference) ** 2)) < 5e-3
        assert np.isnan(call_pipeline(pipe, COMPILED)).any()


def offload_groups(pipe: Any) -> None:
    """Weights come and go a block at a time."""
    there, host = torch.device(pipeline_calls.where), torch.device("cpu")
    pipe.transformer.enable_group_offload(
        onload_device=there, offload_device=host, offload_type="block_level", num_blocks_per_group=1
    )


def offload_leaves(pipe: Any) -> None:
    """Weights come and go a layer at a time."""
    there, host = torch.device(pipeline_calls.where), torch.device("cpu")
    pipe.transformer.enable_group_offload(
        onload_device=there, offload_device=host, offload_type="leaf_level"
    )


def offload_sequentially(pipe: Any) -> None:
    """As `enable_sequential_cpu_offload()`, which wants an accelerator: the same hooks."""
    from accelerate import cpu_offload

    for module in (pipe.transformer, pipe.vae):
        there = torch.device(pipeline_calls.where)
        cpu_offload(module, there, offload_buffers=bool(module._parameters))
    assert all(weight.is_meta for weight in pipe.transformer.parameters())


def cast_layers(pipe: Any) -> None:
    """Weights are kept in fp8 and computed with in fp16."""
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16
    )


def cache_first_block(pipe: Any) -> None:
    """Steps that are like the one before reuse what it gave."""
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def broadcast_attention(pipe: Any) -> None:
    """Every other step reuses the attention of the one before."""
    from diffusers import PyramidAttentionBroadcastConfig

    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe._current_timestep,
    )
    pipe.transformer.enable_cache(config)


def cache_faster(pipe: Any) -> None:
    """Every other step reuses attention, and the branch without the prompt."""
    from diffusers import FasterCacheConfig

    config = FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1000),
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 1000),
        attention_weight_callback=lambda _: 0.5,
        tensor_format="BFCHW",
        current_timestep_callback=lambda: pipe._current_timestep,
    )
    pipe.transformer.enable_cache(config)


def cache_magnitudes(pipe: Any) -> None:
    """Steps whose residual is as large as that of the one before reuse it."""
    from diffusers import MagCacheConfig

    config = MagCacheConfig(threshold=10.0, num_inference_steps=3, mag_ratios=[1.0] * 3)
    pipe.transformer.enable_cache(config)


def cache_taylor(pipe: Any, *, use_lite_mode: bool = False) -> None:
    """Every other step is extrapolated from those before."""
    from diffusers import TaylorSeerCacheConfig

    config = TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=1,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=use_lite_mode,
    )
    pipe.transformer.enable_cache(config)


def cache_taylor_lite(pipe: Any) -> None:
    """The same, of the last projection alone; blocks of such a step are left out."""
    cache_taylor(pipe, use_lite_mode=True)


HOOKS = (
    *(pytest.param(x, marks=pytest.mark.slow) for x in (offload_groups, offload_leaves)),
    *(offload_sequentially, cast_layers, cache_first_block),
    pytest.param(broadcast_attention, marks=pytest.mark.slow),
)
CACHES = (cache_first_block, pytest.param(broadcast_attention, marks=pytest.mark.slow))


@pytest.mark.parametrize("put_on", HOOKS)
@pytest.mark.usefixtures("each_device")
def test_under_hooks_it_is_silent_and_finds_faults(put_on: Callable[[Any], None]) -> None:
    """The same bits without a fault, the same bits after one that does not come again, and gone."""
    pipe = make_pipeline(HOOKED)
    put_on(pipe)
    plain = call_pipeline(pipe, HOOKED, steps=3)
    with assert_untouched(pipe), guard(pipe) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, HOOKED, steps=3), plain)
    assert handle.repairs == ()
    with inject(pipe, "transformer", step=1), guard(pipe, announce=quiet) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, HOOKED, steps=3), plain)
    assert [(r.action, r.step) for r in handle.repairs] == [("replayed", 1)]


@pytest.mark.parametrize("put_on", CACHES)
@pytest.mark.usefixtures("each_device")
def test_without_its_cache_put_back_a_call_is_another(
    monkeypatch: pytest.MonkeyPatch, put_on: Callable[[Any], None]
) -> None:
    """What a step cache kept belongs to the call: this is what the test above would miss."""
    monkeypatch.setattr("stopdown.module_calls.call.save_caches", lambda module: lambda: None)
    pipe = make_pipeline(HOOKED)
    put_on(pipe)
    plain = call_pipeline(pipe, HOOKED, steps=3)
    with inject(pipe, "transformer", step=1), guard(pipe, announce=quiet):
        assert not np.array_equal(call_pipeline(pipe, HOOKED, steps=3), plain)


ALL_CACHES = (
    *(cache_first_block, broadcast_attention, cache_faster),
    *(cache_magnitudes, cache_taylor, cache_taylor_lite),
)


def list_cached() -> list[Any]:
    """Each cache at its first and at a later step; two of them in the default suite."""
    default = ((cache_first_block, 0), (broadcast_attention, 1))
    return [
        pytest.param(*one, marks=() if one in default else pytest.mark.slow)
        for one in itertools.product(ALL_CACHES, (0, 1))
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("put_on", "step"), list_cached())
@pytest.mark.usefixtures("each_device")
def test_beside_a_step_cache_it_is_rescaled(put_on: Callable[[Any], None], step: int) -> None:
    """Exponents are found beneath the cache, for the call that failed: no component ends in bf16."""
    pipe = testing.make_pipeline(HOOKED, dtype=torch.float16)
    put_on(pipe)
    call_pipeline(pipe, HOOKED, steps=3)
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=step, kind="range"),
        guard(pipe, announce=quiet) as handle,
    ):
        assert np.isfinite(call_pipeline(pipe, HOOKED, steps=3)).all()
    (repair,) = handle.repairs
    assert (repair.action, repair.kind, repair.tried) == ("rescaled", "range", ())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "put_on", [cache_first_block, pytest.param(cache_faster, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("each_device")
def test_captured_with_its_cache_on_it_is_not_rescaled(
    monkeypatch: pytest.MonkeyPatch, put_on: Callable[[Any], None]
) -> None:
    """This is what the test above would miss."""
    off = "stopdown.runtime.repairs.in_full"
    monkeypatch.setattr(off, lambda module: contextlib.nullcontext())
    pipe = testing.make_pipeline(HOOKED, dtype=torch.float16)
    put_on(pipe)
    with (
        inject(pipe, "transformer", step=0, kind="range"),
        guard(pipe, announce=quiet) as handle,
    ):
        call_pipeline(pipe, HOOKED, steps=1)
    assert handle.repairs[0].tried[0].startswith("rescaled: ")


@pytest.mark.parametrize(
    "put_on", [offload_sequentially, pytest.param(offload_groups, marks=pytest.mark.slow), *CACHES]
)
@pytest.mark.usefixtures("each_device")
def test_under_hooks_a_module_is_kept_in_fp32(put_on: Callable[[Any], None]) -> None:
    """A lasting fault is named through the hooks, and its module is put in fp32 beneath them."""
    pipe = make_pipeline(HOOKED)
    put_on(pipe)
    plain = call_pipeline(pipe, HOOKED, steps=3)
    module_path = "transformer_blocks.1.ff"
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=1, module_path=module_path, lasting=True),
        guard(pipe, announce=quiet) as handle,
    ):
        pixels = call_pipeline(pipe, HOOKED, steps=3)
    assert [(r.action, r.module_path) for r in handle.repairs] == [
        ("fp32-module", f"transformer:{module_path}")
    ]
    assert np.abs(pixels - plain).max() < 0.05


def run_offloaded(monkeypatch: pytest.MonkeyPatch, *, is_mixed: bool = False) -> Guard:
    """A guard after a run whose transformer overflows while its weights wait elsewhere.

    With `is_mixed`, its last norm is in fp32.
    """
    monkeypatch.setattr(Session, "has_bf16", lambda *_: True)
    pipe = testing.make_pipeline(HOOKED, overflow="transformer", dtype=torch.float16)
    call_pipeline(pipe, HOOKED)
    if is_mixed:
        pipe.transformer.norm_final.float()
    offload_sequentially(pipe)
    with assert_untouched(pipe), guard(pipe, announce=quiet) as handle:
        assert np.isfinite(call_pipeline(pipe, HOOKED)).all()
    return handle


@pytest.mark.usefixtures("each_device")
def test_offloaded_weights_are_cast_and_not_rescaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents cannot be folded into weights that wait; bf16 can be asked of the hooks; and gone."""
    (repair,) = run_offloaded(monkeypatch).repairs
    assert repair.action == "bf16"
    assert repair.tried[0] == (
        "rescaled: Its weights are stored elsewhere between calls, so no exponents can be folded into them."
    )


@pytest.mark.usefixtures("each_device")
def test_offloaded_weights_are_put_back_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate makes parameters anew at each call: without their names those in fp32 would be fp16."""
    assert run_offloaded(monkeypatch, is_mixed=True).repairs
    monkeypatch.setattr(Component, "_keep_waiting", lambda self: None)
    with pytest.raises(AssertionError, match=r"is torch\.float16 and was torch\.float32"):
        run_offloaded(monkeypatch, is_mixed=True)


@pytest.mark.usefixtures("each_device")
def test_weights_in_fp8_are_not_repaired() -> None:
    """Layerwise casting rewrites weights at each call: the module path is named, and the run stops."""
    pipe = make_pipeline(HOOKED)
    cast_layers(pipe)
    module_path = "transformer_blocks.1.ff"
    with (
        inject(pipe, "transformer", step=1, module_path=module_path, lasting=True),
        guard(pipe, announce=quiet),
        pytest.raises(NonFiniteError, match=rf"The fault begins at `transformer:{module_path}` "),
    ):
        call_pipeline(pipe, HOOKED, steps=3)


@pytest.mark.parametrize(("kind", "lasting"), [(KeyboardInterrupt, True), (RuntimeError, False)])
@pytest.mark.usefixtures("each_device")
def test_gone_after_an_exception_inside_of_the_loop(
    kind: type[BaseException], lasting: bool
) -> None:
    """Ctrl-C or an error in the third step, a repair in force or not: nothing is left behind."""
    pipe = make_pipeline(HOOKED)

    def stop(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            raise kind
        return values

    module_path = "transformer_blocks.1.ff" if lasting else ""
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=0, module_path=module_path, lasting=lasting),
        pytest.raises(kind),
        guard(pipe, announce=quiet) as handle,
    ):
        pipe("a", num_frames=5, num_inference_steps=3, callback_on_step_end=stop)
    assert [r.action for r in handle.repairs] == ["fp32-module" if lasting else "replayed"]


def test_why_a_run_ended_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pipeline cannot be left as it was, the error of the run is raised, with a note."""
    pipe = testing.make_pipeline("sd", dtype=torch.float16)
    leave = Component.leave

    def fail(state: Component) -> None:
        leave(state)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Component, "leave", fail)
    with pytest.raises(ValueError, match="Provide either") as raised, guard(pipe):
        pipe()
    assert any("couldn't be restored: out of memory" in x for x in raised.value.__notes__)
    with pytest.raises(torch.OutOfMemoryError), guard(pipe):
        pass


@pytest.mark.usefixtures("each_device")
def test_gone_after_an_exception_inside_of_a_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while exponents are looked for leaves nothing behind either."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stopdown.runtime.repairs.Calibration.observe", interrupt)
    pipe = make_pipeline(HOOKED)
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=0, kind="clamp", lasting=True),
        pytest.raises(KeyboardInterrupt),
        guard(pipe, announce=quiet),
    ):
        call_pipeline(pipe, HOOKED)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_layer_on_a_pipeline_is_not_on_its_copy(make_copy: Callable[[Any], Any]) -> None:
    """The runs of a copy are none of the original's, while that has a layer and afterwards."""
    pipe, seen = make_pipeline(HOOKED), list[str]()

    def layer(call: Any) -> None:
        seen.append("layer")

    with Patches() as patches:
        put_run_layer(pipe, layer, patches)
        pipe()
        other = make_copy(pipe)
        with pytest.raises(ValueError, match="prompt"):  # its own call, without arguments
            other()
        with Patches() as more:
            put_run_layer(other, layer, more)
            other()
    with pytest.raises(ValueError, match="prompt"):
        other()
    assert seen == ["layer"] * 2


@pytest.mark.thorough
def test_a_guard_goes_with_its_pipeline() -> None:
    """Who drops a pipeline gets its memory back, also after a repair and without taking the guard off."""
    pipe = make_pipeline(HOOKED)
    call, kind = vars(type(pipe))["__call__"], type(pipe)
    testing.overflow_(pipe.transformer)
    guard(pipe, announce=quiet)
    assert vars(kind)["__call__"] is not call
    call_pipeline(pipe, HOOKED)
    weights = weakref.ref(next(pipe.transformer.parameters()))
    del pipe
    gc.collect()
    assert weights() is None
    assert vars(kind)["__call__"] is call


def put_plan(pipe: Any) -> Any:
    """A plan with exponents and casts, without a guard."""
    return stopdown.apply_plan(pipe, stopdown.make_plan(pipe))


PUT: dict[str, Callable[[Any], Any]] = {
    "guard": lambda pipe: guard(pipe, announce=quiet),
    "plan": put_plan,
    "both": lambda pipe: stopdown.fp16(pipe),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", PUT)
def test_a_component_that_its_pipeline_drops_is_freed(way: str) -> None:
    """With little memory a text encoder is dropped once the prompt is encoded; the next run frees it."""
    pipe = testing.make_pipeline("sd")
    handle = PUT[way](pipe)
    states = pipe.encode_prompt("a", "cpu", 1, False)[0]
    weights = weakref.ref(next(pipe.text_encoder.parameters()))
    pipe.text_encoder = None
    for _ in range(2):
        pipe(prompt_embeds=states, num_inference_steps=1, guidance_scale=1.0, output_type="latent")
    gc.collect()
    assert weights() is None
    if way == "plan":
        handle.undo()
    else:
        counted = {x.component: x.calls for x in handle.record.calls}
        assert (counted["text_encoder"], counted["unet"]) == (1, 2)
        handle.remove()


@pytest.mark.thorough
def test_a_component_that_is_replaced_is_as_before_the_guard() -> None:
    """Its repairs come off at the next run; once it is back, it's guarded again."""
    pipe = testing.make_pipeline("sd", overflow="unet", dtype=torch.float16)
    first, other = pipe.unet, testing.make_pipeline("sd", dtype=torch.float16).unet
    before = take_snapshot(first)
    with assert_untouched(pipe), guard(pipe, announce=quiet, maxima=True) as handle:
        call_pipeline(pipe, "sd")
        assert compare_snapshot(before, first)
        pipe.unet = other
        call_pipeline(pipe, "sd")
        assert compare_snapshot(before, first) == []
        pipe.unet = first
        call_pipeline(pipe, "sd")
    assert [(x.component, x.action) for x in handle.repairs] == [("unet", "rescaled")] * 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("each_device")
def test_nested_with_a_fault(first: int) -> None:
    """Of two guards the inner one repairs, the outer one sees nothing; they go in either order."""
    pipe = make_pipeline(HOOKED)
    plain = call_pipeline(pipe, HOOKED)
    with assert_untouched(pipe):
        guards: list[Guard] = [guard(pipe, announce=quiet), guard(pipe, announce=quiet)]
        with inject(pipe, "transformer", step=1, module_path="transformer_blocks.1.ff"):
            np.testing.assert_array_equal(call_pipeline(pipe, HOOKED), plain)
        assert sorted(len(one.repairs) for one in guards) == [0, 1]
        guards.pop(first).remove()
        np.testing.assert_array_equal(call_pipeline(pipe, HOOKED), plain)
        left = guards.pop()
        left.remove()
    calls = {call.component: call.calls for call in left.record.calls}
    assert calls == {"text_encoder": 4, "transformer": 4, "vae.decode": 2}
