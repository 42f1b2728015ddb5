"""Decide each component's precision, with a reason; no tensor is read.

Decisions follow from the device's formats (native, emulated or missing, with a timed probe), the format
that the checkpoint is stored in, and the modules that the model's authors keep in fp32.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.component_call_names import split_call
from stopdown.devices.format_support import Support
from stopdown.errors import OptionError
from stopdown.number_formats import FP16, find_format, list_all, parse_precision
from stopdown.records import ComponentPlan

if TYPE_CHECKING:
    import torch

PLAIN_FP16 = "fp16-plain"
"""fp16 without exponents, as libraries load it: it can overflow, and exists for comparisons."""


@dataclass(frozen=True)
class ComponentFacts:
    """The facts about a component that are known before it is loaded.

    Attributes:
        calls: names of its calls, such as `("vae.encode", "vae.decode")`, or its name alone.
        stored: format → bytes on disk.
        kept_fp32: precision in which it is loaded → modules that its authors then keep in fp32.
        force_upcast: its config demands fp32 instead of fp16.
        carries_plan: its config contains a plan for fp16, as `convert` writes it.
    """

    name: str
    calls: tuple[str, ...]
    stored: Mapping[str, int]
    kept_fp32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    force_upcast: bool = False
    carries_plan: bool = False

    @property
    def stored_mostly(self) -> str | None:
        """The format that most bytes are stored in; None if unknown."""
        return max(self.stored, key=lambda name: self.stored[name]) if self.stored else None


def write_request(asked: str | Path | torch.dtype | Mapping[str, Any]) -> str:
    """Convert a `precision` argument to the text that `parse_request` reads.

    Args:
        asked: such a text, the path of a plan, a dtype, or a mapping from components to texts or dtypes:
            `{"transformer": torch.bfloat16, "vae": "fp32"}`.
    """
    if isinstance(asked, (str, Path)):
        return str(asked)
    if isinstance(asked, Mapping):
        return (
            ",".join(f"{name}={write_request(choice)}" for name, choice in asked.items()) or "auto"
        )
    found = find_format(asked) if str(asked).startswith("torch.") else None
    if found is None:
        raise OptionError(
            f"The precision {asked!r:.80} is neither a name nor a floating-point dtype.",
            expected="It is 'auto', 'fp16', torch.float16, 'plan.json', or one of these by component.",
            remedy="For example: precision={'transformer': torch.bfloat16, 'vae': 'fp32'}.",
        )
    return found.name


def find_plan_path(text: str) -> str | None:
    """Return the path if a `--precision` is that of a plan (`*.json`), else None."""
    return text.strip() if text.strip().endswith(".json") else None


def parse_request(text: str, also: Iterable[str] = ()) -> dict[str, str]:
    """Parse a `--precision`: `auto`, `fp16`, `fp16-plain`, `transformer=bf16,vae.decode=fp32`, `plan.json`.

    `fp16` is rescaled so that it can't overflow; `fp16-plain` isn't. A plus is read as a comma, for lists
    in which commas separate whole requests.

    Args:
        also: further names of precisions to accept.

    Returns:
        Component or call → precision, with "" for all components; empty for a plan's path.
    """
    if find_plan_path(text) is not None:
        return {}
    if "=" not in text:
        return {"": _parse_choice(text, also)}
    found: dict[str, str] = {}
    for entry in text.replace("+", ",").split(","):
        name, sign, precision = (part.strip() for part in entry.partition("="))
        if not (sign and name):
            raise OptionError(
                f"The entry {entry.strip()!r} of a precision doesn't name a component.",
                expected="Each entry is COMPONENT=PRECISION.",
                remedy='For example: precision="transformer=bf16,vae=fp32". '
                "Components that aren't named are chosen by auto.",
            )
        wanted = _parse_choice(precision, also)
        if found.setdefault(name, wanted) != wanted:
            raise OptionError(
                f"The precision asks for {name}={found[name]} and for {name}={wanted}.",
                expected="Each component has one precision, and each of its methods can have its own.",
                remedy="Leave one of the two out.",
            )
    return found


def resolve_request(
    request: Mapping[str, str], components: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the requested format of each call; calls that are left to `auto` are absent.

    A request for a method takes precedence over one for its component.

    Args:
        request: from `parse_request`.
        components: name → names of its calls, such as `vae` → `("vae.encode", "vae.decode")`.

    Raises:
        OptionError: the request names an unknown component.
    """
    words = resolve_words(request, components)
    return {call: "fp16" if word == PLAIN_FP16 else word for call, word in words.items()}


def list_rescaled(
    request: Mapping[str, str], components: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the components that need exponents, because the user asked for fp16 for all of their calls.

    Args, Raises: as for `resolve_request`.
    """
    words = resolve_words(request, components)
    return tuple(
        name for name, calls in components.items() if all(words.get(c) == "fp16" for c in calls)
    )


def resolve_words(
    request: Mapping[str, str], components: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the precision that the user wrote for each call, which may be `fp16-plain`.

    Args, Raises: as for `resolve_request`.
    """
    known = sorted({*components, *(call for calls in components.values() for call in calls)})
    chosen: dict[str, str] = {}
    for target in sorted(request, key=lambda part: bool(split_call(part)[1])):
        if target and target not in known:
            raise _unknown_component(target, known)
        for name, calls in components.items():
            taken = calls if target in ("", name) else {target} & {*calls}
            chosen |= dict.fromkeys(taken, request[target])
    return {call: precision for call, precision in chosen.items() if precision != "auto"}


def parse_fp16(text: str, what: str) -> dict[str, str]:
    """Parse the precision for an fp16 plan; return component → precision of those to be left out of fp16.

    Args:
        text: `fp16` or `auto`, which mean the same, or components such as `text_encoder=fp32`.
        what: the kind of plan with its article, such as `A plan`, for messages.

    Raises:
        OptionError: the precision needs no plan.
    """
    asked = parse_request(text)
    others = {name: x for name, x in asked.items() if name and not split_call(name)[1]}
    if asked.get("") not in ("fp16", "auto") and (not others or len(others) < len(asked)):
        raise OptionError(
            f"{what} for {text.strip()} was requested.",
            expected="Only fp16 needs one: bf16 and fp32 hold the values unscaled.",
            remedy=f'Use precision="fp16"; a run in {text.strip()} needs no plan.',
        )
    return {name: x for name, x in others.items() if x not in ("fp16", "auto")}


def check_components(wanted: Iterable[str], known: Iterable[str]) -> None:
    for name in {*wanted} - {*known}:
        raise _unknown_component(name, sorted(known))


def leave_components(
    entries: Iterable[ComponentPlan], wanted: Mapping[str, str]
) -> Iterator[ComponentPlan]:
    """Yield a plan's entries, with another precision and no exponents for some components.

    Args:
        wanted: component → its precision.
    """
    for entry in entries:
        precision = wanted.get(entry.component)
        yield entry if precision is None else leave_component(entry, precision)


def leave_component(entry: ComponentPlan, precision: str) -> ComponentPlan:
    """Return a component's entry with another precision, without exponents."""
    stored = "fp16" if precision == PLAIN_FP16 else precision
    why = f"{precision} was chosen for it."
    return ComponentPlan(
        entry.component,
        entry.class_name,
        entry.weights,
        stored,
        reasons=(why,),
        stored=entry.stored,
    )


def _parse_choice(text: str, also: Iterable[str]) -> str:
    word = text.strip().lower()
    return word if word in ("auto", PLAIN_FP16) else parse_precision(text, (PLAIN_FP16, *also))


def _unknown_component(name: str, known: list[str]) -> OptionError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = near[0] if near else known[0]
    return OptionError(
        f"The model has no component {name!r}.",
        expected=f"It has {', '.join(known)}.",
        remedy=f'For example: precision="{hint}=bf16".',
    )


def decide_precisions(
    components: Iterable[ComponentFacts],
    supports: Mapping[str, Support],
    request: Mapping[str, str],
) -> tuple[ComponentPlan, ...]:
    """Decide how each call of each component runs without exponents, with reasons.

    Args:
        supports: format → how the device supports it.
        request: call → precision that the user asked for, from `resolve_words`; all others are chosen here.

    Raises:
        OptionError: a requested precision doesn't work on the device.
    """
    decisions = []
    for facts in components:
        for call in facts.calls:
            if call in request:
                precision = "fp16" if request[call] == PLAIN_FP16 else request[call]
                reason = f"You asked for {request[call]}."
                support = supports.get(precision)
                if support is not None and not support.works:
                    raise OptionError(
                        f"{call} can't run in {precision} on this device. {support.reason}",
                        remedy=f'Use precision="{call}=fp32", or leave it to auto.',
                    )
                if support is not None and not _is_good(support):
                    reason += f" {support.reason}"
                if facts.carries_plan and precision == "fp16":
                    reason += " The plan in its config.json isn't applied to plain fp16."
            else:
                precision, reason = choose_precision(facts, supports)
            kept = facts.kept_fp32.get(precision, ())
            if kept:
                reason += (
                    f" {list_all([f'`{name}`' for name in kept])} "
                    f"{'stays' if len(kept) == 1 else 'stay'} in fp32, as the model's authors specify."
                )
            decisions.append(
                ComponentPlan(
                    call,
                    precision=precision,
                    reasons=(reason,),
                    stored=facts.stored_mostly,
                    kept_fp32=kept,
                )
            )
    return tuple(decisions)


def choose_precision(facts: ComponentFacts, supports: Mapping[str, Support]) -> tuple[str, str]:
    """Choose the precision of a component for which none was requested; return it with the reason."""
    stored = facts.stored_mostly
    if stored is None:
        return (
            "fp32",
            "The format of its weights on disk is unknown, so it runs in fp32, the reference.",
        )
    if stored not in ("bf16", "fp16"):
        return "fp32", f"The weights are stored in {stored}; fp32 holds them exactly."
    if stored == "fp16" and facts.force_upcast:
        return "fp32", "The autoencoder overflows in fp16, so its config sets force_upcast."
    support = supports[stored]
    if _is_good(support):
        reason = support.reason[:1].lower() + support.reason[1:]
        is_clause = support.reason.startswith(("The ", "Compute "))
        because = f", and {reason}" if is_clause else f" and used as they are. {support.reason}"
        return stored, f"The weights are stored in {stored}{because}"
    return "fp32", f"The weights are stored in {stored}. {support.reason} {_why_not_other(stored)}"


def explain_plan(components: Iterable[ComponentFacts], supports: Mapping[str, Support]) -> str:
    """Return as a clause why a device should run a checkpoint in fp16 with a plan; "" if it shouldn't.

    It should if weights are stored in bf16, and the device is fast in fp16 but not in bf16.
    """
    stored = [facts.name for facts in components if facts.stored_mostly == "bf16"]
    if not stored or not prefers_fp16(supports):
        return ""
    return (
        f"{list_all(stored)} {'is' if len(stored) == 1 else 'are'} stored in bf16, which is slow on this "
        "device, while fp16 is fast"
    )


def prefers_fp16(supports: Mapping[str, Support]) -> bool:
    """Return whether a device computes natively and fast in fp16, but not in bf16."""
    return _is_good(supports["fp16"]) and not _is_good(supports["bf16"])


def _is_good(support: Support) -> bool:
    return support.works and support.native and not support.is_slow


def _why_not_other(stored: str) -> str:
    if stored == "bf16":
        largest = FP16.largest
        return (
            f"In fp16 (maximum {largest:.0f}), activations of bf16-trained models may overflow, so it runs "
            "in fp32."
        )
    return "fp32 holds every fp16 value exactly."
