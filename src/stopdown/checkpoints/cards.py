"""Metadata entries and model cards that describe converted files.

Both state the plan's seal, what was done to each component, and the evidence that its values stay in range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from stopdown.devices.environment import read_version
from stopdown.errors import OptionError
from stopdown.number_formats import list_all
from stopdown.records import Conversion, ConvertedComponent
from stopdown.sources.headers import EXPONENTS_ENTRY, RESCALED_ENTRY

MARK = "stopdown"
"""Metadata key of a converted file; its value is Stopdown's version and the plan's seal."""

CARD_LINE = "converted to fp16 by Stopdown"
"""End of a card's first line."""

_ADAPTERS = (
    "**Adapters (LoRA, DoRA, IP-Adapter) and ControlNets that were trained for the original don't "
    "fit these weights**: what they add has a different scale, and the picture is wrong without an "
    "error message. Convert the LoRA as well, with this model as its plan: "
    "`stopdown convert LORA OUT --plan THIS`."
)


def list_entries(
    seal: str, components: Iterable[ConvertedComponent], exponents: Mapping[str, int]
) -> dict[str, str]:
    """Return the metadata entries of a converted file.

    Args:
        seal: checksum of the plan, `Plan.seal`.
        components: components in the file.
        exponents: exponents of the file's tensors, by name.
    """
    listed = list(components)
    entries = {MARK: f"{read_version('stopdown')} plan {seal}"}
    if rescaled := [entry.component for entry in listed if entry.folded]:
        entries[RESCALED_ENTRY] = (
            f"{', '.join(rescaled)}: weights are multiplied by powers of two; an adapter (LoRA) for "
            "the original doesn't fit"
        )
        entries[EXPONENTS_ENTRY] = json.dumps(dict(exponents))
    for entry in listed:
        entries[f"{MARK}.{entry.component}"] = " ".join(entry.reasons)
    return entries


def refuse_rescaled(name: str, said: str, *, otherwise: str = "") -> None:
    """Refuse weights that are already multiplied by powers of two, so that nothing is scaled twice.

    Args:
        name: name of the model.
        said: the metadata entry that states it; "" for weights that are not rescaled.
        otherwise: text to append to the remedy.
    """
    if said:
        raise OptionError(
            f"{name} is already rescaled. {said[0].upper()}{said[1:]}.",
            expected="Rescaled weights already fit in fp16, and can't be rescaled again.",
            remedy=f"Use it as it is, or convert the original.{otherwise}",
        )


def word_card(record: Conversion, where: str, name: str = "") -> str:
    """Return the model card of a converted model, in Markdown: what was rescaled, and how to use it.

    Args:
        where: sentence that says where the record is.
        name: name in the title; "" for the source's. Set for a component that was converted alone.
    """
    rescaled = [entry.component for entry in record.components if entry.folded]
    what = "No weight had to be rescaled. It was cast to fp16."
    if rescaled:
        what = (
            f"The weights of {list_all(rescaled)} are rescaled: multiplied by powers of two so "
            "that no value overflows in fp16. The model computes the same function as the "
            f"original.\n\n{_ADAPTERS}"
        )
    rows = ""
    for entry in record.components:
        reasons = " ".join(entry.reasons).replace("|", "\\|").replace("\n", " ")
        rows += f"| {entry.component} | {entry.precision} | {entry.folded or ''} | {reasons} |\n"
    return (
        f"# {name or record.source}, {CARD_LINE}\n\n{what}\n\n"
        f"| component | stored in | tensors rescaled | evidence |\n|---|---|--:|---|\n{rows}\n"
        f"{_word_calls(record)}{'Weights' if name else 'Plan'}: `{record.plan}`. {where}\n"
    )


def _word_calls(record: Conversion) -> str:
    """Return the model card's section on the calls that converted components are valid for; "" if none."""
    rows = "".join(
        f"| {x.component} | {_list_code(x.signatures)} | {_list_code(x.not_for) or 'none'} |\n"
        for x in record.components
        if x.signatures
    )
    return rows and (
        "Converted weights run without Stopdown, so nothing watches their calls. The powers "
        "of two were found for calls with the "
        "arguments below. With other arguments, a component may return wrong values without "
        "an error message. For such calls, use the original with a plan.\n\n"
        f"| component | supported calls | unsupported arguments |\n|---|---|---|\n{rows}\n"
    )


def _list_code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def write_card_beside(file: Path, text: str) -> None:
    """Write a converted file's model card beside it with `.md`, but replace nothing but an earlier card."""
    path = file.with_suffix(".md")
    if not path.exists() or CARD_LINE in path.read_text(encoding="utf-8", errors="replace")[:500]:
        path.write_text(text, encoding="utf-8")
