"""Peaks counted without weights against what PyTorch's own allocator says."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.memory_runs import measure_allocator
from models.snapshots import assert_untouched
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_profiles import find_profile
from stopdown.errors import OptionError, StopdownError
from stopdown.interception.patches import Patches
from stopdown.memory import offloader, smaller_calls, speed
from stopdown.memory.forecast import Fit, choose_prediction, choose_tiling, sort_by_time
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.run_memory import RunMemory
from stopdown.memory.smaller_calls import put_variant
from stopdown.memory.speed import ROUGH_FLOPS_PER_S, Speed, find_speed, measure_speed
from stopdown.memory.strategies import PLACEMENTS, Prediction, Strategy, group_weights, predict
from stopdown.number_formats import parse_bytes
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.records import RunRecord
from stopdown.sources.sources import resolve_source
from stopdown.testing import make_pipeline, save_pipeline

pytestmark = pytest.mark.usefixtures("known_speed")


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
    assert f'memory="{text}" isn\'t an amount of memory' in str(caught.value)
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
    assert re.fullmatch(
        r"\S+ TFLOPS in fp32 with weights moved at \S+ GB/s, measured here\.", found.reason
    )


def test_a_busy_machine_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that no device has is what else runs here: nothing is printed that looks measured."""
    monkeypatch.setattr(speed, "_time_product", lambda device, name: 2.19e7)
    found = measure_speed(choose_device("cpu"), {"fp32"})
    assert found.flops_per_s == ROUGH_FLOPS_PER_S
    assert found.reason == (
        "a typical rate, because this machine is too busy to be timed, "
        "so only compare them with each other."
    )


def test_the_speed_of_a_profile_is_that_of_its_slowest_format() -> None:
    """A V100's bf16 is emulated, so a run with a part in bf16 is as slow as that; unknown is None."""
    profile = find_profile("v100")
    assert find_speed(profile, {"fp16", "bf16"}).flops_per_s == 10.7e12  # type: ignore[union-attr]
    assert find_speed(find_profile("cpu-avx512"), {"fp32"}) is None


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
