"""Records of a comparison of drawn clips, and of a run: no model is run."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import torch

from stopdown.comparison.cells import make_sheet
from stopdown.comparison.measures import measure_frames
from stopdown.comparison.records import (
    SPOILT,
    CallError,
    Cell,
    Comparison,
    Divergence,
    Heat,
    Row,
    Thresholds,
    Variant,
)
from stopdown.comparison.verdicts import compare_pairs, judge_cell, judge_variant, recommend
from stopdown.component_calls.components import find_components
from stopdown.frames.frame_faults import find_frame_faults
from stopdown.frames.media import to_uint8
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.results import read_frames
from stopdown.records import (
    BlockMaximum,
    CallSummary,
    ComponentPlan,
    Finding,
    Plan,
    RunRecord,
    Scaling,
)

NAMES = ("fp32", "bf16", "fp16-plain", "fp16")
SPREADS = {"fp32": 0.0, "bf16": 0.008, "fp16-plain": math.nan, "fp16": 0.002}


RUN = RunRecord(
    source="shapes",
    fingerprint="abcdef0123456789abcdef",
    pipeline="CogVideoXPipeline",
    request={"prompt": "a <red> circle & more", "steps": 4},
    device="cpu",
    device_reason="There is no other.",
    machine={"versions": {"torch": "2"}, "memory_bytes": 2**30},
    decisions=(
        ComponentPlan("transformer", precision="bf16", reasons=("stored so",), stored="bf16"),
    ),
    calls=(CallSummary("transformer", "denoise", 4, 1.5, ("bf16",), 0),),
    stages_s={"denoise": 1.5, "decode": 0.5},
    peak_bytes=3 * 2**20,
    peak_source="growth",
    own_s=0.01,
    findings=(Finding("frozen-frames", "output", "All 9 frames are one.", "Use another seed."),),
    output="circle.mp4",
    elapsed_s=3.0,
    maxima=(
        BlockMaximum("transformer", "blocks.0", 0, "bf16", 65504.0 * 4),
        BlockMaximum("transformer", "blocks.0", 1, "bf16", None),
        BlockMaximum("vae.decode", "decoder.up_blocks.0", None, "bf16", 1.0),
    ),
)
"""A run of `generate`, by hand."""


_PROFILE = """
name = "mine"
title = "{title}"
kind = "cuda"
[capability]
number = [7, 5]
source = "its box"
[memory]
gib = {gib}
source = "its box"
""" + "".join(
    f'[formats.{name}]\nstate = "{{state}}"\nrate = {{rate}}\nsource = "its box"\n'
    for name in ("fp32", "bf16", "fp16")
)


def write_profile(**changes: Any) -> str:
    """A profile of a device by hand, with other facts."""
    facts = {"title": "My card", "gib": 16, "state": "native", "rate": 2.0, **changes}
    return _PROFILE.format(**facts)


def draw_clip(seed: int, *, frames: int = 5, side: int = 32) -> np.ndarray:
    """`[T, H, W, 3]` fp32 in [0, 1]: a bright square that moves over a ramp."""
    clip = np.empty((frames, side, side, 3), np.float32)
    clip[...] = np.linspace(0.2, 0.6, side)[None, None, :, None]
    for index in range(frames):
        clip[index, 8:16, 4 + seed % 8 + 3 * index : 12 + seed % 8 + 3 * index, 0] = 0.95
    return clip


def make_comparison(prompts: int = 2, *, error: str = "") -> Comparison:
    """fp32, bf16, broken fp16 and a plan over some prompts; `error` fails bf16 on the last one."""
    rows = tuple(_make_row(index, error * (index == prompts - 1)) for index in range(prompts))
    variants = tuple(judge_variant(_make_variant(name), rows) for name in NAMES)
    best, headline = recommend(variants, "cpu")
    return Comparison(
        source="drawn",
        fingerprint="",
        pipeline="DrawnPipeline",
        request={"steps": 3, "seed": 0},
        command="stopdown compare drawn --precisions fp32,bf16,fp16-plain,fp16",
        device="cpu",
        device_reason="There is no other device.",
        machine={"versions": {"stopdown": "0"}, "cpu": "paper"},
        thresholds=Thresholds(),
        reference="fp32",
        reference_reason="fp32 is the most precise of those compared.",
        recommended=best,
        headline=headline,
        reasons=tuple(compare_pairs(rows, NAMES)),
        variants=variants,
        rows=rows,
        bad_lines=(),
        peak_source="growth",
        elapsed_s=1.0,
    )


def _make_row(index: int, error: str) -> Row:
    clip = draw_clip(index)
    reference = Cell("fp32", stages_s={"denoise": 1.0}, sheet=make_sheet(to_uint8(clip), 9999))
    cells = [judge_cell(reference, reference, Thresholds())]
    for name in NAMES[1:]:
        failed = Cell(name, error=error)
        cell = failed if error and name == "bf16" else _make_cell(name, clip, index)
        cells.append(judge_cell(cell, reference, Thresholds()))
    prompt = f'a square <b>{index}</b> & </script> \u2028 "quoted"'
    return Row(index + 1, prompt, index, "fp32", tuple(cells))


def _make_cell(name: str, clip: np.ndarray, seed: int) -> Cell:
    noise = np.random.default_rng(seed).normal(size=clip.shape).astype(np.float32)
    is_lost = math.isnan(SPREADS[name])
    other = clip * 0 if is_lost else np.clip(clip + SPREADS[name] * noise, 0, 1)
    measures, maps = measure_frames(other, clip)
    faults = find_frame_faults(to_uint8(other))
    return Cell(
        name,
        stages_s={"denoise": 2.0},
        non_finite=7 * is_lost,
        headroom_bits=None if is_lost else 3.0,
        tightest="transformer:block.1 at step 2",
        findings=tuple(Finding(f"{x.kind}-frames", "frames", x.evidence, x.remedy) for x in faults),
        measures=measures,
        latents_rel_err=tuple(None if is_lost else SPREADS[name] * k for k in (1, 2, 4)),
        calls=(CallError("transformer", 0, None if is_lost else SPREADS[name]),),
        parting=Divergence("transformer", 0, "transformer:block.0", None, 0.05)
        if is_lost
        else None,
        sheet=make_sheet(to_uint8(other), 9999),
        difference=make_sheet((maps * 255).round().astype(np.uint8), 9999)
        if maps is not None
        else None,
    )


def _make_variant(name: str) -> Variant:
    bits = SPOILT if name == "fp16-plain" else {"fp16": 4.0}.get(name, -2.0)
    heat = Heat("transformer", ("block.0", "block.1"), ((bits, bits, bits), (9.0, None, 0.5)))
    variant = Variant(name, f"Drawn as {name}.", weights_bytes=1 << 20, heats=(heat,))
    if name != "fp16":
        return variant
    entry = ComponentPlan("transformer", "Drawn", "", "fp16", Scaling({"block.0.weight": -3}))
    plan = Plan("drawn", "", "DrawnPipeline", "fp16", {}, (entry,), "cpu", 0.1)
    return dataclasses.replace(variant, plan=plan)


SMALL = Request(frames=5, height=32, width=32)


def run_by_hand(pipe: Any, prompt: str, seed: int, dtype: torch.dtype) -> np.ndarray:
    """`[T, H, W, 3]`: the pipeline as its own documentation runs it."""
    alone = copy.deepcopy(pipe)
    for module in find_components(alone).values():
        module.to(dtype)
    request = dataclasses.replace(SMALL, prompt=prompt, steps=2, seed=seed)
    arguments = build_arguments(alone, request)
    alone.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return read_frames(alone(**arguments))
