"""Parsing of the list of precisions to compare, without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from stopdown.errors import OptionError
from stopdown.plans.precision import find_plan_path, parse_request

OWN_WORDS = ("autocast", "clamp")
"""Precisions that exist only in comparisons."""


def parse_precisions(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse a list of precisions such as `fp32,bf16,fp16,fp16-plain,autocast,clamp,plan.json`.

    Args:
        given: one list, or several that are joined. A precision may differ by component: alone it is
            written `transformer=bf16,vae=fp32`; inside a list, whose commas separate precisions,
            `transformer=bf16+vae=fp32`.

    Returns:
        The names of the precisions; one by component has a plus between its parts.

    Raises:
        OptionError: there are fewer than two precisions, or one is listed twice.
    """
    lists = (given,) if isinstance(given, str) else given
    names = tuple(_parse_entry(entry) for text in lists for entry in _split(text))
    twice = {name for name in names if names.count(name) > 1}
    if twice or len(names) < 2:
        found = f"{', '.join(sorted(twice))} is listed twice" if twice else f"it has {len(names)}"
        raise OptionError(
            f'precisions="{",".join(lists)}" is no list of precisions to compare: {found}.',
            expected="A comparison needs two or more precisions, each of them once.",
            remedy='Use precisions="fp32,bf16,fp16-plain,fp16".',
        )
    return names


def _split(text: str) -> list[str]:
    """Split a list at its commas, unless all its entries name components: it is one precision then."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    by_component = [entry for entry in entries if "=" in entry and not entry.endswith(".json")]
    if len(by_component) < 2:
        return entries
    if len(by_component) == len(entries):
        return [text]
    raise OptionError(
        f'precisions="{text}" can be read in two ways: {" and ".join(by_component)} may be one '
        "precision or more.",
        expected="Commas separate the precisions of a list.",
        remedy=f"For one write {'+'.join(by_component)}; for several, give each as its own entry.",
    )


def _parse_entry(entry: str) -> str:
    if entry in OWN_WORDS:
        return entry
    if (path := find_plan_path(entry)) is not None:
        return path
    words = parse_request(entry, OWN_WORDS)
    return words.get("") or "+".join(f"{name}={precision}" for name, precision in words.items())
