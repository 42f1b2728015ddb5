"""Contents of a weight file and their faults, found in one pass over its values without a model.

**Catches** NaN and Inf, values beyond fp16 and values that fp16 rounds to zero, scales that are missing,
NaN, zero or too small for fp16, layers of zeros, a file that ends in zeros, incomplete LoRA pairs, and a
dtype that the device does not support; also lists the devices on which programs fall back to fp16.
**Does not catch** activations, which weights do not show; a plan covers those.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from stopdown.devices.device_profiles import Profile, find_device_target, read_profiles
from stopdown.dtype_rules.findings import make_finding, sort_findings
from stopdown.number_formats import FP16, format_bytes, list_some
from stopdown.records import FileCheck, FilePart, Finding
from stopdown.sources.file_weights import FileWeight
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.sources.hub import Progress
from stopdown.sources.lora_names import DENOISER, OTHER_KINDS, split_lora_name, split_prefix
from stopdown.sources.weight_files import WeightFile

ZERO_TAIL = 4096
"""Number of zeros at the end of a file's last matrix from which they count as damage, not training."""


_LOW_RANK = ("lora_A", "lora_B")


@dataclass
class _Values:
    """Statistics of a weight's values.

    Attributes:
        amax: largest finite magnitude.
        bad: number of NaN and Inf values.
        beyond: number of values beyond fp16's maximum.
        count: number of values.
        zero_tail: number of zeros at the end.
        scales: smallest and largest scale of a quantised weight.
        findings: faults of the weight.
    """

    amax: float = 0.0
    bad: int = 0
    beyond: int = 0
    count: int = 0
    zero_tail: int = 0
    scales: tuple[float, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_zero(self) -> bool:
        return self.count > 0 and self.amax == 0 and not self.bad


def inspect_file(
    file: WeightFile,
    source: str,
    device: str | None = None,
    progress: Progress | None = None,
) -> FileCheck:
    """Describe the contents of a weight file, and find its faults.

    Args:
        device: the device to judge the file for; None for all known devices.

    Cost: every byte of the file is read once.
    """
    begun = time.perf_counter()
    profile = find_device_target(device)[1] if device else None
    values, done, total = [], 0, sum(x.size_bytes for x in file.weights)
    for weight in file.weights:
        if progress is not None:
            progress("measure", weight.name, done, total)
        values.append(_measure(weight))
        done += weight.size_bytes
    findings = [finding for found in values for finding in found.findings]
    findings += _check_tail(file, values)
    findings += _check_pairs(file)
    findings += _check_backends(file, profile)
    rescaled = str(file.metadata.get(RESCALED_ENTRY, ""))
    return FileCheck(
        source=source,
        format=file.kind,
        contents=describe_contents(file),
        size_bytes=file.path.stat().st_size,
        device=f"{profile.name} ({profile.title})" if profile else "",
        parts=tuple(_describe_parts(file, values)),
        rescaled=rescaled,
        findings=tuple(sort_findings(_merge(findings))),
        elapsed_s=round(time.perf_counter() - begun, 3),
    )


def _measure(weight: FileWeight) -> _Values:
    found = _Values()
    for piece in weight.read():
        _add_piece(found, piece)
    found.findings += _check_values(weight, found)
    found.findings += _check_scales(weight, found)
    return found


def _add_piece(found: _Values, piece: torch.Tensor) -> None:
    flat = piece.reshape(-1)
    if not flat.numel():
        return
    found.count += flat.numel()
    amax = max(abs(float(x)) for x in torch.aminmax(flat))
    if not amax < math.inf:  # NaN as well
        finite = flat.isfinite()
        found.bad += int((~finite).sum())
        amax = float(flat[finite].abs().max()) if bool(finite.any()) else 0.0
    if amax > FP16.largest:
        found.beyond += int((flat.abs() > FP16.largest).sum())
    found.amax = max(found.amax, amax)
    if float(flat[-1]) == 0:
        used = flat.nonzero()
        is_blank = not len(used)
        after = found.zero_tail if is_blank else -1 - int(used[-1])
        found.zero_tail = flat.numel() + after
    else:
        found.zero_tail = 0


def _check_values(weight: FileWeight, found: _Values) -> Iterator[Finding]:
    place, count = weight.name, found.count
    component = split_prefix(weight.name)[0].replace(DENOISER, "") or "COMPONENT"
    if found.bad:
        evidence = f"{found.bad} of {count} values are NaN or Inf, as stored in {weight.stored}."
        yield make_finding("weight-not-finite", place, evidence)
    elif found.beyond:
        evidence = (
            f"{found.beyond} of {count} values are beyond {FP16.largest:g}, where fp16 ends; the largest "
            f"is {found.amax:.4g}."
        )
        yield make_finding("weight-out-of-range", place, evidence, component=component)
    elif found.is_zero and len(weight.shape) > 1:
        yield make_finding("weights-all-zero", place, f"All {count} values are 0.")
    elif 0 < found.amax <= FP16.smallest / 2 and len(weight.shape) > 1:
        evidence = (
            f"The largest of {count} values is {found.amax:.3g}; fp16 has nothing below "
            f"{FP16.smallest:.3g}."
        )
        yield make_finding("vanishes-in-fp16", place, evidence)
    elif 0 < found.amax < FP16.smallest_normal and len(weight.shape) > 1:
        evidence = (
            f"All {count:,} values are below {FP16.smallest_normal:.3g}, the smallest normal number of "
            "fp16."
        )
        yield make_finding("weight-subnormal", place, evidence, component=component)


def _check_scales(weight: FileWeight, found: _Values) -> Iterator[Finding]:
    if weight.read_scales is None:
        if weight.is_scaled and weight.stored == "int8":
            yield make_finding(
                "scale-missing", weight.name, "Its codes are int8 and have no scale."
            )
        return
    scales = weight.read_scales()
    if scales.element_size() < 2 or not scales.numel():
        return
    scales = scales.float().abs()
    bad = int((~scales.isfinite()).sum())
    is_block = weight.stored.startswith(("Q", "IQ", "TQ"))
    zero = 0 if is_block else int((scales == 0).sum())
    used = scales[scales.isfinite() & (scales > 0)]
    if bad or (zero and not found.is_zero):
        what = [f"{bad} are NaN or Inf"] * bool(bad) + [f"{zero} are 0"] * bool(zero)
        evidence = f"Of its {scales.numel()} scales {' and '.join(what)}."
        yield make_finding("scale-not-usable", weight.name, evidence)
    if not used.numel():
        return
    found.scales = (float(used.min()), float(used.max()))
    small = int((used < FP16.smallest_normal).sum())
    if small and not is_block and "bitsandbytes" not in weight.stored:
        evidence = (
            f"{small} of its {scales.numel()} scales are below {FP16.smallest_normal:.3g}, the smallest "
            f"normal number of fp16; the smallest is {found.scales[0]:.3g}."
        )
        yield make_finding("scale-subnormal", weight.name, evidence)


def _check_tail(file: WeightFile, values: Sequence[_Values]) -> Iterator[Finding]:
    """Find the matrix in which a run of zeros up to the end of the file begins, if it is long."""
    zeros = 0
    for weight, found in zip(reversed(file.weights), reversed(values), strict=True):
        if found.zero_tail >= ZERO_TAIL and len(weight.shape) > 1:
            evidence = (
                f"From here to the end of the file all of {zeros + found.zero_tail} values are 0."
            )
            yield make_finding("ends-in-zeros", weight.name, evidence)
            return
        if not found.is_zero:
            return
        zeros += found.count


def _check_pairs(file: WeightFile) -> Iterator[Finding]:
    sides: dict[str, set[str]] = {}
    for weight in file.weights:
        if (found := split_lora_name(weight.name)) and found[1] in _LOW_RANK:
            sides.setdefault(found[0], set()).add(found[1])
    for layer, present in sides.items():
        if len(present) < 2:
            what = "up (lora_B)" if "lora_A" in present else "down (lora_A)"
            yield make_finding("adapter-incomplete", layer, f"Its matrix {what} is missing.")


def _check_backends(file: WeightFile, profile: Profile | None) -> Iterator[Finding]:
    profiles = [profile] if profile else list(read_profiles().values())
    stored = Counter[str]()
    for weight in file.weights:
        stored[weight.stored] += weight.size_bytes
    has_fp8 = any(re.search(r"fp8|float8|F8_", kind) for kind in stored)
    if has_fp8 and profile and profile.kind == "mps":
        evidence = f"{profile.title} doesn't store fp8 (pytorch/pytorch#148420)."
        yield make_finding("codes-unsupported", file.path.name, evidence)
    is_wide = any(kind == "bf16" or is_quantised(kind) for kind in stored)
    if is_wide and RESCALED_ENTRY not in file.metadata and not _list_adapters(file):
        narrow = [x.title for x in profiles if x.formats["bf16"].state != "native"]
        if narrow:
            evidence = f"Devices without bf16: {', '.join(narrow)}."
            kind = "range-unplanned" if profile else "fp16-unplanned"
            yield make_finding(kind, file.path.name, evidence)


def is_quantised(stored: str) -> bool:
    """Return whether a storage format is quantised: codes with scales, or fp8."""
    return stored not in ("fp16", "fp32", "bf16", "fp64") and not re.fullmatch(
        r"u?int\d+|complex\d+|bool", stored
    )


def _merge(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same kind and remedy into one that also lists the other weights."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.remedy), []).append(finding)
    merged = []
    for group in groups.values():
        first = group[0]
        places = list_some([x.module_path for x in group[1:]])
        more = f" So it is with {places}." if places else ""
        merged.append(replace(first, evidence=first.evidence + more))
    return merged


def find_weight_component(name: str) -> str:
    """Return the prefix of a weight's name that stands for its component; "" if there is none."""
    return split_prefix(name)[1].rstrip("._")


def _describe_parts(file: WeightFile, values: Sequence[_Values]) -> Iterator[FilePart]:
    groups: dict[str, list[tuple[FileWeight, _Values]]] = {}
    for weight, found in zip(file.weights, values, strict=True):
        groups.setdefault(find_weight_component(weight.name), []).append((weight, found))
    for name, group in groups.items():
        stored = Counter[str]()
        for weight, _ in group:
            stored[weight.stored] += weight.size_bytes
        read = [(found.amax, weight.name) for weight, found in group if found.count]
        amax, largest = max(read, default=(None, ""))
        scales = [size for _, found in group for size in found.scales]
        yield FilePart(
            name,
            len(group),
            dict(stored.most_common()),
            amax,
            largest,
            (min(scales), max(scales)) if scales else (),
            sum(not found.count and 0 not in weight.shape for weight, found in group),
        )


def _list_adapters(file: WeightFile) -> list[str]:
    """List the layers for which a file has low-rank matrices or other adapter weights."""
    found = [split_lora_name(weight.name) for weight in file.weights]
    return sorted({x[0] for x in found if x and x[1] in (*_LOW_RANK, *OTHER_KINDS)})


def describe_contents(file: WeightFile) -> str:
    """Describe a file by its tensor names: an adapter with its ranks, or the number of components."""
    adapters = _list_adapters(file)
    if adapters:
        ranks = {
            weight.shape[0]
            for weight in file.weights
            if (found := split_lora_name(weight.name)) and found[1] == "lora_A" and weight.shape
        }
        of_rank = f" of rank {', '.join(map(str, sorted(ranks)))}" if ranks else ""
        kind = (
            "a DoRA" if any("dora_scale" in x.name for x in file.weights) else "an adapter (LoRA)"
        )
        return f"{kind}{of_rank} for {len(adapters)} layers"
    parts = sorted({find_weight_component(weight.name) for weight in file.weights} - {""})
    weights = (
        f"{len(file.weights)} weights in {format_bytes(sum(x.size_bytes for x in file.weights))}"
    )
    if not parts:
        return f"one component, {weights}"
    return f"{len(parts)} component{'s' * (len(parts) > 1)}, {weights}"
