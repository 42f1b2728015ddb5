"""`stopdown run`, as a plain function: a script runs unedited, its models guarded; a record comes back.

The script has its own `sys.argv`, standard output and exit code. What Stopdown has to say goes to
standard error.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stopdown.app.display import keep_updated
from stopdown.app.flags import CommandOptions, KeepRepairsOption, StrictOption
from stopdown.app.request_options import refuse_unknown_device
from stopdown.app.signals import Stopped
from stopdown.app.streams import CheckedStdout
from stopdown.devices.environment import choose_device, require_package
from stopdown.errors import InputError, NonFiniteError, OptionError, StopdownError
from stopdown.files.outputs import check_target
from stopdown.number_formats import find_format
from stopdown.plans.plan_files import describe_no_plan, read_plan
from stopdown.plans.precision import find_plan_path, parse_request
from stopdown.records import GuardRecord, ScriptRecord, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.runtime.scripts import ScriptGuard


@dataclass(frozen=True)
class ScriptOptions(CommandOptions):
    """Run a script unchanged and guard its models.

    Faults are repaired and black frames are reported. The exit code is that of the script, or 1 if a
    fault could not be repaired.

    Examples:
      stopdown run cli_demo.py --prompt "a girl riding a bike" --dtype float16
      stopdown run --on-fault raise --device cpu script.py
      stopdown run -m package.module
    """

    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="Python file to run. Options of Stopdown go before it. With -m, the module's "
            "first argument.",
        ),
    ] = None
    arguments: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="ARGS", help="Arguments of the script: everything after SCRIPT."),
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
    on_fault: Annotated[
        Literal["repair", "raise", "warn"],
        typer.Option(
            help="What to do if a component gives NaN or Inf. repair: repair it, run the call "
            "again and continue. raise: stop. warn: only report it."
        ),
    ] = "repair"
    strict: StrictOption = False
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            "--plan",
            help="auto: as the script requests; on a device that is fast in fp16 but not in bf16, "
            "what the script loads in a 16-bit format gets a plan. as-is: as the script requests, on "
            "every device. "
            "plan.json: apply this plan to the pipelines it was made for. fp16, bf16 or fp32: use "
            "this format for everything that the script loads in a 16-bit format.",
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
        """What is run: the module where one was named, else the file."""
        return self.module or self.script or ""

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of what is run; those of a module begin where the file would stand."""
        before = (self.script,) if self.module is not None and self.script is not None else ()
        return (*before, *self.arguments)


def main(options: ScriptOptions) -> int:
    """Run the command: what Stopdown has to say on stderr, and the exit code of the script."""
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
    """Run a script to its end, each call of a pipeline, or of a module without one, guarded.

    Returns:
        What its models did; an exception of the script is printed, and its exit code is 1.
    """
    started = time.perf_counter()
    start = _find_start(options)
    path = _check_options(options)
    refuse_unknown_device(options.device)
    require_package("diffusers", "pipelines", "`stopdown run`")
    from stopdown.component_calls.pipeline_interception import (
        redirect_devices,
        stop_without_kernels,
    )
    from stopdown.interception.patches import Patches
    from stopdown.quantizers.script_loading import plan_loads
    from stopdown.runtime.scripts import ScriptGuard
    from stopdown.sources.library_messages import drop_empty_remarks

    plan = read_plan(path) if path is not None else None
    wanted = find_format(options.precision.strip())  # None for the script's own, or a plan's
    remarks: list[str] = []

    def remark(text: str) -> None:
        remarks.append(text)
        announce(text)

    if options.keep_repairs and path is not None:
        check_target(path, noun="plan", option="with --plan", replaces=describe_no_plan)
    guarding = ScriptGuard(
        options.on_fault,
        remark,
        plan,
        tuple(filter(None, (options.components or "").split(","))),
        None if wanted is None else wanted.torch_dtype,
    )
    with Patches() as patches, _as_main(options, patches):
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
        try:
            code = _execute(start, remark)
        finally:
            if path is not None and guarding.plan is not None and guarding.plan is not plan:
                keep_updated(guarding.plan, path, options.keep_repairs, remark)
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
    )


def _find_start(options: ScriptOptions) -> Callable[[], Any]:
    """What runs the script, after a look whether it is there."""
    import importlib.util
    import runpy

    if options.module is None:
        if not Path(options.target).is_file():
            raise InputError(
                f"There is no script {options.target}.",
                remedy="Name a Python file, or a module: stopdown run -m MODULE",
            )
        return lambda: runpy.run_path(options.target, run_name="__main__")
    try:
        found = importlib.util.find_spec(options.module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise InputError(
            f"There is no module {options.module}.",
            remedy="Name a module that `python -m` finds, or a file: stopdown run SCRIPT",
        )
    return lambda: runpy.run_module(options.target, run_name="__main__", alter_sys=True)


def _check_options(options: ScriptOptions) -> str | None:
    """The path of the plan, None without one; refused are options that a script cannot have."""
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
"""The precision with which a script loads its models itself, whatever the device is."""

_OWN = ("--on-fault", "--keep-repairs", "--plan", "--precision", "--strict", "--json", "--device")
"""Options of Stopdown that people write behind the script, which then gets them."""

_REFUSED = 2
"""What argparse and most others leave with when they do not know an option."""


def _hint_at_options(options: ScriptOptions, code: int, remark: Callable[[str], None]) -> None:
    """Say so when a script got an option that looks like ours and did not take it."""
    words = [word.partition("=")[0] for word in options.words]
    ours = [word for word in words if word in _OWN]
    if ours and (code == _REFUSED or "--on-fault" in ours or "--keep-repairs" in ours):
        remark(
            f"{', '.join(ours)} {'was' if len(ours) == 1 else 'were'} passed to the script, because "
            "options after the script's name are the script's. Put Stopdown's options before it: "
            f"stopdown run {ours[0]} … {options.target}"
        )


def _hint_at_components(
    options: ScriptOptions, guarding: ScriptGuard, remark: Callable[[str], None]
) -> None:
    """Say so when no component was guarded because none has a name that was asked for."""
    unwanted = sorted(guarding.modules.unwanted)
    is_guarded = guarding.modules.calls or any(run.calls for run in guarding.runs)
    if unwanted and not is_guarded:
        remark(
            f"No component named {options.components} was called, so nothing was guarded. The script "
            f"called {', '.join(unwanted[:_MOST_NAMED])}."
        )


_MOST_NAMED = 8


@contextlib.contextmanager
def _as_main(options: ScriptOptions, patches: Any) -> Iterator[None]:
    """With the arguments and the search path that Python would give the script."""
    patches.set_attribute(sys, "argv", [options.target, *options.words])
    first = "" if options.module is not None else str(Path(options.target).resolve().parent)
    patches.set_attribute(sys, "path", [first, *sys.path])
    main = sys.modules["__main__"]
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _execute(start: Callable[[], Any], remark: Callable[[str], None]) -> int:
    """Run it: its exit code; what it raises is printed as Python would."""
    try:
        start()
    except Stopped:  # a signal, and not the script
        raise
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        sys.stderr.write(f"{left.code}\n")
        return 1
    except NonFiniteError as error:
        remark(str(error))
        return 1
    except StopdownError:
        raise
    except Exception as error:
        trace = error.__traceback__  # the script's own frames: from its first line on
        while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        if "CUDA" in str(error) or "accelerator" in str(error):
            remark(
                "This machine has no such device. `stopdown run --device cpu SCRIPT` uses "
                "another one. Options of Stopdown go before the script."
            )
        return 1
    return 0


def choose_code(record: ScriptRecord, *, strict: bool = False) -> int:
    """The script's exit code; 1 when it ended well though a fault was not repaired.

    Args:
        strict: findings are a failure as well.
    """
    return record.exit_code or int(record.unrepaired or (strict and bool(record.findings)))


def _describe_run(run: GuardRecord) -> str:
    """What a run called, and what was repaired in it."""
    counts = []  # `UNet 3x fp16 (5.2 bits of headroom in what it returned)`
    for call in run.calls:
        counts.append(f"{call.component} {call.calls}x {'+'.join(call.precisions) or 'no weights'}")
        if call.headroom_bits is not None:
            counts[-1] += f" ({call.headroom_bits:.1f} bits of headroom in what it returned)"
    said = f"{', '.join(counts) or 'no component was guarded'}."
    for repair in run.repairs:
        said += f" {repair.module_path}: {repair.action}, {repair.replays} call run again."
    if run.reused and run.pipeline:
        said += f" From an earlier run: {', '.join(run.reused)}."
    if not run.pipeline:
        said += "".join(f" {text}" for text in run.unwatched)
    return said


def print_script(record: ScriptRecord, console: Console) -> None:
    """Print what its models did, what was repaired, and what was found."""
    from stopdown.app.progress import print_prose

    if not record.runs and record.modules is None and not record.remarks:
        print_prose(
            console,
            f"stopdown: {record.script} called no torch module: there was nothing to guard.",
        )
    for number, run in enumerate(record.runs, 1):
        print_prose(console, f"stopdown: run {number}, {run.pipeline}: {_describe_run(run)}")
    if record.modules is not None:
        print_prose(console, f"stopdown: without a pipeline: {_describe_run(record.modules)}")
    for finding in record.findings:
        text = f"stopdown: {finding.kind} in {finding.module_path}: {finding.evidence} {finding.remedy}"
        print_prose(console, text, "yellow")
