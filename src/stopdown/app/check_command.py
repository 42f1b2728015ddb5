"""Implementation of `stopdown check`: report dtype problems of a model before it is run.

A weight file is checked as a file: its contents, the values in it, and the problems that these would
cause. With an option that only applies to models, such as `--precision`, it is checked as a model.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import ConfigOption, RevisionOption, SourceOptions
from stopdown.app.registration import name_source
from stopdown.app.request_options import check_pairs, refuse_unknown_device
from stopdown.component_call_names import split_call
from stopdown.errors import OptionError
from stopdown.files.outputs import check_target, written_beside
from stopdown.number_formats import FORMATS, format_bytes
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import CheckRecord, FileCheck, FilePart, Finding
from stopdown.sources.headers import WEIGHT_FILES, DamagedFileError
from stopdown.sources.source import Source
from stopdown.sources.source_checks import describe_damage, find_missing, verify_source
from stopdown.sources.source_problems import refuse_problems
from stopdown.sources.sources import find_kind, refuse_ignored, resolve_source

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.dtype_rules.check import CheckResult

_OF_MODELS = (
    "precision",
    "config",
    "sums",
    "fix",
    "output",
    "variant",
)
"""Options that only apply to models; with any of them a weight file is checked as a model."""

NOT_WRITTEN = (
    "a folder can't contain casts of arguments: after loading it, call stopdown.mend(pipe)."
)


@dataclass(frozen=True)
class CheckOptions(SourceOptions):
    """Find dtype and overflow problems before a run.

    Loads no weights, and works for devices that aren't in this machine. Exits with code 1 if there are
    problems. For a weight file it shows what the file contains; with --precision or --config it checks
    the file as a model.

    Examples:
      stopdown check zai-org/CogVideoX-5b --device v100
      stopdown check shapes --precision fp16-plain --device t4
      stopdown check flux1-dev-Q4_0.gguf
    """

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hub id, Diffusers folder (configs are enough), weight file (.safetensors or "
            ".gguf), or a bundled model: shapes, solids.",
        ),
    ]
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision to check, as for generate: fp32, bf16, fp16 (with a plan) or fp16-plain "
            "(as Diffusers runs it); per component, such as transformer=fp16,vae.decode=fp32; or a plan "
            "file, such as plan.json. By default what auto would choose on that device."
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="Device to check for: cuda, mps, cpu, or a profile such as v100."),
    ] = None
    revision: RevisionOption = None
    config: ConfigOption = None
    sums: Annotated[
        bool,
        typer.Option(
            "--sums",
            help="Also load the weights and run two steps in fp32. Finds matrix products whose "
            "results don't fit in fp16, and sums that overflow in kernels with fp16 accumulators.",
        ),
    ] = False
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Load the model, repair what can be repaired, and check again."),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="With --fix: new or empty folder for the repaired model."
        ),
    ] = None


def run_check_command(options: CheckOptions) -> int:
    """Run the command and print its report; return 1 if a finding is a fault and not just a note."""
    from stopdown.app.progress import open_display, print_result

    is_file = is_weight_file(options)
    with open_display(options, is_short=True) as display:
        record = check_file(options, display) if is_file else check_model(options, display)
    asked = options.precision or "auto"
    draw: Any = print_file if is_file else functools.partial(print_check, precision=asked)
    print_result(options, record, functools.partial(draw, record), highlight=False)
    from stopdown.dtype_rules.findings import is_fault

    return int(any(is_fault(found.kind) for found in record.findings))


def is_weight_file(options: CheckOptions) -> bool:
    """Return whether the source is a weight file and no option applies to models only.

    Raises:
        OptionError: an option for models was given for a GGUF file.
    """
    kind, suffix = find_kind(options.source), Path(options.source).suffix.lower()
    if kind != "file" or suffix not in WEIGHT_FILES:
        return False
    asked = [
        entry.name
        for entry in dataclasses.fields(options)
        if entry.name in _OF_MODELS and getattr(options, entry.name) != entry.default
    ]
    if asked and suffix == ".gguf":
        raise OptionError(
            f"--{asked[0]} can't be used with the GGUF file {options.source}.",
            expected="GGUF files are checked on their own, without the model.",
            remedy=f"Leave --{asked[0]} out.",
        )
    return not asked


def check_file(options: CheckOptions, display: Display | None = None) -> FileCheck:
    """Check a weight file: return its contents and the problems that would arise from them."""
    refuse_ignored(options.source, options.revision, options.config)
    refuse_unknown_device(options.device, takes_profile=True)
    shown = display or Display()
    shown.progress("import", "PyTorch", 0, 0)
    from stopdown.dtype_rules.file_values import inspect_file
    from stopdown.sources.weight_files import open_weight_file

    path = Path(options.source).expanduser()
    try:
        file = open_weight_file(path)
    except (DamagedFileError, OSError) as error:
        refuse_problems(options.source, [describe_damage(path, error)])
        raise
    found = inspect_file(file, options.source, options.device, shown.progress)
    return replace(
        found,
        findings=tuple(
            replace(x, remedy=name_source(x.remedy, options.source)) for x in found.findings
        ),
    )


def check_model(options: CheckOptions, display: Display | None = None) -> CheckRecord:
    """Check a model without its weights; with `options.fix`, load it, repair it and check it again."""
    begun = time.perf_counter()
    _refuse(options)

    found = _resolve(options, with_weights=False)
    if found.kind in ("bundled", "folder"):
        refuse_problems(found.name, find_missing(found))
    load_libraries(display or Display())
    from stopdown.dtype_rules.check import choose_auto, find_weightless_source, inspect_pipeline

    source = find_weightless_source(found)
    precision, judged = options.precision, ""
    if precision in (None, "auto"):
        precision, judged = choose_auto(source, options.device)
    if options.sums:
        judged = f"{judged} Two steps were run in fp32 to check sums.".lstrip()
    checked = inspect_pipeline(
        source,
        precision=precision,
        device=options.device,
        sums=options.sums,
    )
    findings, mended = checked.findings, tuple[str, ...]()
    if options.fix and findings:
        findings, mended = _fix(options, checked)
    return CheckRecord(
        options.source,
        f"{checked.profile.name} ({checked.profile.title})",
        checked.precisions,
        tuple(replace(x, remedy=name_source(x.remedy, options.source)) for x in findings),
        mended,
        round(time.perf_counter() - begun, 3),
        judged,
    )


def _refuse(options: CheckOptions) -> None:
    refuse_ignored(options.source, options.revision, options.config)
    refuse_unknown_device(options.device, takes_profile=True)
    asked = parse_request(options.precision or "auto")
    plan = find_plan_path(options.precision or "")
    if plan is not None:
        read_plan(plan)
    if options.fix and (plan is not None or any(split_call(part)[1] for part in asked)):
        raise OptionError(
            f"--fix was given with --precision {options.precision}.",
            expected="It repairs a model in one precision for each component, without a plan.",
            remedy="Leave --fix out, or use --precision fp16-plain.",
        )
    if options.fix and "fp16" in asked.values():
        raise OptionError(
            f"--fix was given with --precision {options.precision}.",
            expected="fp16 is run with a plan, and --fix repairs a model without one.",
            remedy="Use --precision fp16-plain, or write an fp16 copy with stopdown convert.",
        )
    check_pairs(options)
    if options.output is not None:
        check_target(options.output, folder=True)


def _fix(options: CheckOptions, checked: CheckResult) -> tuple[list[Finding], tuple[str, ...]]:
    """Repair a model and write it to `output`; return the remaining findings and a list of the repairs."""
    from stopdown.checkpoints.component_folders import told_as_oserror
    from stopdown.dtype_rules.mend import mend
    from stopdown.pipelines.loader import load_pipeline

    source = _resolve(options)
    verify_source(source)
    dtypes = {name: FORMATS[entry].torch_dtype for name, entry in checked.precisions.items()}
    pipe = load_pipeline(source, torch_dtypes=dtypes)
    mending = mend(pipe, device=options.device)
    done = mending.done
    if options.output is not None and done:
        with written_beside(options.output) as part, told_as_oserror():
            pipe.save_pretrained(part)
        done = (*done, f"written to {options.output}; {NOT_WRITTEN}")
    about_files = [f for f in checked.findings if f.kind == "range-unplanned"]
    return [*mending.remaining, *about_files], done


def _resolve(options: CheckOptions, *, with_weights: bool = True) -> Source:
    named = {name: getattr(options, name) for name in ("revision", "config", "variant")}
    return resolve_source(options.source, **named, with_weights=with_weights)


def print_check(record: CheckRecord, console: Console, *, precision: str = "auto") -> None:
    """Print the verdict, the command to run next, the precisions checked, and each finding."""
    from stopdown.app.progress import print_parts

    show = functools.partial(print_parts, console)

    show((_describe_verdict(record.findings), "bold"), f" in {record.source} on {record.device}.")
    run = f"stopdown generate {shlex.quote(record.source)} PROMPT"
    run += "" if precision == "auto" else f" --precision {precision}"
    show(("→ ", "bold"), _find_remedy(record.findings) or run)
    chosen = ", ".join(f"{name} {entry}" for name, entry in record.precisions.items())
    show()
    if chosen:
        show(" ".join(filter(None, (f"Checked: {chosen}.", record.judged))))
    for line in record.mended:
        show(("mended ", "bold"), line)
    _print_findings(record.findings, console, _find_remedy(record.findings))


def _find_remedy(findings: tuple[Finding, ...]) -> str:
    """Return the remedy for the worst problem; "" if there is none."""
    from stopdown.dtype_rules.findings import is_fault

    return next((found.remedy for found in findings if is_fault(found.kind)), "")


def _describe_verdict(findings: tuple[Finding, ...]) -> str:
    """Return the number of problems and notes: `3 problems and 1 note`, or `No problems`."""
    from stopdown.dtype_rules.findings import is_fault

    faults = sum(is_fault(found.kind) for found in findings)
    notes = len(findings) - faults
    said = f"{faults} problem{'s' * (faults != 1)}" if faults else "No problems"
    return f"{said} and {notes} note{'s' * (notes != 1)}" if notes else said


def print_file(record: FileCheck, console: Console) -> None:
    """Print the contents of a weight file by component, and the findings, worst first."""
    from stopdown.app.progress import print_parts, print_prose

    where = f" on {record.device}" if record.device else ""
    verdict = f" in {record.source}{where}."
    print_parts(console, (_describe_verdict(record.findings), "bold"), verdict)
    if remedy := _find_remedy(record.findings):
        print_parts(console, ("→ ", "bold"), remedy)
    print_parts(console, f"\n{record.format}, {record.contents}")
    if record.rescaled:
        print_prose(console, f"Rescaled already: {record.rescaled}.")
    for part in record.parts:
        print_prose(console, f"- {part.component or 'others'}: {_describe_part(part)}")
    _print_findings(record.findings, console, _find_remedy(record.findings))


_SEVERITIES = {"error": "ERROR", "wrong": "WRONG RESULT", "slow": "SLOW", "note": "NOTE"}


def _describe_part(part: FilePart) -> str:
    stored = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in part.stored.items())
    said = [f"{part.weights} weights", stored]
    if part.amax is not None:
        said.append(f"the largest value is {part.amax:.4g} ({part.largest})")
    if part.unread:
        said.append(f"{part.unread} can't be unpacked here")
    if part.scales:
        said.append(f"scales from {part.scales[0]:.3g} to {part.scales[1]:.3g}")
    return "; ".join(said)


def _print_findings(findings: tuple[Finding, ...], console: Console, printed: str) -> None:
    """Print each group of equal findings, without remedies that were printed before, as `printed` was."""
    from stopdown.app.progress import print_parts

    show = functools.partial(print_parts, console)

    for first, *others in _group_findings(findings):
        also = f" and {len(others)} more" if others else ""
        show(
            (f"\n{_SEVERITIES[first.severity]} ", "bold"),
            (f"{first.module_path}{also}", "bold"),
            f"  [{first.kind}]",
        )
        show(f"  {first.evidence}")
        show(f"  {first.why}")
        show(("  → ", "bold"), "Same fix as above." if first.remedy in printed else first.remedy)
        printed += first.remedy
        if others:
            show(f"  The same in {', '.join(x.module_path for x in others)}.")


def _group_findings(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Group findings that differ in their place and evidence alone, in the order of the first of each."""
    groups = dict[tuple[str, ...], list[Finding]]()
    for found in findings:
        groups.setdefault((found.kind, found.severity, found.why, found.remedy), []).append(found)
    return list(groups.values())
