"""Measures, verdicts, prompts and pictures of a comparison, without a model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.comparisons import draw_clip
from stopdown.app.compare_command import LONGEST, read_prompts
from stopdown.comparison.measures import (
    clean_frames,
    draw_heats,
    find_headroom,
    find_parting,
    join_heats,
    measure_frames,
    measure_latents,
    measure_values,
    read_values,
)
from stopdown.comparison.probes import Trace
from stopdown.comparison.records import SPOILT, Heat
from stopdown.errors import InputError, OptionError

# Prompts


def test_bad_lines_are_reported_in_place(tmp_path: Path) -> None:
    """Overlong, binary and control lines are named with their number; empty ones are passed over."""
    path = tmp_path / "prompts.txt"
    long = b"a" * (LONGEST + 1)
    path.write_bytes(
        b"\xef\xbb\xbfa red circle\r\n\ncaf\xe9\n" + long + b"\nbell\x07\nein Kreis, gr\xc3\xbcn\n"
    )
    good, bad = read_prompts(path)
    assert good == [(1, "a red circle"), (6, "ein Kreis, grün")]
    assert [(x.line, x.reason) for x in bad] == [
        (3, "Byte 4 isn't UTF-8."),
        (4, f"It has {LONGEST + 1} characters, more than the {LONGEST} that are read."),
        (5, "It holds control characters."),
    ]


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    """A file in which no line is a prompt, and one that is missing, say what to write."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n")
    with pytest.raises(InputError, match="holds no prompt: it is empty"):
        read_prompts(path)
    with pytest.raises(InputError, match="no such file or directory"):
        read_prompts(tmp_path / "none.txt")


# Measures


def test_measures_equal_their_formulas() -> None:
    """RMSE, PSNR and flicker are those of a computation by hand, in fp64."""
    clip = draw_clip(1)
    other = np.clip(clip + np.random.default_rng(0).normal(size=clip.shape) * 0.03, 0, 1)
    other = other.astype(np.float32)
    measures, maps = measure_frames(other, clip)
    error = other.astype(np.float64) - clip.astype(np.float64)
    assert measures.rmse == pytest.approx(math.sqrt((error**2).mean()), rel=1e-12)
    assert measures.psnr_db == pytest.approx(-10 * math.log10((error**2).mean()), rel=1e-6)
    changes = error[1:] - error[:-1]
    assert measures.flicker == pytest.approx(math.sqrt((changes**2).mean()), rel=1e-12)
    assert maps is not None
    assert measures.flip == pytest.approx(float(maps.mean()))
    assert maps.shape == clip.shape[:3]


def test_ssim_equals_the_paper() -> None:
    """SSIM is that of Wang et al. 2004: Gaussian of 1.5 over 11, K1 0.01, K2 0.03; borders reflect."""
    clip = draw_clip(2, frames=1, side=24)
    other = np.clip(clip + 0.05 * np.sin(np.arange(24))[None, None, :, None], 0, 1)
    other = other.astype(np.float32)
    offsets = np.arange(-5, 6)
    bell = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = torch.tensor(np.outer(bell, bell) / np.outer(bell, bell).sum())[None, None]

    def blur(values: np.ndarray) -> np.ndarray:
        stacked = torch.tensor(values).permute(2, 0, 1)[:, None].double()
        padded = torch.nn.functional.pad(stacked, (5, 5, 5, 5), mode="reflect")
        return torch.nn.functional.conv2d(padded, window).numpy()

    x, y = clip[0].astype(np.float64), other[0].astype(np.float64)
    mx, my = blur(x), blur(y)
    vx, vy, vxy = blur(x * x) - mx**2, blur(y * y) - my**2, blur(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    score = ((2 * mx * my + c1) * (2 * vxy + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    measures, _ = measure_frames(other, clip)
    assert measures.ssim == pytest.approx(float(score.mean()), abs=1e-4)
    assert measures.ssim < 0.99


def test_equal_frames_have_no_error() -> None:
    """The same clip twice is identical, with SSIM 1 and FLIP 0 and no infinite PSNR."""
    clip = draw_clip(3)
    measures, _ = measure_frames(clip.copy(), clip)
    assert measures.identical
    assert measures.psnr_db is None
    assert measures.ssim == pytest.approx(1.0)
    assert (measures.rmse, measures.flip, measures.flicker) == (0.0, 0.0, 0.0)


def test_tiny_frames_have_no_ssim() -> None:
    """Below the 11 pixels of its window SSIM is left out, and a single picture has no flicker."""
    clip = draw_clip(0, frames=1, side=32)[:, :10, :10]
    measures, _ = measure_frames(clip * 0.9, clip)
    assert measures.ssim is None
    assert measures.flicker is None


def test_nan_frames_are_black_and_counted() -> None:
    """NaN and -Inf become black, Inf white, what is out of range is clipped, and all are counted."""
    frames = np.array([math.nan, -math.inf, math.inf, 1.5, 0.25], np.float32).reshape(1, 1, 5, 1)
    cleaned, broken = clean_frames(frames)
    assert cleaned.ravel().tolist() == [0.0, 0.0, 1.0, 1.0, 0.25]
    assert broken == 3


def test_latents_are_compared_step_by_step() -> None:
    """The relative L2 error of each step; None from where it is not finite."""
    reference = [torch.tensor([3.0, 4.0])] * 3
    latents = [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), torch.tensor([3.0, math.nan])]
    assert measure_latents(latents, reference) == (0.0, pytest.approx(0.1), None)


# Places


def make_trace(*values: float, path: str = "b") -> Trace:
    trace = Trace(order={"t": tuple(f"{path}.{i}" for i in range(len(values)))})
    for index, value in enumerate(values):
        key = ("t", 0, f"{path}.{index}")
        trace.samples[key] = torch.tensor([value, 1.0])
        trace.amax[key] = abs(value)
    return trace


def test_the_first_block_that_parts_is_named() -> None:
    """Of several blocks that differ by more than 5 % the first is named, with its error."""
    parting = find_parting(make_trace(3.0, 4.1, 9.0), make_trace(3.0, 4.0, 5.0), scaled=False)
    assert parting is not None
    assert parting.module_path == "t:b.2"
    assert find_parting(make_trace(3.0, 4.1), make_trace(3.0, 4.0), scaled=False) is None
    hidden = make_trace(3.0, 4.1)
    hidden.amax[("t", 0, "b.0")] = math.inf  # at a place that the sample does not hold
    parting = find_parting(hidden, make_trace(3.0, 4.0), scaled=False)
    assert parting is not None
    assert (parting.module_path, parting.rel_err) == ("t:b.0", None)
    lost = find_parting(make_trace(math.nan), make_trace(3.0), scaled=False)
    assert lost is not None
    assert lost.rel_err is None


def test_powers_of_two_are_no_parting_of_a_plan() -> None:
    """A rescaled block holds its values times a power of two: only then is that taken off."""
    scaled, reference = make_trace(3.0 / 64, 5.0 * 8), make_trace(3.0, 5.0)
    assert find_parting(scaled, reference, scaled=False) is not None
    for trace in (scaled, reference):
        for sample in trace.samples.values():
            sample[1] = 0.0
    assert find_parting(scaled, reference, scaled=True) is None
    wrong = make_trace(3.0 / 64 * 1.2, 5.0)
    wrong.samples[("t", 0, "b.0")][1] = 0.0
    assert find_parting(wrong, reference, scaled=True) is not None


def test_headroom_counts_bits_to_the_end_of_fp16() -> None:
    """65504 is 0 bits, its half is 1, its double is -1; the tightest place is named."""
    bits, place = find_headroom(make_trace(65504.0 / 2, 1.0))
    assert bits == pytest.approx(1.0)
    assert place == "t:b.0 at step 1"
    bits, _ = find_headroom(make_trace(1.0, 65504.0 * 2))
    assert bits == pytest.approx(-1.0)
    assert find_headroom(make_trace(1.0, math.inf)) == (None, "t:b.1 at step 1")


def test_heats_of_prompts_are_joined_to_the_tighter() -> None:
    """Over prompts the least headroom of each place stays; a place of one prompt alone stays too."""
    one = draw_heats(make_trace(65504.0, math.nan))
    assert one == (Heat("t", ("b.0", "b.1"), ((0.0,), (SPOILT,))),)
    other = (Heat("t", ("b.0", "b.9"), ((-2.0, 3.0), (5.0, None))),)
    joined = join_heats([one, other])
    assert joined == (Heat("t", ("b.0", "b.1", "b.9"), ((-2.0, 3.0), (SPOILT,), (5.0, None))),)


def test_a_program_without_blocks_has_no_headroom() -> None:
    """Nor has one whose blocks return zeros; that isn't taken for NaN, which names its block."""
    assert find_headroom(Trace()) == (None, "")
    assert find_headroom(Trace(amax={("net", None, "a"): 0.0})) == (None, "")
    zero_and_more = Trace(amax={("net", None, "a"): 0.0, ("net", 1, "b"): 65504 / 2})
    assert find_headroom(zero_and_more) == (1.0, "net:b at step 2")
    assert find_headroom(Trace(amax={("net", None, "a"): math.nan})) == (None, "net:a")


def test_hidden_scores_do_not_hide_a_difference() -> None:
    """A mask's lowest number is no part of the range, and two ends of fp32 don't make it infinite."""
    lowest = np.finfo(np.float32).min
    scores, others = np.float32([1, 2, 3, lowest]), np.float32([1, 2, 4, -65504])
    assert measure_values(others, scores).rmse == pytest.approx(0.25)
    assert measure_values(scores, scores).identical
    assert measure_values(np.float32([1, 2, 3, 0]), scores).rmse > 0.4
    ends = np.float32([lowest / 2, -lowest, 1])
    assert not measure_values(np.float32([lowest / 2, -lowest / 2, 1]), ends).identical


def test_no_values_are_nothing_to_compare() -> None:
    """A program that returns an empty tensor is told so."""
    with pytest.raises(OptionError, match="returned a Tensor without values"):
        read_values(torch.zeros(0))


def test_numbers_and_grey_pictures_are_read() -> None:
    """Tokens are values; grey pictures of PIL are frames like those in colour."""
    assert read_values({"tokens": torch.tensor([[3, 5]])})[0].tolist() == [3.0, 5.0]
    frames, broken = read_values([Image.new("L", (5, 4), 51), Image.new("L", (5, 4))])
    assert (frames.shape, broken) == ((2, 4, 5, 3), 0)
    assert frames[0] == pytest.approx(0.2)
