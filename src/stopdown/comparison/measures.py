"""Distances between two runs: of frames, latents and calls, and the block at which they first diverge.

Frames are fp32 in [0, 1] as the pipeline returned them, not rounded to 8 bits. NaN counts as black, since a
cast to uint8 makes it so.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stopdown.comparison.probes import Trace
from stopdown.comparison.records import (
    PARTING,
    SPOILT,
    CallError,
    Divergence,
    Heat,
    Measures,
    count_bits,
    list_bits,
)
from stopdown.component_call_names import name_module_path
from stopdown.errors import OptionError
from stopdown.frames.frame_faults import lay_on_white
from stopdown.numerics import HIDDEN_FROM, HIDDEN_IN_FP16, iterate_leaves, relative_l2
from stopdown.runtime.run_check import collect_videos

Frames = np.ndarray[Any, Any]


_SSIM_WINDOW = 11


def clean_frames(frames: Frames) -> tuple[Frames, int]:
    """Clip frames to [0, 1] in fp32, with NaN as black, and count the non-finite values.

    Args:
        frames: `[T, H, W, 3]`, or `[T, H, W, 4]` with transparency, which is laid on white.

    Returns:
        The frames as `[T, H, W, 3]`, and the count.
    """
    broken = int((~np.isfinite(frames)).sum())
    cleaned = np.nan_to_num(frames.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0)
    return lay_on_white(np.clip(cleaned, 0.0, 1.0)), broken


def read_values(result: Any) -> tuple[Frames, int]:
    """Read the output of a program: its floating values `[N]` in fp32, its 8-bit frames, or other numbers.

    Returns:
        The values, with NaN and Inf replaced by 0, and the number of values that were.
    """
    leaves = [*map(torch.as_tensor, iterate_leaves(result, (torch.Tensor, np.ndarray)))]
    numbers = [x for x in leaves if x.is_floating_point()]
    pictures = None
    if not numbers:
        numbers = leaves  # such as tokens
        given = (result, (result,), ([result],))
        pictures = next(filter(None, map(collect_videos, given)), None)
    if pictures is not None:
        return clean_frames(np.concatenate(pictures) / 255)
    if not sum(x.numel() for x in numbers):
        raise OptionError(
            f"The function that runs the program returned a {type(result).__name__} without values.",
            expected="Runs are compared by what they give: pictures, arrays or tensors.",
            remedy="Return them from that function.",
        )
    values = torch.cat([x.detach().float().flatten().cpu() for x in numbers]).numpy()
    broken = int((~np.isfinite(values)).sum())
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), broken


def measure_values(values: Frames, reference: Frames) -> Measures:
    """Measure the distance of `[N]` values from a reference, as a share of the reference's range.

    Places that both hide with the lowest number of their formats, as masks of scores do, count as equal.
    """
    is_hidden = (reference <= HIDDEN_FROM) & (values <= HIDDEN_IN_FP16)
    other = reference[~is_hidden].astype(np.float64)  # in fp32 its range may be infinite
    squares = np.sum((values[~is_hidden] - other) ** 2)
    span = float(np.ptp(other)) if len(other) else 0.0
    rmse = float(np.sqrt(squares / len(values))) / (span or 1.0)
    psnr_db = -20 * math.log10(rmse) if rmse else None
    return Measures(rmse == 0.0, rmse, psnr_db, None, None, None)


def measure_frames(frames: Frames, reference: Frames) -> tuple[Measures, Frames | None]:
    """Measure the distance between two clips, and map the FLIP error of each frame.

    Args:
        frames, reference: `[T, H, W, 3]` fp32 in [0, 1] of the same shape.

    Returns:
        The measures, and the FLIP maps `[T, H, W]`, fp32 from 0 to 1; None if FLIP is not installed.
    """
    difference = frames.astype(np.float64) - reference
    mse = float(np.mean(difference**2))
    maps = _map_flip(frames, reference)
    changes = np.diff(difference, axis=0)
    measures = Measures(
        identical=mse == 0.0,
        rmse=math.sqrt(mse),
        psnr_db=_measure_psnr(frames, reference) if mse else None,
        ssim=_measure_ssim(frames, reference),
        flip=None if maps is None else float(maps.mean()),
        flicker=float(np.sqrt(np.mean(changes**2))) if len(frames) > 1 else None,
    )
    return measures, maps


def _measure_psnr(frames: Frames, reference: Frames) -> float:
    from torchmetrics.functional.image import peak_signal_noise_ratio

    pair = torch.from_numpy(frames).double(), torch.from_numpy(reference).double()
    return float(peak_signal_noise_ratio(*pair, data_range=1.0))


def _measure_ssim(frames: Frames, reference: Frames) -> float | None:
    """Return the mean SSIM over frames (Wang et al. 2004), with reflected borders.

    Returns None for frames smaller than the window.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    if min(frames.shape[1:3]) < _SSIM_WINDOW:
        return None
    scores = [
        structural_similarity_index_measure(
            torch.from_numpy(one).permute(2, 0, 1)[None],
            torch.from_numpy(other).permute(2, 0, 1)[None],
            data_range=1.0,
        )
        for one, other in zip(frames, reference, strict=True)
    ]
    return float(torch.stack([torch.as_tensor(score) for score in scores]).mean())


def _map_flip(frames: Frames, reference: Frames) -> Frames | None:
    """Map the FLIP error of each frame at 67 pixels per degree, the library's default.

    Returns `[T, H, W]`, or None if FLIP is not installed.
    """
    if importlib.util.find_spec("flip_evaluator") is None:
        return None
    import flip_evaluator

    maps = [
        flip_evaluator.evaluate(
            np.ascontiguousarray(other),
            np.ascontiguousarray(one),
            "LDR",
            applyMagma=False,
            computeMeanError=False,
        )[0][..., 0]
        for one, other in zip(frames, reference, strict=True)
    ]
    return np.stack(maps)


def measure_latents(
    latents: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> tuple[float | None, ...]:
    """Return the relative L2 error of the latents after each step; None if it isn't finite."""
    pairs = zip(latents, reference, strict=False)
    return tuple(_measure_pair(one, other) for one, other in pairs)


def _measure_pair(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    if value.shape != reference.shape:
        return None
    if torch.equal(value.double(), reference.double()):
        return 0.0
    found = relative_l2(value, reference)
    return found if math.isfinite(found) else None


def measure_calls(trace: Trace, reference: Trace) -> tuple[CallError, ...]:
    pairs = zip(trace.outputs, reference.outputs, strict=False)
    return tuple(
        CallError(component, step, _measure_pair(value, other))
        for (component, step, value), (_, _, other) in pairs
    )


def find_parting(trace: Trace, reference: Trace, *, scaled: bool) -> Divergence | None:
    """Find the first block, in call order, with a non-finite value or a relative error above `PARTING`.

    Args:
        scaled: whether a plan's exponents may have scaled the block's values by powers of two. These are
            estimated for each value and divided out before the comparison.
    """
    for key in trace.samples:
        other = reference.samples.get(key)
        if other is None or other.shape != trace.samples[key].shape:
            continue
        if not torch.isfinite(other).all() or not other.any():
            continue
        if is_lost(trace, reference, key):
            component, step, path = key
            return Divergence(component, step, name_module_path(component, path), None, PARTING)
        value = trace.samples[key]
        value = _take_powers_off(value, other) if scaled else value
        error = relative_l2(value, other)
        if not error <= PARTING:
            component, step, path = key
            finite = error if math.isfinite(error) else None
            return Divergence(component, step, name_module_path(component, path), finite, PARTING)
    return None


def is_lost(trace: Trace, reference: Trace, key: tuple[str, int | None, str]) -> bool:
    """Return whether a block returned NaN or Inf and the reference's block did not.

    Args:
        key: component, step and path of the block.
    """
    own, other = trace.amax.get(key, 0.0), reference.amax.get(key, 0.0)
    return math.isfinite(other) and not math.isfinite(own)


def _take_powers_off(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Divide each value by the power of two that brings it closest to its reference."""
    ratio = (values / reference).abs()
    known = torch.isfinite(ratio) & (ratio > 0)
    exponents = torch.where(known, ratio.log2().round(), torch.zeros_like(ratio))
    return torch.ldexp(values, -exponents)


def find_headroom(trace: Trace) -> tuple[float | None, str]:
    """Return the least headroom of all blocks, in bits below 65504, and the block and step.

    The headroom is None if a value there is not finite. If no block returned anything but zeros, it is None
    as well, and the block is "".
    """
    counted = {key: count_bits(amax) for key, amax in trace.amax.items()}
    bits = {key: x for key, x in counted.items() if x is not None}
    if not bits:
        return None, ""
    tightest = min(bits, key=lambda key: bits[key])
    component, step, path = tightest
    place = name_module_path(component, path) + ("" if step is None else f" at step {step + 1}")
    return (None if bits[tightest] == SPOILT else bits[tightest]), place


def draw_heats(trace: Trace) -> tuple[Heat, ...]:
    heats = []
    for component, module_paths in trace.order.items():
        rows = list_bits({(path, x): y for (n, x, path), y in trace.amax.items() if n == component})
        called = tuple(path for path in module_paths if path in rows)
        heats.append(Heat(component, called, tuple(rows[path] for path in called)))
    return tuple(heats)


def join_heats(runs: Iterable[Sequence[Heat]]) -> tuple[Heat, ...]:
    """Merge the headroom maps of several runs: keep the least headroom of each block and step."""
    found: dict[str, dict[str, list[tuple[float | None, ...]]]] = {}
    for heat in itertools.chain.from_iterable(runs):
        rows = found.setdefault(heat.component, {})
        for path, bits in zip(heat.module_paths, heat.bits, strict=True):
            rows.setdefault(path, []).append(bits)
    return tuple(
        Heat(component, tuple(rows), tuple(map(_take_tightest, rows.values())))
        for component, rows in found.items()
    )


def _take_tightest(rows: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    columns = itertools.zip_longest(*rows)
    return tuple(min((x for x in bits if x is not None), default=None) for bits in columns)
