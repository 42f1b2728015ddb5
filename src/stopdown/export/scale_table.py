"""A plan's powers of two by layer, for programs that write such scales into their source by hand.

What is stored is the value times `2**exponent`. A layer has the exponent of its input, of its weight and
of its output; the first two add up to the third. A program that leaves its weights as they are reaches the
same range with one factor, as stable-diffusion.cpp does: the input times `scale` before the product, the
output over `scale` behind it, in fp32. Where a weight is folded, the table is what was folded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from stopdown.errors import PlanError
from stopdown.records import ComponentPlan, Plan, Scaling

FORMATS = ("txt", "json", "h", "py")
"""Endings of the files that a table is written to."""


@dataclass(frozen=True)
class LayerScale:
    """One layer's exponents.

    Attributes:
        layer: module path; `path[0:64]` for a block of its outputs, `path[:,0:64]` of its inputs.
    """

    layer: str
    input: int
    weight: int
    output: int

    @property
    def scale(self) -> float:
        """What a program multiplies the input of the unscaled weight with, and divides the output by."""
        return 2.0**self.output


def list_scales(scaling: Scaling) -> list[LayerScale]:
    """The layers of a component whose exponents are not all 0, in the order of the plan."""
    rows = [
        LayerScale(layer, source, result - source, result)
        for layer, (source, result) in scaling.layers.items()
    ]
    others = _list_others(scaling, biases=False)
    return rows + [LayerScale(name, 0, exponent, exponent) for name, exponent in others]


def _list_others(scaling: Scaling, *, biases: bool) -> Iterator[tuple[str, int]]:
    """Parameters of no listed layer: the weights of norms, tables and modulations, or biases."""
    layers = {layer.partition("[")[0] for layer in scaling.layers}
    for name, exponent in scaling.exponents.items():
        layer, _, part = name.partition("[")[0].rpartition(".")
        if layer not in layers and (part == "bias") == biases:
            yield name, exponent


def list_entries(plan: Plan) -> list[ComponentPlan]:
    scaled = [entry for entry in plan.components if entry.in_force.exponents]
    if not scaled:
        raise PlanError(
            f"The plan for {plan.source} has no exponents.",
            expected="Each of its components runs in fp16 as it is, or in another precision.",
        )
    if not any(entry.in_force.layers for entry in scaled):
        raise PlanError(
            f"The plan for {plan.source} does not have the exponents of inputs and outputs of layers.",
            expected="Plans have them from this version on.",
            remedy=f"Make it again: stopdown plan {plan.source} -o plan.json",
        )
    return scaled


def write_table(plan: Plan, ending: str) -> str:
    """The table as text, JSON, a C header or a Python module."""
    writers = {"txt": _write_text, "json": _write_json, "h": _write_header, "py": _write_python}
    return writers[ending](plan, list_entries(plan))


def _describe(plan: Plan) -> list[str]:
    return [
        f"Powers of two by layer, of the plan {plan.seal[:12]} for {plan.source}.",
        "Stored is the value times 2**exponent: of the input, the weight and the output of a layer.",
        "scale is for the original weights: multiply the input by scale, and divide the "
        "output by scale in fp32.",
    ]


def _describe_rest(entry: ComponentPlan) -> list[str]:
    """What a table of layers does not hold of a component."""
    scaling = entry.in_force
    said = [f"{name} times 2**{exponent}" for name, exponent in _list_others(scaling, biases=True)]
    said += [f"eps {place} times 2**{exponent}" for place, exponent in scaling.eps.items()]
    said += [f"output of {path or 'all'} times 2**{e}" for path, e in scaling.multiplies.items()]
    return said + [f"{path} in fp32" for path in scaling.fp32_modules]


def _write_text(plan: Plan, entries: list[ComponentPlan]) -> str:
    lines = _describe(plan)
    for entry in entries:
        rows = list_scales(entry.in_force)
        width = max((len(row.layer) for row in rows), default=len("layer"))
        lines += ["", f"{entry.component} ({entry.class_name})"]
        lines.append(f"{'layer':<{width}}  input  weight  output  scale")
        lines += [
            f"{x.layer:<{width}}  {x.input:>5}  {x.weight:>6}  {x.output:>6}  {x.scale:g}"
            for x in rows
        ]
        lines += [f"also: {said}" for said in _describe_rest(entry)]
    return "\n".join(lines) + "\n"


def _write_json(plan: Plan, entries: list[ComponentPlan]) -> str:
    components = {
        entry.component: {
            "class": entry.class_name,
            "layers": [{**asdict(row), "scale": row.scale} for row in list_scales(entry.in_force)],
            "biases": dict(_list_others(entry.in_force, biases=True)),
            "eps": dict(entry.in_force.eps),
            "multiplies": dict(entry.in_force.multiplies),
            "fp32_modules": list(entry.in_force.fp32_modules),
        }
        for entry in entries
    }
    table = {"source": plan.source, "plan": plan.seal, "components": components}
    return json.dumps(table, indent=2) + "\n"


def _write_header(plan: Plan, entries: list[ComponentPlan]) -> str:
    lines = [
        "/*",
        *(f" * {_quote_comment(line)}" for line in _describe(plan)),
        " */",
        "#pragma once",
        "",
    ]
    lines += [
        "struct stopdown_scale {",
        "    const char *layer;",
        "    int input, weight, output;",
        "    float scale;",
        "};",
    ]
    for entry in entries:
        name = _name_constant(entry.component)
        lines += ["", f"/* {entry.component} */"]
        lines += [f"/* also: {_quote_comment(x)} */" for x in _describe_rest(entry)]
        rows = [
            f"    {{{json.dumps(x.layer)}, {x.input}, {x.weight}, {x.output}, {_write_float(x.scale)}}},"
            for x in list_scales(entry.in_force)
        ]
        if rows:  # C has no empty tables
            lines += [f"static const struct stopdown_scale STOPDOWN_{name}[] = {{", *rows, "};"]
    return "\n".join(lines) + "\n"


def _write_float(scale: float) -> str:
    """A power of two as C has it exactly: `1.f / 32.f`, `4.f`."""
    return f"{scale:.1f}f" if scale >= 1 else f"1.0f / {1 / scale:.1f}f"


def _quote_comment(text: str) -> str:
    return text.replace("*/", "* /")


def _write_python(plan: Plan, entries: list[ComponentPlan]) -> str:
    lines = [*(f"# {line}" for line in _describe(plan)), "# layer: (input, weight, output)"]
    for entry in entries:
        lines += ["", *(f"# also: {said}" for said in _describe_rest(entry))]
        lines.append(f"{_name_constant(entry.component)} = {{")
        lines += [
            f"    {x.layer!r}: ({x.input}, {x.weight}, {x.output}),"
            for x in list_scales(entry.in_force)
        ]
        lines.append("}")
    return "\n".join(lines) + "\n"


def _name_constant(component: str) -> str:
    return re.sub(r"\W", "_", component).upper()
