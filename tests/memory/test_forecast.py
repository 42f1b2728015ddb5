"""Peaks counted without weights against what PyTorch's own allocator says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import pipeline_calls
from models.snapshots import assert_untouched
from stopdown.app.fit_command import list_worthwhile
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.component_calls.components import (
    find_callees,
    find_components,
    is_autoencoder,
    list_block_paths,
)
from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_profiles import find_profile
from stopdown.errors import CaptureError, OptionError, StopdownError
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.interception.patches import Patches
from stopdown.memory import allocation_tracker, offloader, smaller_calls, speed
from stopdown.memory.alike_calls import sign_block, sign_state
from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.memory.forecast import (
    Fit,
    choose_prediction,
    choose_tiling,
    predict_all,
    sort_by_time,
)
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.run_memory import MemoryListener, RunMemory, listen_to_run
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.speed import ROUGH_FLOPS_PER_S, Speed, find_speed, measure_speed
from stopdown.memory.strategies import (
    PLACEMENTS,
    Placement,
    Prediction,
    Strategy,
    group_weights,
    predict,
)
from stopdown.module_calls.call_interception import Rank, intercept
from stopdown.number_formats import format_bytes, parse_bytes
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.dry_run import dry_run_program
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.pipelines.skeletons import build_skeleton, copy_skeleton
from stopdown.pipelines.tiny_pipelines import build_wide
from stopdown.records import MemoryRow, RunRecord
from stopdown.scaling.trials.trial import WideProducts
from stopdown.sources.sources import resolve_source
from stopdown.testing import PIPELINE_NAMES, make_pipeline, save_pipeline

pytestmark = pytest.mark.usefixtures("known_speed")


def measure_allocator(call: Callable[[], Any]) -> int:
    """Peak bytes of PyTorch's allocator during a call, from its own events."""
    call()  # what is allocated once and kept is not this call's
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def count_call(module: torch.nn.Module, *args: torch.Tensor) -> int:
    tracker = StorageTracker()
    tracker.ignore([*module.parameters(), *args])
    with torch.no_grad(), tracker:
        module(*args)
    return tracker.peak_bytes


def make_stack() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)
    )


@torch.no_grad()
def test_a_call_takes_what_the_allocator_says() -> None:
    """Counted storages of a call give the allocator's own peak, to the byte."""
    module, given = make_stack(), torch.randn(32, 8)
    assert count_call(module, given) == measure_allocator(lambda: module(given))


@torch.no_grad()
def test_what_dies_is_given_back() -> None:
    """After the outputs are gone nothing is counted as alive."""
    module, given = make_stack(), torch.randn(32, 8)
    tracker = StorageTracker()
    tracker.ignore([*module.parameters(), given])
    with tracker:
        output = module(given)
        assert tracker.live_bytes == output.numel() * 4
        del output
    assert tracker.live_bytes == 0


@torch.no_grad()
def test_columns_of_a_convolution_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unfolded input of a plain convolution is in the peak, and not when nobody counts it."""
    module, given = torch.nn.Conv3d(4, 4, 3, padding=1), torch.randn(1, 4, 3, 8, 8)
    measured = measure_allocator(lambda: module(given))
    assert count_call(module, given) == measured
    monkeypatch.setattr(allocation_tracker, "count_workspace", lambda *_: 0)
    assert count_call(module, given) < 0.1 * measured


@torch.no_grad()
@pytest.mark.parametrize(("flags", "channels"), [({"avx512_bw"}, 16), (set(), 8)])
def test_blocks_of_a_convolution_are_those_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], channels: int
) -> None:
    """oneDNN rounds three channels up to what a register holds: the copy of its output says so."""
    monkeypatch.setattr(allocation_tracker, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr(allocation_tracker, "_select_backend", lambda *_: "ConvBackend.Mkldnn")
    module, given = torch.nn.Conv2d(3, 3, 1), torch.randn(1, 3, 8, 8)
    blocked = 64 * channels * 4
    assert count_call(module, given) == blocked + 64 * 3 * 4


class LimitedTracker(StorageTracker):
    """Refuses storages beyond a limit, as a device of that size does."""

    limit_bytes = 0

    def add(self, nbytes: int) -> None:
        """As the tracker does, up to the limit."""
        if self.live_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate {nbytes} bytes")
        super().add(nbytes)


@torch.no_grad()
def test_the_peak_is_what_a_device_has_to_have() -> None:
    """With room for the peak a call runs, with one byte less it does not."""
    module, given = make_stack(), torch.randn(32, 8)
    peak = count_call(module, given)

    def run(limit: int) -> None:
        tracker = LimitedTracker()
        tracker.limit_bytes = limit
        tracker.ignore([*module.parameters(), given])
        with tracker:
            module(given)

    run(peak)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory: tried to allocate"):
        run(peak - 1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", "cogview3plus"])
def test_a_dry_run_takes_what_the_run_takes(name: str, tmp_path: Any) -> None:
    """A whole run without weights predicts the allocator's peak of the real run within 2 %."""
    pipe = make_pipeline(name)
    arguments = {
        "prompt": "a red circle",
        "num_inference_steps": 2,
        "height": 64,
        "width": 64,
        "output_type": "np",
        "max_sequence_length": 16,
    }
    arguments |= {"num_frames": 9} if name == "cogvideox" else {}
    source = resolve_source(save_pipeline(name, tmp_path / name, dtype=torch.float32))
    empty = build_skeleton(source, {})
    run = listen_to_run(empty, arguments)
    predicted = max([run.between_bytes, *(call.peak_bytes for call in run.calls)])
    with torch.no_grad():
        assert predicted == pytest.approx(measure_allocator(lambda: pipe(**arguments)), rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", "wan"])
def test_a_tile_like_another_is_not_run_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is predicted as if each were run, with what Wan's decoder writes into its cache.

    Of a seam one row is blended.
    """
    pipe = make_pipeline(name)
    seams, blend = list[int](), type(pipe.vae).blend_v
    sides = ("min_height", "min_width", "stride_height", "stride_width")
    pipe.vae.enable_tiling(**{f"tile_sample_{x}": 16 for x in sides if name == "wan"})
    ran, kind = list[bool](), type(pipe.vae.decoder)
    forward = kind.forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(True)
        return forward(self, *args, **kwargs)

    def note(self: Any, before: Any, after: Any, width: int) -> Any:
        seams.append(width)
        return blend(self, before, after, width)

    def listen() -> tuple[RunMemory, int]:
        ran.clear()
        seams.clear()
        sizes = {"height": 32, "width": 32, "num_frames": 5}
        return listen_to_run(
            copy_skeleton(pipe), {"prompt": "a", "num_inference_steps": 1, **sizes}
        ), len(ran)

    monkeypatch.setattr(kind, "forward", count)
    monkeypatch.setattr(type(pipe.vae), "blend_v", note)
    found, few = listen()
    narrow = max(seams)
    monkeypatch.setattr(MemoryListener, "_put_tiles", lambda *_: None)
    expected, many = listen()
    assert narrow == min(1, max(seams))
    assert found == expected
    assert many > 4
    assert few < many / 2


class Coder:
    """A program with nothing but an autoencoder of a class's own size, without weights."""

    def __init__(self, name: str) -> None:
        self.vae: Any = build_fake(getattr(diffusers, name), torch.bfloat16)

    @property
    def components(self) -> dict[str, Any]:
        return {"vae": self.vae}

    def listen(self, shape: tuple[int, ...]) -> RunMemory:
        """What decoding latents of a shape takes."""
        listener, latents = MemoryListener(on_cpu=False), torch.zeros(shape, dtype=torch.bfloat16)
        dry_run_program(self, lambda: self.vae.decode(latents), [listener])
        return listener.conclude(self)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("AutoencoderKLMagvit", 16),
        ("AutoencoderKLWan", 16),
        ("AutoencoderKLHunyuanVideo", 16),
        ("AutoencoderKLLTXVideo", 128),
        ("AutoencoderKLMochi", 12),
        ("AutoencoderKLCosmos", 16),
        ("AutoencoderVidTok", 4),
    ],
)
def test_frames_that_are_alike_are_decoded_once(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is predicted as if each frame and tile were run, wherever the decoder keeps the one before."""
    coder = Coder(name)
    for tiles, side in ((False, 16), (True, 40)):
        coder.vae.use_tiling = tiles
        with monkeypatch.context() as patches:
            found = coder.listen((1, channels, 7, side, side))
            patches.setattr(MemoryListener, "_put_tiles", lambda *_: None)
            assert found == coder.listen((1, channels, 7, side, side))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        # the blocks of CogVideoX are the same wherever its pipeline starts from
        pytest.param(x, marks=pytest.mark.slow if x.startswith("cogvideox-") else ())
        for x in PIPELINE_NAMES
    ],
)
def test_blocks_that_are_alike_are_run_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is predicted as if each block were run; where two are alike, one of them is not."""
    pipe, ran = make_pipeline(name), list[str]()
    signs = [
        sign_block(module.get_submodule(path))
        for module in find_components(pipe).values()
        for path in list_block_paths(module, (torch.nn.ModuleList,))
        if not is_autoencoder(module)
    ]
    begin = StorageTracker.__torch_dispatch__

    def count(self: Any, func: Any, *given: Any, **named: Any) -> Any:
        ran.append(str(func))
        return begin(self, func, *given, **named)

    def listen() -> tuple[RunMemory, int]:
        ran.clear()
        request = complete_request(pipe, Request(steps=2))
        return listen_to_run(copy_skeleton(pipe), build_arguments(pipe, request)), len(ran)

    monkeypatch.setattr(StorageTracker, "__torch_dispatch__", count)
    found, few = listen()
    monkeypatch.setattr(MemoryListener, "_put_blocks", lambda *_: None)
    expected, many = listen()
    assert found == expected
    assert few < many or len(set(signs)) == len(signs)


def test_blocks_with_other_hooks_or_settings_are_told_apart() -> None:
    """A hook, an attribute, a size or a dtype of one block, but not its number, makes it another."""
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(6)]
    for number, layer in enumerate(layers):
        layer.layer_idx = number  # type: ignore[assignment]
    assert len({*map(sign_block, layers)}) == len({*map(sign_state, layers)}) == 1
    layers[1].norm_first = True
    layers[2].linear1.register_forward_hook(lambda *_: None)
    layers[3].half()
    layers[4].linear2 = torch.nn.Linear(16, 8, bias=False)
    assert len({*map(sign_block, layers)}) == 5


def test_what_a_block_keeps_is_told_by_shape() -> None:
    """Numbers and nested values count as they are, tensors by shape, strides and dtype alone."""
    layers = [torch.nn.Linear(4, 4) for _ in range(6)]
    for layer in layers:
        layer.frames, layer.count = [torch.zeros(2, 3)], {"seen": (1, None)}  # type: ignore[assignment]
    layers[1].frames = [torch.ones(2, 3)]  # type: ignore[assignment]
    assert len({*map(sign_state, layers)}) == 1
    layers[2].frames = [torch.zeros(2, 4)]  # type: ignore[assignment]
    layers[3].frames = [torch.zeros(3, 2).T]  # type: ignore[assignment]
    layers[4].count = {"seen": (2, None)}  # type: ignore[assignment]
    layers[5].frames = None  # type: ignore[assignment]
    assert len({*map(sign_state, layers)}) == 5


def test_a_component_that_reads_values_is_named(tmp_path: Any) -> None:
    """Code that depends on values of tensors cannot be run dry; the message has its line."""

    source = resolve_source(save_pipeline("cogview3plus", tmp_path / "m", dtype=torch.float32))
    empty = build_skeleton(source, {})
    empty.transformer.norm_out.forward = lambda *a, **k: float(a[0].sum().item())
    with pytest.raises(CaptureError, match=r"CogView3PlusTransformer2DModel cannot be captured"):
        listen_to_run(empty, {"prompt": "a", "num_inference_steps": 1, "height": 64, "width": 64})


def run_sd(pipe: Any) -> Any:
    arguments = {"prompt": "a", "num_inference_steps": 2, "height": 64, "width": 64}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe(**arguments, generator=generator, output_type="np").images[0]


@pytest.fixture(scope="module")
def dry_run_sd(tmp_path_factory: pytest.TempPathFactory) -> RunMemory:
    folder = save_pipeline("sd", tmp_path_factory.mktemp("sd") / "m", dtype=torch.float32)
    empty = build_skeleton(resolve_source(folder), {})
    arguments = {"prompt": "a", "num_inference_steps": 2, "height": 64, "width": 64}
    return listen_to_run(empty, {**arguments, "output_type": "np"})


def count_parameters(pipe: Any) -> int:
    """Bytes of the storages that a pipeline's weights own just now."""
    tensors = [x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())]
    return sum({id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}.values())


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["component", "block"])
def test_a_placement_changes_nothing_but_memory(
    placement: Placement, dry_run_sd: RunMemory, tmp_path: Path
) -> None:
    """The picture is the same bit for bit, the peak as predicted, and everything comes off again."""
    pipe = make_pipeline("sd")
    expected = run_sd(pipe)
    before = {name: x.clone() for name, x in pipe.unet.state_dict().items()}
    whole = count_parameters(pipe)
    predicted = predict(dry_run_sd, Strategy(placement), steps=2)
    with (
        assert_untouched(pipe),
        Offloader(pipe, predicted, (), dry_run_sd.strays, store=tmp_path),
    ):
        start = count_parameters(pipe)
        assert start < 0.1 * whole
        found: list[Any] = []
        peak = measure_allocator(lambda: found.append(run_sd(pipe))) + start
    assert np.array_equal(found[-1], expected)
    assert predicted.peak_bytes == pytest.approx(peak, rel=0.1)
    assert all(torch.equal(x, before[name]) for name, x in pipe.unet.state_dict().items())
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [contextlib.nullcontext, WideProducts])
def test_fp16_on_a_processor_takes_what_is_predicted(mode: Any, tmp_path: Path) -> None:
    """A transformer 512 wide, block by block: torch's own products take nothing beside their output; those
    that are summed in fp32 take copies in fp32, which a dry run beneath them counts."""
    pipe = build_wide(8, 2, 256, "cpu").to(torch.float16)
    pipe.set_progress_bar_config(disable=True)
    arguments = {"prompt": "a", "height": 64, "width": 64, "num_frames": 9, "guidance_scale": 1.0,
                 "num_inference_steps": 1, "max_sequence_length": 16, "output_type": "latent"}  # fmt: skip
    with mode():
        fit = predict_run(pipe, arguments, steps=1, fused=True)
    taken = next(x for x in fit.predictions if x.strategy == Strategy("block"))
    with Offloader(pipe, taken, (), fit.strays, store=tmp_path), torch.no_grad(), mode():
        start = count_parameters(pipe)
        peak = measure_allocator(lambda: pipe(**arguments)) + start
    assert taken.peak_bytes == pytest.approx(peak, rel=0.01)


def run_svd(pipe: Any) -> Any:
    arguments = {"num_frames": 2, "num_inference_steps": 1, "height": 64, "width": 64}
    picture, generator = np.zeros((64, 64, 3), np.uint8), torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe(Image.fromarray(picture), **arguments, generator=generator, output_type="np")[0]


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["component", "block"])
def test_a_pipeline_casts_a_component_whose_weights_wait(
    placement: Placement, tmp_path: Path
) -> None:
    """Stable Video Diffusion in fp16 encodes in fp32 and casts back: the same frames, every bit back."""
    pipe = make_pipeline("svd").to(torch.float16)
    expected = run_svd(pipe)
    before = {name: x.clone() for name, x in pipe.vae.state_dict().items()}
    nothing = RunMemory((), {}, {}, {}, {}, 0, 1)
    taken = predict(nothing, Strategy(placement), steps=1)
    with assert_untouched(pipe), Offloader(pipe, taken, (), {}, store=tmp_path):
        found = run_svd(pipe)
        assert pipe.vae.dtype == torch.float16
    assert np.array_equal(found, expected)
    assert all(torch.equal(x, before[name]) for name, x in pipe.vae.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_smaller_placements_take_less_and_move_more(dry_run_sd: RunMemory) -> None:
    """From resident to block the predicted peak falls, and what is moved rises."""
    found = [predict(dry_run_sd, Strategy(placement), steps=2) for placement in PLACEMENTS]
    assert [one.peak_bytes for one in found] == sorted((o.peak_bytes for o in found), reverse=True)
    assert [one.moved_bytes for one in found] == sorted(one.moved_bytes for one in found)


def test_weights_that_others_read_stay_for_the_whole_call() -> None:
    """A layer whose weights its parent uses is loaded with the component, not by itself."""
    weights, strays = {"a": 1, "b": 1}, {"b": frozenset({""})}
    assert group_weights(weights, (), strays, "block") == {"a": ("a",), "": ("b",)}
    assert group_weights(weights, (), {}, "block") == {"a": ("a",), "b": ("b",)}


def one_of_each(firsts: list[Any], seconds: list[Any]) -> list[Any]:
    """All pairs of two lists; those off the diagonal are slow."""
    return [
        pytest.param(
            *getattr(first, "values", (first,)),
            second,
            marks=[*getattr(first, "marks", ()), *([pytest.mark.slow] if row != column else [])],
        )
        for row, first in enumerate(firsts)
        for column, second in enumerate(seconds)
    ]


NO_MEMORY = torch.OutOfMemoryError("out of memory: tried to allocate 1 GiB")


def raise_at(
    pipe: Any, component: str, times: int, patches: Patches, error: Exception = NO_MEMORY
) -> None:
    """Let the first calls of a component fail, by default as an allocator does it."""
    callee = next(callee for callee in find_callees(pipe) if callee.name == component)
    left = times

    def fail(call: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        return call.proceed()

    intercept(callee, fail, patches, Rank.COMPONENT)


@pytest.mark.parametrize(
    ("start", "component"),
    one_of_each(["resident", "component"], ["unet", "vae.decode", "text_encoder"]),
)
@pytest.mark.usefixtures("each_device")
def test_a_call_without_memory_is_run_again(
    component: str, start: Placement, dry_run_sd: RunMemory, tmp_path: Path
) -> None:
    """Out of memory in any component under any strategy: a smaller one, the same picture."""
    pipe = make_pipeline("sd")
    expected = run_sd(pipe)
    all_of_them = [predict(dry_run_sd, Strategy(one), steps=2) for one in PLACEMENTS]
    taken = all_of_them[PLACEMENTS.index(start)]
    said: list[str] = []
    with Patches() as patches:
        raise_at(pipe, component, 1, patches)
        with Offloader(
            pipe,
            taken,
            all_of_them,
            dry_run_sd.strays,
            store=tmp_path,
            device=pipeline_calls.where,
            announce=said.append,
        ) as offloader:
            assert np.array_equal(run_sd(pipe), expected)
    after = PLACEMENTS[PLACEMENTS.index(start) + 1]
    assert [(one.component, one.before, one.after) for one in offloader.steps_down] == [
        (component, start, after)
    ]
    assert len(said) == 1
    assert f"{component} ran out of memory with {start}" in said[0]


def run_tiny(pipe: Any, arguments: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return read_frames(pipe(**arguments, output_type="np", generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "cogview3plus"])
def test_out_of_memory_in_every_component_at_every_strategy(name: str, tmp_path: Path) -> None:
    """Wherever memory ends, the run completes with something smaller, or says what would do."""
    pipe = make_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    arguments = {"prompt": "a", "num_inference_steps": 1, "height": 32, "width": 32}
    arguments |= {"max_sequence_length": 16} if name == "cogview3plus" else {}
    fit = predict_all(copy_skeleton(pipe), {**arguments, "output_type": "np"}, steps=1)
    least = min(one.peak_bytes for one in fit.predictions)
    called = ("text_encoder", "vae.decode", "unet" if name == "sd" else "transformer")
    for taken in fit.predictions:
        for component in called:
            offloader = Offloader(
                pipe,
                taken,
                fit.predictions,
                fit.strays,
                store=tmp_path,
                device=pipeline_calls.where,
            )
            with assert_untouched(pipe), Patches() as patches:
                raise_at(pipe, component, 1, patches)
                if taken.peak_bytes == least:
                    with (
                        offloader,
                        pytest.raises(StopdownError, match="with the smallest strategy"),
                    ):
                        run_tiny(pipe, arguments)
                    continue
                with offloader:
                    assert np.isfinite(run_tiny(pipe, arguments)).all()
            before, after = taken.peak_bytes, offloader.taken.peak_bytes
            assert after < before, (taken.strategy.name, component)
            assert [one.component for one in offloader.steps_down] == [component]


@torch.no_grad()
def test_tiles_change_a_picture_a_little() -> None:
    """Tiled and untiled decoding of a trained autoencoder agree to a tenth in the same size; with its
    own overlap, which is no whole latents, the size would be another."""
    pipe = load_pipeline(resolve_source("shapes"), torch_dtypes=torch.float32)
    colours = torch.rand(1, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    picture = torch.nn.functional.interpolate(colours, (1, 64, 64), mode="trilinear")
    latents = pipe.vae.encode(picture).latent_dist.mode()
    expected = pipe.vae.decode(latents).sample
    with Patches() as patches:
        put_variant(pipe, Strategy(tiling=True), patches)
        found = pipe.vae.decode(latents).sample
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1
    assert torch.equal(pipe.vae.decode(latents).sample, expected)
    pipe.vae.enable_tiling()
    assert pipe.vae.decode(latents).sample.shape != expected.shape


@pytest.mark.usefixtures("each_device")
def test_without_anything_smaller_it_says_what_would_do(
    dry_run_sd: RunMemory, tmp_path: Path
) -> None:
    """When even the smallest strategy fails, the message has its size and what to change."""
    pipe = make_pipeline("sd")
    smallest = predict(dry_run_sd, Strategy("block"), steps=2)
    with assert_untouched(pipe), Patches() as patches:
        raise_at(pipe, "unet", 9, patches)
        offloader = Offloader(
            pipe,
            smallest,
            (smallest,),
            dry_run_sd.strays,
            store=tmp_path,
            device=pipeline_calls.where,
        )
        with offloader, pytest.raises(StopdownError) as caught:
            run_sd(pipe)
    text = str(caught.value)
    assert "unet ran out of memory with the smallest strategy, block: out of memory" in text
    assert f"a device with more than {format_bytes(smallest.peak_bytes)} free" in text


@pytest.mark.usefixtures("each_device")
def test_another_error_is_not_taken_for_it(dry_run_sd: RunMemory) -> None:
    """An error that is not about memory passes, and nothing is tried again."""
    pipe = make_pipeline("sd")
    taken = predict(dry_run_sd, Strategy(), steps=2)
    with Patches() as patches:
        raise_at(pipe, "unet", 1, patches, RuntimeError("mat1 and mat2 cannot be multiplied"))
        offloader = Offloader(pipe, taken, (taken,), dry_run_sd.strays, device=pipeline_calls.where)
        with offloader, pytest.raises(RuntimeError, match="mat1 and mat2"):
            run_sd(pipe)
    assert offloader.steps_down == []


@pytest.mark.parametrize("with_mask", [False, True])
def test_split_attention_gives_the_same_rows(
    with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few queries at a time give what all at once give, in a part of the memory."""
    monkeypatch.setattr(smaller_calls, "_MOST_SCORE_BYTES", 4 * 2 * 64 * 10)
    query, key, value = (torch.randn(1, 2, 64, 8) for _ in range(3))
    mask = torch.randn(1, 1, 64, 64) if with_mask else None

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    with sdpa_kernel(SDPBackend.MATH):
        expected, whole = attend(), measure_allocator(attend)
        with smaller_calls._SplitQueries():
            found, split = attend(), measure_allocator(attend)
    torch.testing.assert_close(found, expected)
    assert split < 0.5 * whole


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("500 MiB", 500 << 20),
        ("1.5g", 3 << 29),
        ("64k", 1 << 16),
        ("4096B", 4096),
    ],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    """Amounts are read with their units."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["much", "-1GiB", "0", "8 GiB of it", ""])
def test_what_is_no_amount(text: str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(OptionError) as caught:
        parse_bytes(text)
    assert f'memory="{text}" is not an amount of memory' in str(caught.value)
    assert 'Use memory="8GiB"' in str(caught.value)


def generate_sd(folder: Path, output: Path, memory: str | None) -> RunRecord:
    return generate(
        GenerateOptions(
            source=str(folder),
            prompt="a",
            output=str(output),
            steps=2,
            height=64,
            width=64,
            precision="fp32",
            memory=memory,
        )
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_generate_stays_within_its_memory(tmp_path: Path) -> None:
    """The cheapest strategy that fits is taken, the picture is the same, and the record says it."""
    folder = save_pipeline("sd", tmp_path / "m", dtype=torch.float32)
    generate_sd(folder, tmp_path / "plain.png", None)
    record = generate_sd(folder, tmp_path / "small.png", "1200KiB")
    assert record.strategy == "component"
    assert record.steps_down == ()
    assert (tmp_path / "small.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


@pytest.mark.parametrize(
    ("component", "said"),
    [
        ("vae.decode", "24.0 MiB during a call of vae.decode."),
        (
            "",
            "24.0 MiB between the calls of components, where the pipeline holds its result in full",
        ),
    ],
)
def test_a_misfit_says_what_takes_most(component: str, said: str) -> None:
    """Below the size of the result itself no strategy goes, so a refusal names the place."""
    least = Prediction(Strategy(), 24 * 2**20, component, 0, 0)
    fit = SimpleNamespace(predictions=(least,), strays=())
    with pytest.raises(StopdownError) as caught:
        raise offloader._describe_misfit(fit, 12 * 2**20, "on cpu in fp32")  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_generate_says_what_would_fit(tmp_path: Path) -> None:
    """A limit that nothing fits is refused before the run, with one that would do."""
    folder = save_pipeline("sd", tmp_path / "m", dtype=torch.float32)
    with pytest.raises(StopdownError) as caught:
        generate_sd(folder, tmp_path / "none.png", "100KiB")
    assert "the smallest strategy, block+tiling, is predicted to take" in str(caught.value)
    assert re.search(
        r"KiB (during a call of \w|between the calls of components)", str(caught.value)
    )
    assert 'memory="1MiB"' in str(caught.value)
    assert not (tmp_path / "none.png").exists()


def test_the_cheapest_in_time_comes_first(dry_run_sd: RunMemory) -> None:
    """A slow link puts strategies that move little first, and a fast one gives the least memory."""
    pairs = [predict(dry_run_sd, Strategy(one), steps=2) for one in ("block", "component")]
    fit = Fit(tuple(dataclasses.replace(one, flops=1e6) for one in pairs))
    slow = sort_by_time(fit, Speed(1e9, 1e3, ""))
    assert [one.strategy.placement for one in slow.predictions] == ["component", "block"]
    assert sort_by_time(fit, None) is fit
    assert choose_prediction(slow, 10**9) is slow.predictions[0]
    assert choose_prediction(slow, int(pairs[0].peak_bytes / 0.95) + 1) is slow.predictions[1]
    assert choose_prediction(slow, 1000) is None


def test_a_picture_without_seams_may_take_a_little_longer() -> None:
    """Tiles and chunks come after what leaves the picture as it is, unless they save more time."""
    named = {
        "plain": Prediction(Strategy(), 90, "", 0, 0, 100.0),
        "tiles": Prediction(Strategy(tiling=True), 50, "", 0, 0, 50.0),
        "moved": Prediction(Strategy("component"), 60, "", 2, 0, 50.0),
        "chunks": Prediction(Strategy(frames=4), 40, "", 0, 0, 49.0),
        "slow": Prediction(Strategy("block"), 20, "", 14, 0, 50.0),
    }
    names = {one.strategy: name for name, one in named.items()}
    fit = sort_by_time(Fit(tuple(named.values())), Speed(1.0, 1.0, ""))
    order = [names[one.strategy] for one in fit.predictions]
    assert order == ["plain", "chunks", "moved", "tiles", "slow"]


def test_the_speed_of_this_machine_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and a copy give rates above nothing, and the reason names both."""
    monkeypatch.setattr(speed, "LEAST_FLOPS_PER_S", 0.0)  # however busy it is
    found = measure_speed(choose_device("cpu"), {"fp32"})
    assert found.flops_per_s > 0
    assert found.link_bytes_per_s > 0
    assert re.fullmatch(r"\S+ TFLOPS in fp32 and \S+ GB/s, measured here\.", found.reason)


def test_a_busy_machine_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that no device has is what else runs here: nothing is printed that looks measured."""
    monkeypatch.setattr(speed, "_time_product", lambda device, name: 2.19e7)
    found = measure_speed(choose_device("cpu"), {"fp32"})
    assert found.flops_per_s == ROUGH_FLOPS_PER_S
    assert found.reason == (
        "a typical rate, because this machine is too busy to be timed: only their order holds."
    )


def test_the_speed_of_a_profile_is_that_of_its_slowest_format() -> None:
    """A V100's bf16 is emulated, so a run with a part in bf16 is as slow as that; unknown is None."""
    profile = find_profile("v100")
    assert find_speed(profile, {"fp16", "bf16"}).flops_per_s == 10.7e12  # type: ignore[union-attr]
    assert find_speed(find_profile("cpu-avx512"), {"fp32"}) is None


@pytest.mark.thorough
def test_a_device_of_limited_size_makes_the_run_smaller(tmp_path: Path) -> None:
    """With an allocator that refuses more, a run that began too large ends with tiles."""
    pipe = make_pipeline("sd")
    generator = torch.Generator().manual_seed(0)
    arguments = {"prompt": "a", "num_inference_steps": 2, "height": 64, "width": 64}
    fit = predict_all(copy_skeleton(pipe), {**arguments, "output_type": "np"}, steps=2)
    by_name = {one.strategy.name: one for one in fit.predictions}
    plain, tiled = by_name["resident"].peak_bytes, by_name["resident+tiling"].peak_bytes
    weights = count_parameters(pipe)
    tracker = LimitedTracker()
    tracker.limit_bytes = (plain + tiled) // 2 - weights
    tracker.ignore(
        x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())
    )
    offloader = Offloader(pipe, by_name["resident"], fit.predictions, fit.strays, store=tmp_path)
    with offloader, torch.no_grad(), tracker:
        image = pipe(**arguments, generator=generator, output_type="np").images[0]
    assert np.isfinite(image).all()
    assert [(one.component, one.after) for one in offloader.steps_down] == [
        ("vae.decode", "resident+tiling")
    ]


def test_only_worthwhile_strategies_are_shown() -> None:
    """A strategy that takes longer and no less memory is left out, unless it was chosen."""
    rows = tuple(MemoryRow(name, peak, "", 0, 0) for name, peak in (("a", 9), ("b", 9), ("c", 5)))
    assert [row.strategy for row in list_worthwhile(rows, "")] == ["a", "c"]
    assert [row.strategy for row in list_worthwhile(rows, "a")] == ["a", "c"]
    assert [row.strategy for row in list_worthwhile(rows, "b")] == ["a", "b", "c"]


def make_fit(**peaks: int) -> Fit:
    """A run with its peak in tiles and without, as far as it has both."""
    made = [Prediction(Strategy(tiling=x == "tiled"), peak, "", 0, 0) for x, peak in peaks.items()]
    return Fit(tuple(made))


def test_runs_that_are_compared_share_their_tiles() -> None:
    """As soon as one has to decode in tiles all do; one that fits neither way does not count."""
    easy, hard = make_fit(whole=50, tiled=20), make_fit(whole=500, tiled=60)
    assert choose_tiling([easy, easy], 100) is False
    assert choose_tiling([easy, hard], 100) is True
    assert choose_tiling([hard, easy], 100) is True
    assert choose_tiling([easy, make_fit(whole=500, tiled=400)], 100) is False
    assert choose_tiling([hard], 10) is None


@pytest.mark.thorough
def test_a_video_is_decoded_a_few_frames_at_a_time() -> None:
    """SVD takes less with one frame at a time; all frames come, and nothing stays on the pipeline."""
    pipe, decoded = make_pipeline("svd"), list[int]()
    picture = np.full((64, 64, 3), 90, np.uint8)
    request = Request(image=picture, frames=6, height=64, width=64, steps=1)
    arguments = build_arguments(pipe, request)
    fit = predict_run(pipe, arguments, steps=1, fused=True)
    named = {one.strategy.name: one for one in fit.predictions}
    whole, single = named["resident"], named["resident+1 frame"]
    assert single.peak_bytes < whole.peak_bytes
    assert named["resident+4 frames"].peak_bytes <= whole.peak_bytes
    hook = pipe.vae.decoder.register_forward_pre_hook(lambda _, args: decoded.append(len(args[0])))
    with torch.no_grad(), assert_untouched(pipe):
        with Offloader(pipe, named["resident+4 frames"], (), fit.strays):
            frames = read_frames(pipe(**arguments))
        assert decoded == [4, 2]
        pipe(**arguments)
    hook.remove()
    assert decoded == [4, 2, 6]
    assert frames.shape == (6, 64, 64, 3)


def test_a_chunk_that_was_asked_for_is_not_enlarged() -> None:
    """What the caller says of chunks stays where it is less than the strategy's."""
    asked: list[int] = []

    class Pipe:
        def decode_latents(
            self, latents: Any, num_frames: int, decode_chunk_size: int = 14
        ) -> None:
            asked.append(decode_chunk_size)

    pipe = Pipe()
    for most in (4, 1):
        with Patches() as patches:
            patches.set_attribute(
                pipe,
                "decode_latents",
                functools.partial(smaller_calls._decode_in_chunks, most, pipe.decode_latents),
            )
            pipe.decode_latents(None, 25)
            pipe.decode_latents(None, 25, 2)
    assert asked == [4, 2, 1, 1]
