"""Observations as findings: one for each cause, with what was seen, what it leads to, what to type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stopdown.dtype_rules.observations import Observation
from stopdown.records import Finding

TELLING = frozenset({"rescaled-weights"})
"""Kinds that say what a model is, and not that anything is wrong with it."""

SEVERITIES = ("error", "wrong", "slow", "note")
"""From the worst on."""


@dataclass(frozen=True)
class Kind:
    """How findings of a kind are told.

    Attributes:
        severity: see `Finding`.
        why: what it leads to.
        remedy: what to type; `{component}`, `{path}`, `{argument}`, `{dtype}` are filled in.
    """

    severity: str
    why: str
    remedy: str


KINDS: dict[str, Kind] = {
    "boundary": Kind(
        "error",
        "The pipeline hands this component a tensor in another dtype than its weights, and its first "
        "operation on it refuses that: the run ends at its first call.",
        "Cast it before the call: {argument} = {argument}.to(pipe.{component}.dtype). Or let Stopdown "
        "cast at the component call: stopdown.mend(pipe).",
    ),
    "mixed-operands": Kind(
        "error",
        "The operation refuses operands of different dtypes: the run ends here with 'expected scalar "
        "type' or 'must have the same dtype'.",
        "Cast one of them in that module, for example the input: x = x.to(self.weight.dtype). Or run "
        "the component in one precision: --precision {component}=fp32.",
    ),
    "widens-itself": Kind(
        "error",
        "The module casts its input to fp32 itself, so its parameters have to be fp32, too; .half() and "
        "torch_dtype take them along, and its operation refuses them.",
        "Leave its parameters in fp32: pipe.{component}.get_submodule('{path}').float(). Or: "
        "stopdown.mend(pipe), which does so for all of them.",
    ),
    "mixed-parameters": Kind(
        "error",
        "Some parameters of the component have another dtype than the rest, as after a partial load, "
        "a LoRA, or a cast of a submodule; an operation that meets both refuses.",
        "Cast the component: pipe.{component}.to({dtype}). Or: stopdown.mend(pipe).",
    ),
    "several-dtypes": Kind(
        "wrong",
        "Parameters of one component have several dtypes, as after a partial load. It runs on this "
        "backend, in mixed precision that nobody chose; another backend refuses it.",
        "Cast the component: pipe.{component}.to({dtype}). Or: stopdown.mend(pipe).",
    ),
    "island-not-cast-back": Kind(
        "error",
        "Its authors keep these weights in fp32, and what they give comes back as fp32 into code that "
        "does not cast it back: the next operation refuses it.",
        "Cast the input of that module back: x = x.to(self.weight.dtype). Or keep the module that casts "
        "by itself, or run the component in one precision: --precision {component}=fp32.",
    ),
    "island-lost": Kind(
        "wrong",
        "Its authors keep these weights in fp32 because 16 bits break them; .to(), .half(), from_pipe "
        "or offloading cast them too. There is no error, only a worse or black result.",
        "Load it again with dtype={dtype} instead of casting it, which keeps them; to undo the cast "
        "in place (the lost bits stay lost): stopdown.mend(pipe).",
    ),
    "not-implemented": Kind(
        "error",
        "The backend has no such operation in this format: the run ends here.",
        "Run that component in another precision: --precision {component}=fp32.",
    ),
    "positions-collapse": Kind(
        "wrong",
        "Different positions become the same number, so places in the picture or frames can no longer "
        "be told apart: no error, a repeated or blurred pattern.",
        "Compute positions in fp32 and cast after sin and cos. Or run it in fp32: "
        "--precision {component}=fp32.",
    ),
    "mask-empty-row": Kind(
        "wrong",
        "The attention mask lets nothing through. A softmax over nothing is NaN on some backends and "
        "versions of torch, and an average over padding on others.",
        "Let it see at least one token: look at the attention_mask that the tokenizer gives (an empty "
        "prompt gives an empty one), or leave the mask away.",
    ),
    "clamp-may-bite": Kind(
        "wrong",
        "The authors clamp values at the end of fp16. A value beyond it is cut off in silence: what "
        "comes out is finite and wrong.",
        "Make a plan, which keeps values below the clamp: stopdown plan SOURCE. Or: "
        "--precision {component}=fp32.",
    ),
    "autocast-overrides": Kind(
        "wrong",
        "The code casts to fp32 here on purpose, and the autocast around the call takes it back.",
        "Leave torch.autocast away around the pipeline. Or: stopdown.mend(pipe), which switches it "
        "off inside of the component.",
    ),
    "timesteps-collapse": Kind(
        "wrong",
        "Different steps of the schedule are the same number for the model: it takes the same step "
        "twice, and the schedule is not the one that was asked for.",
        "Hand over timesteps in fp32. Or use fewer steps: num_inference_steps.",
    ),
    "sigmas-collapse": Kind(
        "wrong",
        "The scheduler's table repeats itself in 16 bits: noise levels are skipped or become 0, and "
        "the last steps divide by 0 or change nothing.",
        "Keep the scheduler in fp32: pipe.scheduler = type(pipe.scheduler).from_config("
        "pipe.scheduler.config).",
    ),
    "force-upcast-unread": Kind(
        "wrong",
        "The autoencoder's config says force_upcast: in fp16 its values leave the range. The pipeline "
        "does not read it: black pictures.",
        "Run it in fp32: pipe.vae.to(torch.float32) with latents cast before, "
        "--precision vae=fp32, or make a plan: stopdown plan SOURCE.",
    ),
    "format-emulated": Kind(
        "slow",
        "The device has no such arithmetic and computes it in fp32 with casts around: slower than "
        "fp32, with the errors of 16 bits.",
        "Use a plan, which makes fp16 safe: stopdown plan SOURCE. Or: --precision fp32.",
    ),
    "format-slow": Kind(
        "slow",
        "The device computes this format at a small part of its fp32 rate.",
        "Use --precision fp32 there.",
    ),
    "format-broken": Kind(
        "wrong",
        "The device gives wrong results in this format.",
        "Use --precision fp32 there.",
    ),
    "format-missing": Kind(
        "error", "The device refuses this format.", "Use --precision fp32 there."
    ),
    "device-fault": Kind(
        "wrong", "A known fault of this device.", "Use --precision {component}=fp32."
    ),
    "weight-not-finite": Kind(
        "error",
        "NaN or Inf in a weight reaches every output of its component.",
        "Download or convert the checkpoint again; it is damaged. A training run that diverged gives "
        "the same.",
    ),
    "weight-out-of-range": Kind(
        "wrong",
        "Values beyond the largest of the format become Inf when the weights are cast.",
        "Keep the component in {stored}: --precision {component}=fp32, or make a plan: "
        "stopdown plan SOURCE.",
    ),
    "weight-subnormal": Kind(
        "wrong",
        "Most values of this tensor are below the smallest normal number of the format: they lose "
        "their bits or become 0.",
        "Keep the component in bf16 or fp32: --precision {component}=fp32. A plan scales them up: "
        "stopdown plan SOURCE.",
    ),
    "range-unplanned": Kind(
        "wrong",
        "What was trained in bf16 may hold values beyond 65504 inside, which fp16 ends at: black "
        "frames without an error.",
        "Make a plan first: stopdown plan SOURCE -o plan.json, then --precision plan.json.",
    ),
    "sum-overflows": Kind(
        "wrong",
        "Kernels that sum in fp16 give Inf there and NaN behind it, though every value fits into fp16.",
        "Keep such sums in fp32: torch.backends.cuda.matmul.allow_fp16_accumulation = False, and the "
        "same switch of your compiler. Or run it in bf16 or fp32: --precision {component}=bf16.",
    ),
    "sum-may-overflow": Kind(
        "note",
        "PyTorch sums in fp32 on this device, as long as allow_fp16_accumulation is off; compilers and "
        "attention kernels that sum in fp16 give Inf there and NaN behind it.",
        "Leave that switch off, and sums in fp32 in your compiler. stopdown.testing.summing_in_fp16() "
        "shows what would happen.",
    ),
    "product-overflows": Kind(
        "wrong",
        "What comes out of this product does not fit into fp16, whatever it is summed in: Inf there, "
        "NaN or black behind it.",
        "Make a plan first: stopdown plan SOURCE -o plan.json, then --precision plan.json. Or: "
        "--precision {component}=bf16.",
    ),
    "rescaled-weights": Kind(
        "note",
        "Stopdown wrote these weights times powers of two. The model computes what the original does; "
        "an adapter (LoRA) that was trained for the original does not fit, and gives wrong pictures "
        "without an error.",
        "Load adapters into the original, plan with them in place, stopdown.make_plan(pipe), and "
        "convert that.",
    ),
    "adapter-on-rescaled": Kind(
        "wrong",
        "The weights are times powers of two and the adapter adds values of another scale: pictures "
        "are wrong, and there is no error.",
        "Take it out: pipe.unload_lora_weights(). Then load the original model and the adapter, and make "
        "a plan: stopdown.make_plan(pipe).",
    ),
    "model-needs": Kind("wrong", "{reason}", "{remedy}"),
    "unchecked": Kind(
        "note",
        "What comes after it was not looked at.",
        "Run it once with its weights and a watch on every call: stopdown generate SOURCE, or "
        "stopdown.guard(pipe). Where only an input was missing, give it: stopdown.check(pipe, "
        "arguments=dict(image=...)).",
    ),
}
"""How each kind is told."""


def make_finding(kind: str, site: str, evidence: str, **facts: str) -> Finding:
    """A finding of a kind, with its why and remedy filled in."""
    told = KINDS[kind]
    values = _Blanks(component=site.partition(":")[0].partition(".")[0], **facts)
    return Finding(
        kind,
        site,
        evidence,
        told.remedy.format_map(values),
        told.why.format_map(values),
        told.severity,
    )


class _Blanks(dict[str, str]):
    """Facts by name; a missing one stays as it was written."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Findings, worst first; equal ones once."""
    unique = {(f.kind, f.site): f for f in reversed(list(findings))}
    ordered = reversed(list(unique.values()))
    return sorted(ordered, key=lambda finding: SEVERITIES.index(finding.severity))


def word_observations(observations: Iterable[Observation]) -> list[Finding]:
    """One finding for each cause among observations."""
    groups: dict[tuple[str, ...], list[Observation]] = {}
    for observation in observations:
        groups.setdefault(_find_cause(observation), []).append(observation)
    return [_word(group) for group in groups.values()]


def _find_cause(seen: Observation) -> tuple[str, ...]:
    component = seen.component.partition(".")[0]
    facts = seen.facts
    if seen.kind == "boundary":
        return seen.kind, component, facts.get("argument", "")
    if seen.kind == "mixed-parameters":
        owner = facts.get("parameter", "").rpartition(".")[0]
        return seen.kind, component, generalise(owner)
    if seen.kind in ("island-not-cast-back", "clamp-may-bite", "not-implemented"):
        return seen.kind, component, seen.operation, facts.get("dtype", "")
    return seen.kind, component, seen.operation, generalise(seen.path)


def generalise(path: str) -> str:
    """A path with its numbers left out: blocks of one kind are one."""
    return re.sub(r"\d+", "*", path)


def _word(group: list[Observation]) -> Finding:
    first = group[0]
    places = list(dict.fromkeys(seen.site for seen in group))
    more = f" So do {len(places) - 1} more places." if len(places) > 1 else ""
    site = _choose_site(first)
    evidence = _EVIDENCE[first.kind](first) + more
    facts = {"path": first.path, **first.facts, "dtype": first.facts.get("main", "")}
    return make_finding(first.kind, site, evidence, **facts)


def _choose_site(seen: Observation) -> str:
    component = seen.component.partition(".")[0]
    if seen.kind == "mixed-parameters":
        owner = seen.facts.get("parameter", "").rpartition(".")[0]
        return f"{component}:{owner}" if owner else component
    return seen.site


def _tell_boundary(seen: Observation) -> str:
    facts = seen.facts
    came = f" (it comes from {facts['before']})" if facts.get("before") else ""
    return (
        f"The argument {facts['argument']} of {seen.component} is {facts['odd_dtype']}{came}; "
        f"{facts['reason']}"
    )


def _tell_operands(seen: Observation) -> str:
    facts = seen.facts
    return f"{facts['reason']} {facts['odd']} got {facts['odd_dtype']} from {facts['origin']}."


def _tell_parameter(seen: Observation) -> str:
    facts = seen.facts
    return f"The parameter {facts['parameter']} brings in {facts['odd_dtype']}; {facts['reason']}"


def _tell_format(seen: Observation) -> str:
    source = f" ({seen.facts['source']})" if seen.facts.get("source") else ""
    return f"{seen.facts['reason']}{source}"


def _tell_positions(seen: Observation) -> str:
    facts = seen.facts
    return (
        f"{facts['distinct']} different positions up to {facts['largest']} are cast to "
        f"{facts['dtype']}, where {facts['left']} are left."
    )


def _tell_mask(seen: Observation) -> str:
    facts = seen.facts
    return f"The mask {facts['shape']} hides every key from every query in {facts['items']} of its items."


def _tell_clamp(seen: Observation) -> str:
    return f"{seen.component} has a {seen.operation} at the end of fp16, and no plan keeps it away."


def _tell_autocast(seen: Observation) -> str:
    facts = seen.facts
    return (
        f"{facts['operand']} of {seen.operation} is fp32 by {facts['wide']}; autocast is on for "
        f"{facts['device']}."
    )


_EVIDENCE: dict[str, Callable[[Observation], str]] = {
    "boundary": _tell_boundary,
    "mixed-operands": _tell_operands,
    "widens-itself": _tell_operands,
    "island-not-cast-back": _tell_operands,
    "mixed-parameters": _tell_parameter,
    "not-implemented": _tell_format,
    "positions-collapse": _tell_positions,
    "mask-empty-row": _tell_mask,
    "clamp-may-bite": _tell_clamp,
    "autocast-overrides": _tell_autocast,
}
