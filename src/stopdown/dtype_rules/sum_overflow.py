"""Detection of sums inside matrix products that overflow in fp16 accumulators, by one run in fp32.

Each value of a product is a sum. In a kernel that accumulates in fp16, a partial sum beyond 65504 becomes
Inf, even if the final value would fit. Scores of attention are summed before they are divided by the root
of the width. Such sums are not in the graph, and most hardware has fp32 accumulators, so they are computed
here group by group while the pipeline runs once with its real weights.

**Catches** linear layers, convolutions, matrix products and attention of components that run in fp16.
**Does not catch** sums of other prompts, sizes or numbers of steps; transposed convolutions.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from stopdown.component_call_names import name_module_path
from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.components import (
    find_adapter,
    find_components,
    find_device,
    find_kept_fp32,
    put_precision,
)
from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_profiles import DeviceFault, Profile
from stopdown.dtype_rules.findings import generalise, make_finding, sort_findings
from stopdown.dtype_rules.partial_sums import GROUP, ROUNDING, Figures, Sum, find_sums
from stopdown.errors import ignoring_warnings
from stopdown.interception.patches import Patches
from stopdown.memory.smaller_requests import choose_size
from stopdown.module_calls.call_interception import find_module
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import FP16
from stopdown.pipelines.dry_run import make_arguments
from stopdown.records import Finding
from stopdown.scaling import ComponentCall, Rank, intercept, put_cast
from stopdown.sources.library_messages import quiet_libraries

STEPS = 2
"""Number of denoising steps of the run, enough for both ends of the schedule."""

_ATTENTION = ("attention scores", "attention")


def check_sums(
    pipe: Any,
    narrow: Iterable[str],
    profile: Profile,
    run: Callable[[], Any],
) -> list[Finding]:
    """Find sums and products that overflow fp16, worst first, and add a verdict for each component.

    Args:
        pipe: a pipeline or another program with its weights, which is left unchanged.
        narrow: components that would run in fp16.
        run: runs `pipe` once.

    Cost: the run in fp32, with an extra product for each group of 16 terms; memory for fp32.
    """
    sums = _collect(pipe, set(narrow), run)
    groups: dict[tuple[str, ...], list[Sum]] = {}
    for component, entry in sums:
        if entry.fits:
            continue
        key = (component, generalise(entry.path), entry.operation, str(_is_sum_alone(entry)))
        groups.setdefault(key, []).append(entry)
    found = [_word(key[0], group, profile) for key, group in groups.items()]
    for component in dict.fromkeys(name for name, _ in sums):
        own = [entry for name, entry in sums if name == component]
        found.append(make_finding("sums-in-fp16", component, answer(own)))
    return sort_findings(found)


_KINDS = {
    "product": "linear layers and matrix products",
    "convolution": "convolutions",
    "attention scores": "attention scores",
    "attention": "softmax-weighted sums",
}


def answer(sums: Iterable[Sum]) -> str:
    """State whether fp16 accumulation is safe in the measured calls, by kind of operation.

    For each kind, this gives the largest sum, the number of terms that can be summed safely, and the
    rounding error of sums in such pieces. With m roundings of 2**-11, the expected error is sqrt(m) times
    2**-11, and the largest m times 2**-11.
    """
    kinds: dict[str, list[Sum]] = {}
    for entry in sums:
        kinds.setdefault(entry.operation, []).append(entry)
    parts, safe = [], True
    for kind in (x for x in _KINDS if x in kinds):
        own = kinds[kind]
        beyond = [x for x in own if x.piece < x.terms]
        piece = max((x.piece for x in own if x not in beyond), default=0)
        said = f"{_KINDS[kind]} reach {max(x.largest for x in own):.4g}"
        if beyond:
            safe, piece = False, min(x.piece for x in beyond)
            fits = f"in pieces of {piece} terms they fit" if piece else "no pieces of them fit"
            said += f", {len(beyond)} of {len(own)} don't fit, {fits}"
        if piece:
            rounds = math.ceil(piece / GROUP)
            said += f" (error about {ROUNDING * rounds**0.5:.1e}, at most {ROUNDING * rounds:.1e})"
        parts.append(said)
    word = "safe" if safe else "not safe"
    return f"In this run fp16 accumulation is {word}: {'; '.join(parts)}. bf16 rounds by 3.9e-03."


def run_pipeline(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Run a pipeline for `STEPS` steps, in each stage of its own.

    Args:
        arguments: arguments of the call that override the made-up ones; missing sizes are chosen by
            `choose_size`.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    steps = {name: STEPS for name in taken if name.endswith("num_inference_steps")}
    given = {**make_arguments(pipe), **steps, **arguments}
    where = choose_device(find_device(pipe))
    sizes, _ = choose_size(pipe, given, memory_bytes=where.memory_bytes, on_cpu=where.type == "cpu")
    pipe(**{**given, **sizes})


def _collect(pipe: Any, narrow: set[str], run: Callable[[], Any]) -> list[tuple[str, Sum]]:
    """Run once in fp32 and return (component, sums of one operation), largest first."""
    known: defaultdict[Callee, Figures] = defaultdict(dict)
    found: dict[Callee, list[Sum]] = {}

    def look(call: ComponentCall) -> Any:
        outputs: list[Any] = []
        callee = call.callee
        proceed = lambda: outputs.append(call.proceed())  # noqa: E731 - keeps the output
        found[callee] = find_sums(find_module(callee), proceed, known[callee])
        return outputs[0]

    kept: dict[str, tuple[str, ...]] = {}
    casts_arguments = find_adapter(pipe).casts_arguments

    def put(callee: Callee, layers: Patches) -> None:
        if not casts_arguments:
            put_cast(callee, torch.float32, layers)
        if callee.component_name in narrow:
            kept[callee.component_name] = find_kept_fp32(type(callee.owner), "fp16")
            intercept(callee, look, layers, Rank.RECORD)

    hushed = ignoring_warnings(RuntimeWarning)  # of the picture, which is thrown away
    with Patches() as patches, quiet_libraries(), torch.no_grad(), hushed:
        for module in find_components(pipe).values():
            put_precision(module, torch.float32, patches)
        intercept_components(pipe, put, patches)
        run()
    sums = [(callee.component_name, x) for callee, own in found.items() for x in own]
    sums.sort(key=lambda pair: -pair[1].largest)
    return [(c, x) for c, x in sums if not set(x.path.split(".")) & {*kept.get(c, ())}]


def _is_sum_alone(entry: Sum) -> bool:
    """Return whether only partial sums overflow, because the final value fits or is never stored."""
    return entry.operation == "attention scores" or entry.result <= FP16.largest


def _word(component: str, group: list[Sum], profile: Profile) -> Finding:
    """Make one finding for a group of sums at the same module of repeated blocks, worst first."""
    worst = group[0]
    module_path = name_module_path(component, worst.path)
    if not _is_sum_alone(worst):
        return make_finding("product-overflows", module_path, _tell(worst, group))
    fault = next(_find_faults(worst, profile), None)
    fact = profile.formats.get("fp16")
    if fault is not None:
        why = f" {profile.title}: {fault.what} ({fault.source})"
        found = make_finding("sum-overflows", module_path, _tell(worst, group) + why)
        return dataclasses.replace(found, remedy=f"{fault.remedy} {found.remedy}".strip())
    if fact is not None and fact.accumulates == "fp16":
        return make_finding("sum-overflows", module_path, _tell(worst, group))
    return make_finding("sum-may-overflow", module_path, _tell(worst, group))


def _find_faults(entry: Sum, profile: Profile) -> Iterator[DeviceFault]:
    """Yield the device's known faults of fp16 accumulation that affect an operation."""
    attends = entry.operation in _ATTENTION
    for fault in profile.faults:
        is_meant = not fault.operations or attends == (
            "scaled_dot_product_attention" in fault.operations
        )
        if fault.accumulates == "fp16" and is_meant:
            yield fault


def _tell(worst: Sum, group: list[Sum]) -> str:
    what = "The sums of its scores" if worst.operation == "attention scores" else "Its sums"
    ends = "" if worst.operation == "attention scores" else f" and end at {worst.result:.4g}"
    more = f" So do {len(group) - 1} more places." if len(group) > 1 else ""
    return f"{what} ({worst.operation}) reach {worst.largest:.4g}{ends}; fp16's maximum is 65504.{more}"
