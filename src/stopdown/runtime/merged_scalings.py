"""Merge exponents found for a call that failed with those that a plan has for submodules it doesn't use.

A guard solves for the calls that failed, for example decoding. Exponents that a plan has for the rest, such
as an encoder, are still exact, as submodules that no call shares have no equation in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from stopdown.module_calls.mixed_dtypes import merge_operands
from stopdown.records import ResidualStream, Scaling
from stopdown.scaling import read_headroom


def merge_scalings(
    before: Scaling, found: Scaling, used: Iterable[str], methods: Collection[str] = ("forward",)
) -> Scaling:
    """Combine exponents found for new calls with a plan's exponents for submodules that these calls
    don't use.

    Certificates and trials hold only for a whole scaling, so the merged one counts as measured and
    untested.

    Args:
        before: the plan's scaling.
        found: solved for the calls that failed, relative to the original component.
        used: names of the parameters that those calls use.
        methods: names of the component's methods that were called.
    """
    parts = {name.partition(".")[0] for name in used}
    if "forward" in methods:
        parts.add("")  # the component's own hooks

    def keeps(name: str) -> bool:
        return name.partition(".")[0] not in parts

    def keep(entries: Mapping[str, int]) -> dict[str, int]:
        return {name: x for name, x in entries.items() if keeps(name)}

    kept = replace(before, exponents=keep(before.exponents), multiplies=keep(before.multiplies))
    tightest = min(found, kept if kept.exponents else found, key=read_headroom)
    fp32_modules = tuple(filter(keeps, before.fp32_modules))
    known = before.kept_buffers is not None and found.kept_buffers is not None
    buffers = {*(before.kept_buffers or ()), *(found.kept_buffers or ())}
    limits = {x: y for x, y in before.limits.items() if x.partition(".")[0] not in methods}
    sizes = {x: y for x, y in before.sizes.items() if x.partition(".")[0] not in methods}
    notes = dict.fromkeys((before.note, found.note))
    others = [x for x in before.signatures if x.partition("(")[0] not in methods]
    return replace(
        found,
        exponents={**kept.exponents, **found.exponents},
        eps={**keep(before.eps), **found.eps},
        multiplies={**kept.multiplies, **found.multiplies},
        fp32_modules=(*fp32_modules, *found.fp32_modules),
        fp32_flops=min(1.0, found.fp32_flops + (before.fp32_flops if fp32_modules else 0.0)),
        kept_buffers=tuple(sorted(buffers)) if known else None,
        headroom_bits=tightest.headroom_bits,
        tightest=tightest.tightest,
        pinned={**before.pinned, **found.pinned},
        outputs=found.outputs if "forward" in methods else before.outputs,
        stream=_merge_streams(before.stream, found.stream, keeps),
        operands=merge_operands(before.operands, found.operands),
        limits={**limits, **found.limits},
        sizes={**sizes, **found.sizes},
        signatures=tuple(sorted({*found.signatures, *others})),
        shapes={**{x: before.shapes[x] for x in others if x in before.shapes}, **found.shapes},
        note=" ".join(filter(None, notes)),
    )


def _merge_streams(
    before: ResidualStream | None, found: ResidualStream | None, keeps: Callable[[str], bool]
) -> ResidualStream | None:
    """Combine the casts of a new fp32 residual stream with the old one's on submodules that are kept.

    Return None if no cast is left.

    Args:
        keeps: decides by name whether a submodule's old casts are kept.
    """
    if before is None:
        return found
    paths: dict[str, Any] = {
        x.name: tuple(filter(keeps, getattr(before, x.name)))
        for x in fields(ResidualStream)
        if x.name != "returns"
    }
    if found is None:
        return replace(before, **paths) if any(paths.values()) else None
    joined: dict[str, Any] = {name: (*x, *getattr(found, name)) for name, x in paths.items()}
    return replace(found, **joined)
