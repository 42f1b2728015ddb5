"""Command `stopdown run SCRIPT`: its options, messages and exit code; `runtime.scripts` guards the models.

The script has its own `sys.argv`, standard output and exit code. Stopdown's messages go to standard error.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stopdown.app.display import keep_updated
from stopdown.app.flags import CommandOptions, KeepRepairsOption
from stopdown.app.main_module import as_main, execute, find_start, wait_for_threads
from stopdown.app.request_options import refuse_unknown_device
from stopdown.app.streams import CheckedStdout
from stopdown.devices.device_choice import choose_device
from stopdown.devices.environment import require_package
from stopdown.errors import OptionError
from stopdown.files.outputs import check_target
from stopdown.number_formats import find_format
from stopdown.plans.plan_files import describe_no_plan, read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import GuardRecord, ScriptRecord, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.interception.patches import Patches
    from stopdown.runtime.scripts import ScriptGuard


@dataclass(frozen=True)
class ScriptOptions(CommandOptions):
    """Run a script unchanged and guard its models.

    Repairs overflow, NaN and dtype errors, and reports black frames and whatever it can't repair. Exits
    with the script's exit code.

    Examples:
      stopdown run cli_demo.py --prompt "a girl riding a bike" --dtype float16
      stopdown run --strict --device cpu script.py
      stopdown run -m package.module
    """

    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="Python file to run. Put Stopdown's options before it. With -m, the module's "
            "first argument.",
        ),
    ] = None
    arguments: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="ARGS", help="The script's arguments: everything after SCRIPT."),
    ] = ()
    module: Annotated[
        str | None, typer.Option("-m", "--module", help="Module to run instead of a file.")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to use for everything that the script sends to CUDA: cpu, mps or "
            "cuda:1. By default the script decides."
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with code 1, even if the script succeeds, if NaN or Inf couldn't be repaired or "
            "frames are black, grey, frozen or noisy.",
        ),
    ] = False
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            "--plan",
            help="auto: as the script requests; on a device that is fast in fp16 but not in bf16, "
            "models that the script loads in a 16-bit format get a plan. as-is: as the script requests, on "
            "every device. plan.json: apply this plan to the pipelines it was made for. fp16, bf16 or "
            "fp32: use this format for every model that the script loads in a 16-bit format.",
        ),
    ] = "auto"
    keep_repairs: KeepRepairsOption = False
    components: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Guard only components with these names, classes or methods, such as 'UNet*,*.decode'. "
            "By default all.",
        ),
    ] = None

    @property
    def target(self) -> str:
        """The program to run: the module if one was named, else the file."""
        return self.module or self.script or ""

    @property
    def words(self) -> tuple[str, ...]:
        """The program's arguments. With -m, the first positional word is one of them, not a file."""
        before = (self.script,) if self.module is not None and self.script is not None else ()
        return (*before, *self.arguments)


def run_run_command(options: ScriptOptions) -> int:
    """Run the script and report to standard error; return the exit code of the script."""
    from stopdown.app.progress import open_console

    if options.script is None and options.module is None:
        raise typer.BadParameter("Name a SCRIPT, or a module with -m.")
    console = open_console(stderr=True)

    def announce(text: str) -> None:
        wraps = not console.is_terminal
        console.print(f"stopdown: {text}", style="yellow", soft_wrap=wraps, highlight=False)

    record = run_script(options, announce)
    if options.json:
        CheckedStdout(sys.stdout).write(to_json(record))
    else:
        print_script(record, console)
    return choose_code(record, strict=options.strict)


def run_script(options: ScriptOptions, announce: Callable[[str], None]) -> ScriptRecord:
    """Run a script to its end with every pipeline call guarded, and every module call without a pipeline.

    Returns:
        The record of the run. An exception of the script is printed, and its exit code is 1.
    """
    started = time.perf_counter()
    is_module = options.module is not None
    start = find_start(options.target, is_module=is_module)
    path = _check_options(options)
    refuse_unknown_device(options.device)
    require_package("diffusers", "pipelines", "`stopdown run`")
    from stopdown.app.child_processes import Children
    from stopdown.interception.patches import Patches

    remarks: list[str] = []

    def remark(text: str) -> None:
        remarks.append(text)
        announce(text)

    if options.keep_repairs and path is not None:
        check_target(path, noun="plan", option="with --plan", replaces=describe_no_plan)
    children = Children(functools.partial(guard_child, options))
    with Patches() as patches, as_main(options.target, options.words, is_module=is_module):
        guarding = _put_on(options, path, remark, patches)
        children.listen(patches)
        plan = guarding.plan
        try:
            code, error = execute(start)
            wait_for_threads()
        finally:
            if path is not None and guarding.plan is not None and guarding.plan is not plan:
                keep_updated(guarding.plan, path, options.keep_repairs, remark)
        if "CUDA" in str(error) or "accelerator" in str(error):
            remark(_NO_DEVICE)
        _hint_at_options(options, code, remark)
        _hint_at_components(options, guarding, remark)
    return ScriptRecord(
        script=options.target,
        arguments=options.words,
        exit_code=code,
        runs=tuple(guarding.runs),
        findings=tuple(guarding.findings),
        remarks=tuple(remarks),
        unrepaired=guarding.failed,
        elapsed_s=time.perf_counter() - started,
        modules=guarding.modules.record,
        processes=children.started,
    )


def _put_on(
    options: ScriptOptions, path: str | None, remark: Callable[[str], None], patches: Patches
) -> ScriptGuard:
    """Guard this process's model calls, and choose precisions for models that it loads.

    Undoing `patches` ends both.
    """
    from stopdown.component_calls.pipeline_interception import (
        redirect_devices,
        stop_without_kernels,
    )
    from stopdown.quantizers.script_loading import plan_loads
    from stopdown.runtime.scripts import ScriptGuard
    from stopdown.sources.library_messages import drop_empty_remarks

    wanted = find_format(options.precision.strip())  # None for the script's own, or a plan's
    guarding = ScriptGuard(
        remark,
        read_plan(path) if path is not None else None,
        tuple(filter(None, (options.components or "").split(","))),
        None if wanted is None else wanted.torch_dtype,
    )
    drop_empty_remarks(patches)
    guarding.put_on(patches)
    if options.device is not None:
        device = choose_device(options.device)
        redirect_devices(str(device.torch_name), remark, patches)
    else:
        stop_without_kernels(patches)
    if options.precision.strip() == "auto":
        otherwise = f"--precision {AS_IS} loads it as the script requests."
        plan_loads(options.device or "auto", remark, patches, otherwise)
    return guarding


def guard_child(options: ScriptOptions) -> None:
    """Guard this process, which the script has spawned, until it ends; messages go to standard error."""
    from stopdown.app.child_processes import Children
    from stopdown.interception.patches import Patches

    def remark(text: str) -> None:
        sys.stderr.write(f"stopdown: {text}\n")
        sys.stderr.flush()

    patches = Patches()
    _IN_CHILD.append(patches)
    _put_on(options, find_plan_path(options.precision), remark, patches)
    Children(functools.partial(guard_child, options)).listen(patches)


_IN_CHILD: list[Patches] = []
"""Patches that guard this process, if a guarded script has spawned it."""

_NO_DEVICE = (
    "This machine has no such device. `stopdown run --device cpu SCRIPT` uses another one. Options of "
    "Stopdown go before the script."
)


def _check_options(options: ScriptOptions) -> str | None:
    """Refuse options that `stopdown run` cannot combine; return the path of the plan, or None."""
    plan = find_plan_path(options.precision)
    is_as_is = options.precision.strip() == AS_IS
    if not is_as_is and any(parse_request(options.precision, also=(AS_IS,))):
        raise OptionError(
            f"--precision {options.precision} was given for a script.",
            expected="A script takes a plan, or a single precision for all that it loads in 16 bits.",
            remedy="Use --precision fp16 or --precision plan.json. To guard only some components, use "
            "--components.",
        )
    if options.keep_repairs and plan is None:
        raise OptionError(
            "--keep-repairs was given without a plan.",
            expected="Repairs are saved in the file of a plan. Without one they only last until the "
            "script ends.",
            remedy="Make a plan: stopdown plan SOURCE -o plan.json, and add --precision plan.json.",
        )
    return plan


AS_IS = "as-is"
"""Value of `--precision` that leaves the precision of the models to the script."""

_OWN = ("--keep-repairs", "--plan", "--precision", "--strict", "--json", "--device")
"""Options of Stopdown that people write after the script by mistake, so that the script gets them."""

_REFUSED = 2
"""Exit code of argparse and most other parsers for an unknown option."""


def _hint_at_options(options: ScriptOptions, code: int, remark: Callable[[str], None]) -> None:
    """Remark that a script received, and probably rejected, an option that was meant for Stopdown."""
    words = [word.partition("=")[0] for word in options.words]
    ours = [word for word in words if word in _OWN]
    if ours and (code == _REFUSED or "--keep-repairs" in ours):
        remark(
            f"{', '.join(ours)} {'was' if len(ours) == 1 else 'were'} passed to the script, because "
            "options after the script's name are the script's. Put Stopdown's options before it: "
            f"stopdown run {ours[0]} … {options.target}"
        )


def _hint_at_components(
    options: ScriptOptions, guarding: ScriptGuard, remark: Callable[[str], None]
) -> None:
    """Remark that nothing was guarded, because no called component has a name in `--components`."""
    unwanted = sorted(guarding.modules.unwanted)
    is_guarded = guarding.modules.calls or any(run.calls for run in guarding.runs)
    if unwanted and not is_guarded:
        remark(
            f"No component named {options.components} was called, so nothing was guarded. The script "
            f"called {', '.join(unwanted[:_MOST_NAMED])}."
        )


_MOST_NAMED = 8


def choose_code(record: ScriptRecord, *, strict: bool = False) -> int:
    """Return the exit code of the script.

    Args:
        strict: if the script succeeded, return 1 for unrepaired faults or findings in the frames.
    """
    return record.exit_code or int(strict and (record.unrepaired or bool(record.findings)))


def _describe_run(run: GuardRecord) -> str:
    """Describe the calls and the repairs of one pipeline call, or of the modules without a pipeline."""
    counts = []  # `UNet 3 times in fp16 (5.2 bits of headroom in its output)`
    for call in run.calls:
        often = "once" if call.calls == 1 else f"{call.calls} times"
        formats = f" in {' + '.join(call.precisions)}" if call.precisions else ", without weights"
        counts.append(f"{call.component} {often}{formats}")
        if call.headroom_bits is not None:
            counts[-1] += f" ({call.headroom_bits:.1f} bits of headroom in its output)"
    repaired = [
        f"{x.module_path} ({x.done}, {x.retried})" for x in run.repairs if x.action != "none"
    ]
    said = f"repaired {', '.join(repaired)}. " if repaired else ""
    said += f"Called {', '.join(counts)}." if counts else "No component was guarded."
    if run.reused and run.pipeline:
        said += f" From an earlier run: {', '.join(run.reused)}."
    if not run.pipeline:
        said += "".join(f" {text}" for text in run.unwatched)
    return said


def _describe_faults(record: ScriptRecord) -> str:
    """Name the components with unrepaired faults, and describe the consequences."""
    places = dict.fromkeys(
        repair.component
        for run in (*record.runs, *filter(None, (record.modules,)))
        for repair in run.repairs
        if repair.action == "none"
    )
    named = ", ".join(f"`{name}`" for name in places)
    return (
        f"Not repaired: NaN or Inf in the output of {named}. The script received it unchanged, and the "
        "exit code is the script's. With --strict it is 1."
    )


def print_script(record: ScriptRecord, console: Console) -> None:
    """Print the calls of the script's models, the repairs and the findings."""
    from stopdown.app.progress import print_prose

    if not record.runs and record.modules is None and not record.remarks:
        where = " in its own process" if record.processes else ""
        print_prose(
            console,
            f"stopdown: {record.script} called no torch module{where}: there was nothing to guard.",
        )
    if record.processes:
        many = f"{record.processes} process{'es' * (record.processes != 1)}"
        print_prose(
            console,
            f"stopdown: It started {many}, guarded as well; what is done there is reported at once.",
        )
    for number, run in enumerate(record.runs, 1):
        print_prose(console, f"stopdown: run {number}, {run.pipeline}: {_describe_run(run)}")
    if record.modules is not None:
        print_prose(console, f"stopdown: outside of pipelines: {_describe_run(record.modules)}")
    if record.unrepaired:
        print_prose(console, f"stopdown: {_describe_faults(record)}", "yellow")
    for finding in record.findings:
        text = f"stopdown: {finding.kind} in {finding.module_path}: {finding.evidence} {finding.remedy}"
        print_prose(console, text, "yellow")
