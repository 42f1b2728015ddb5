"""A pipeline whose weights wait, and a smaller strategy where memory ends: the same picture."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models import pipeline_calls
from models.memory_runs import LimitedTracker, measure_allocator
from models.other_pipelines import make_dit
from models.snapshots import assert_untouched
from stopdown.component_calls.components import find_callees, find_components
from stopdown.errors import StopdownError
from stopdown.interception.patches import Patches
from stopdown.memory.forecast import predict_all
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.reserved import count_reserved
from stopdown.memory.run_memory import OUTSIDE, RunMemory, listen_to_run
from stopdown.memory.strategies import PLACEMENTS, Placement, Strategy, predict
from stopdown.module_calls.call_interception import Rank, intercept
from stopdown.number_formats import format_bytes
from stopdown.pipelines.results import read_frames
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.pipelines.tiny_pipelines import build_wide
from stopdown.scaling.trials.trial import WideProducts
from stopdown.testing import make_pipeline

pytestmark = pytest.mark.usefixtures("known_speed")


def run_sd(pipe: Any) -> Any:
    arguments = {"prompt": "a", "num_inference_steps": 2, "height": 64, "width": 64}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe(**arguments, generator=generator, output_type="np").images[0]


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


def _without_onednn() -> contextlib.AbstractContextManager[Any]:
    """Torch's own products alone: with AVX512-FP16, those of oneDNN copy a weight into another order."""
    return torch.backends.mkldnn.flags(enabled=False)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("mode", [_without_onednn, WideProducts])
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


def offload(pipe: Any, arguments: dict[str, Any], folder: Path) -> None:
    """A run with each placement makes the bits that it makes without."""
    pipe.set_progress_bar_config(disable=True)
    wanted = run_tiny(pipe, arguments)
    fit = predict_run(pipe, {**arguments, "output_type": "np"}, steps=1, fused=True)
    for placement in ("component", "block"):
        taken = next(x for x in fit.predictions if x.strategy == Strategy(placement))
        with assert_untouched(pipe), Offloader(pipe, taken, (), fit.strays, store=folder):
            assert np.array_equal(run_tiny(pipe, arguments), wanted)


def test_a_layer_of_a_block_that_does_not_run_is_loaded(tmp_path: Path) -> None:
    """DiT's output layers call the embedding of its first block, which is loaded with the block."""
    pipe = make_dit()
    pipe.transformer.eval()  # it drops labels at random
    offload(pipe, {"class_labels": [1], "num_inference_steps": 1}, tmp_path)


def test_a_module_with_two_paths_is_offloaded(tmp_path: Path) -> None:
    """T5's embeddings are a module of two parents once they were resized; there was no group for one."""
    pipe = make_pipeline("cogview3plus")
    pipe.text_encoder.resize_token_embeddings(pipe.text_encoder.config.vocab_size + 1)
    assert pipe.text_encoder.encoder.embed_tokens is pipe.text_encoder.shared
    sizes = {"height": 32, "width": 32, "max_sequence_length": 16}
    offload(pipe, {"prompt": "a", "num_inference_steps": 1, **sizes}, tmp_path)


@pytest.mark.parametrize("placement", ["component", "block"])
def test_weights_that_a_pipeline_reads_itself_are_counted_throughout(
    placement: Placement, dry_run_sd: RunMemory
) -> None:
    """If it reads all of them, each placement takes what all weights on the device take."""
    strays = {
        name: {path: frozenset({OUTSIDE}) for path in paths}
        for name, paths in dry_run_sd.weights.items()
    }
    held, resident = dataclasses.replace(dry_run_sd, strays=strays), Strategy("resident")
    found = predict(held, Strategy(placement), steps=2)
    wanted = predict(dry_run_sd, resident, steps=2)
    assert (found.peak_bytes, found.moved_bytes) == (wanted.peak_bytes, wanted.moved_bytes)
    assert count_reserved(held, Strategy(placement)) == count_reserved(dry_run_sd, resident)


def test_a_cast_reads_no_values() -> None:
    """Stable Video Diffusion casts its autoencoder between calls, whose weights are offloaded still."""
    pipe = copy_skeleton(make_pipeline("svd").to(torch.float16))
    picture = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    arguments = {"image": picture, "num_frames": 2, "height": 64, "width": 64}
    run = listen_to_run(pipe, {**arguments, "num_inference_steps": 1})
    assert not any(OUTSIDE in users for found in run.strays.values() for users in found.values())


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
        raise_at(pipe, "unet", 1, patches, RuntimeError("mat1 and mat2 can't be multiplied"))
        offloader = Offloader(pipe, taken, (taken,), dry_run_sd.strays, device=pipeline_calls.where)
        with offloader, pytest.raises(RuntimeError, match="mat1 and mat2"):
            run_sd(pipe)
    assert offloader.steps_down == []


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
