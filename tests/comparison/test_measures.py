"""Measures, verdicts, prompts and pictures of a comparison, without a model."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.comparisons import draw_clip, make_comparison
from stopdown.app.compare_command import LONGEST, read_prompts
from stopdown.comparison.cells import (
    fail_cell,
    make_sheet,
    read_outcome,
    share_bytes,
    write_outcome,
)
from stopdown.comparison.measures import (
    clean_frames,
    draw_heats,
    find_headroom,
    find_parting,
    join_heats,
    measure_frames,
    measure_latents,
)
from stopdown.comparison.precision_lists import parse_precisions
from stopdown.comparison.probes import Trace
from stopdown.comparison.records import SPOILT, Cell, Comparison, Heat, Measures, Thresholds
from stopdown.comparison.verdicts import (
    choose_reference,
    judge_cell,
    rank_precisions,
    recommend,
)
from stopdown.errors import InputError, OptionError
from stopdown.records import Finding, from_json, to_json

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
        (3, "Byte 4 is not UTF-8."),
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


def test_a_finished_cell_that_was_changed_is_named(tmp_path: Path) -> None:
    """The message says what to remove; a cell as it was written comes back."""
    path = tmp_path / "cell.msgpack"
    write_outcome(fail_cell("bf16", "no memory"), path)
    assert read_outcome(path).cell.error == "no memory"
    content = path.read_bytes()
    for changed in (b"", content[:40], content.replace(b"precision", b"precisiom")):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"cell\.msgpack cannot be read: .*rm "):
            read_outcome(path)


# Precisions


def test_a_list_of_precisions_is_read() -> None:
    """Names, plans' files and lists by component are told apart; other spellings are known."""
    text = "fp32, float16,autocast,clamp,my/plan.json,transformer=bf16+vae=fp32"
    found = parse_precisions(text)
    assert found == ("fp32", "fp16", "autocast", "clamp", "my/plan.json", text.split(",")[-1])
    again = parse_precisions(["fp32,float16", "transformer=bf16,vae.decode=full", "vae=fp16"])
    assert again == ("fp32", "fp16", "transformer=bf16+vae.decode=fp32", "vae=fp16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp32", "it has 1"),
        ("", "it has 0"),
        ("fp16,half", "fp16 is listed twice"),
        (
            "fp32,fp17",
            "'fp17' is unknown. Known values are fp32, bf16, fp16, fp16-plain, autocast, clamp, auto",
        ),
        ("fp32,vae=fp16+vae=fp32", "asks for vae=fp16 and for vae=fp32"),
        ("fp32,transformer=bf16,vae=fp32", r"two ways.* For one write transformer=bf16\+vae=fp32"),
    ],
)
def test_other_lists_are_refused(text: str, message: str) -> None:
    """A list with fewer than two, with one twice, or with an unknown one is refused."""
    with pytest.raises(OptionError, match=message):
        parse_precisions(text)


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


# Verdicts

GOOD = Measures(False, 0.01, 40.0, 0.99, 0.02, 0.01)


def test_each_limit_is_found() -> None:
    """A measure beyond its limit makes another picture and is named; one within does not."""
    reference = Cell("fp32")
    cell = Cell("bf16", measures=GOOD)
    assert judge_cell(cell, reference, Thresholds()).verdict == "same"
    limits = {"psnr_db": 41.0, "ssim": 0.995, "flip": 0.01, "flicker": 0.001}
    for name, limit in limits.items():
        asked = dataclasses.replace(Thresholds(), **{name: limit})
        judged = judge_cell(cell, reference, asked)
        assert judged.verdict == "other", name
        assert f"{limit:g} was asked" in judged.reasons[0]


def test_each_break_is_found() -> None:
    """NaN and frames that the reference does not have make a cell broken; an error makes it failed."""
    reference, black = Cell("fp32"), Finding("black-frames", "frames", "All black.", "")
    assert judge_cell(Cell("x", non_finite=1), reference, Thresholds()).verdict == "broken"
    assert judge_cell(Cell("x", findings=(black,)), reference, Thresholds()).verdict == "broken"
    assert judge_cell(Cell("x", error="gone"), reference, Thresholds()).reasons == ("gone",)
    dark = Cell("fp32", findings=(black,))  # a night scene: the reference is as dark
    cell = Cell("x", findings=(black,), measures=GOOD)
    assert judge_cell(cell, dark, Thresholds()).verdict == "same"


def test_the_reference_is_the_most_precise_that_is_sound() -> None:
    """fp32 before rescaled fp16 before bf16; what is broken is passed over."""
    names = ["bf16", "fp16-plain", "clamp", "plan.json", "fp32", "autocast"]
    ranked = rank_precisions(names, needs_clamp=False)
    assert ranked == ["fp32", "autocast", "plan.json", "bf16", "fp16-plain", "clamp"]
    cells = [Cell("bf16"), Cell("autocast", non_finite=3), Cell("plan.json")]
    assert choose_reference(cells, ranked) == "plan.json"
    assert choose_reference([Cell("bf16", error="gone")], ["bf16"]) == "bf16"


def test_a_model_that_needs_its_clamp_is_judged_in_fp16() -> None:
    """Where a clamp is part of the model, fp32 without it is not the reference."""
    ranked = rank_precisions(["fp32", "bf16", "fp16-plain"], needs_clamp=True)
    assert (
        choose_reference([Cell("fp32"), Cell("bf16"), Cell("fp16-plain")], ranked) == "fp16-plain"
    )


def test_the_fastest_of_the_same_pictures_is_recommended() -> None:
    """Broken precisions are never recommended, however fast they are."""
    made = make_comparison()
    times = {"fp32": 1.0, "bf16": 0.5, "fp16-plain": 0.1, "fp16": 0.25}
    variants = [dataclasses.replace(v, time_ratios={"all": times[v.name]}) for v in made.variants]
    best, headline = recommend(variants, "cpu")
    assert best == "fp16"
    verdict = "bf16 and fp16 give the same pictures as fp32; fp16-plain is broken."
    assert headline == f"{verdict} Use fp16 on cpu, which takes 0.25 of the reference's time."
    assert recommend(variants, "cpu", prompts=2)[1] == f"{verdict} Use fp16 on cpu."
    slow = [dataclasses.replace(x, time_ratios={"all": 1.0 + (x.name != "fp32")}) for x in variants]
    assert recommend(slow, "cpu") == (
        "fp32",
        f"{verdict} Use fp32 on cpu: nothing that gives the same pictures is faster.",
    )
    none, said = recommend([v for v in variants if v.name == "fp16-plain"], "cpu")
    assert none is None
    assert said.startswith("None of these precisions")


def test_a_failed_cell_fails_its_precision_alone() -> None:
    """One prompt that did not run stands in its place; the other precisions keep their verdicts."""
    made = make_comparison(3, error="MemoryError: no room")
    verdicts = {v.name: v.verdict for v in made.variants}
    assert verdicts == {
        "fp32": "reference",
        "bf16": "failed",
        "fp16-plain": "broken",
        "fp16": "same",
    }
    bf16 = next(v for v in made.variants if v.name == "bf16")
    assert bf16.reasons[0] == "Of 3 prompts: 2 the same picture, 1 did not run."
    assert "fp16 is closer to the reference than bf16 on 3 of 3 prompts." in made.reasons


# Pictures and records


def test_a_small_clip_is_kept_without_loss() -> None:
    """Every pixel of every frame comes back from the sheet."""
    frames = (draw_clip(4) * 255).round().astype(np.uint8)
    sheet = make_sheet(frames, 100_000)
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet.data))).convert("RGB"))
    for index, frame in enumerate(frames):
        y, x = (index // sheet.columns) * sheet.height, (index % sheet.columns) * sheet.width
        assert np.array_equal(whole[y : y + sheet.height, x : x + sheet.width], frame)


def test_a_large_clip_is_made_to_fit() -> None:
    """Noise that does not compress is made smaller until it fits; its frames stay in order."""
    frames = np.random.default_rng(0).integers(0, 256, (16, 96, 96, 3), np.uint8)
    sheet = make_sheet(frames, 12_000)
    assert len(base64.b64decode(sheet.data)) <= 12_000
    assert sheet.width < 96 or sheet.every > 1
    assert sheet.frames * sheet.every >= 16


def test_twenty_prompts_by_six_stay_below_thirty_megabytes() -> None:
    """All shares together, difference maps and base64 included, leave room for the page."""
    cells = 20 * 6
    pictures = cells * (share_bytes(cells) + share_bytes(cells) // 3)
    assert pictures * 4 / 3 < 28_000_000


def test_a_comparison_survives_json() -> None:
    """A record comes back from its JSON unchanged."""
    made = make_comparison()
    assert from_json(to_json(made), Comparison) == made
