"""What converted files say of themselves: entries in their metadata, and a card for people.

Both have the plan's seal, what was done to each component, and what its range rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stopdown.environment import read_version
from stopdown.pipelines.headers import RESCALED_ENTRY
from stopdown.records import Conversion, ConvertedComponent

MARK = "stopdown"
"""The entry in the metadata of a converted file: the version, and the seal of the plan."""

CARD_LINE = "converted to fp16 by Stopdown"
"""What the first line of a card ends with."""

_ADAPTERS = (
    "**Adapters (LoRA, DoRA, IP-Adapter) and ControlNets that were trained for the original do "
    "not fit these weights**: what they add is of another scale, and the picture is wrong "
    "without an error. Fuse a LoRA into the original (`pipe.fuse_lora()`), save that, and plan and "
    "convert what was saved."
)


def list_entries(seal: str, components: Iterable[ConvertedComponent]) -> dict[str, str]:
    """Entries of a file with these components."""
    listed = list(components)
    entries = {MARK: f"{read_version('stopdown')} plan {seal}"}
    if rescaled := [entry.component for entry in listed if entry.folded]:
        entries[RESCALED_ENTRY] = word_rescaled(rescaled)
    for entry in listed:
        entries[f"{MARK}.{entry.component}"] = " ".join(entry.reasons)
    return entries


def word_rescaled(names: Iterable[str]) -> str:
    """What the metadata of a file with these rescaled components says."""
    return (
        f"{', '.join(names)}: weights are times powers of two; an adapter (LoRA) for the original does "
        "not fit"
    )


def word_card(record: Conversion, where: str) -> str:
    """The card of what was converted, for people.

    Args:
        where: a sentence that names where the record stands.
    """
    rescaled = [entry.component for entry in record.components if entry.folded]
    what = "No weight had to be rescaled. It was cast to fp16."
    if rescaled:
        what = (
            f"The weights of {', '.join(rescaled)} are rescaled: stored times powers of two, so that no "
            f"value of theirs overflows fp16. The model computes what the original computes.\n\n{_ADAPTERS}"
        )
    rows = "".join(_word_row(entry) for entry in record.components)
    return (
        f"# {record.source}, {CARD_LINE}\n\n{what}\n\n"
        f"| component | stored in | tensors rescaled | what that rests on |\n|---|---|--:|---|\n{rows}\n"
        f"Plan: `{record.plan}`. {where}\n"
    )


def _word_row(entry: ConvertedComponent) -> str:
    reasons = " ".join(entry.reasons).replace("|", "\\|").replace("\n", " ")
    return f"| {entry.component} | {entry.precision} | {entry.folded or ''} | {reasons} |\n"


def merge_entries(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with more entries."""
    return {**old, **new}
