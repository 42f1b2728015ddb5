"""Half precision, whole picture: image and video diffusion models in half precision.

    import stopdown

    pipe = stopdown.load("shapes", precision="auto")  # or a Hub id, a folder, a .safetensors file
    with stopdown.guard(pipe) as guard:  # NaN and Inf are named, repaired and run again
        frames = pipe("a red circle moving left on a grey background").frames[0]
    print(guard.record)

    stopdown.check(pipe, device="v100")  # dtype faults, before they happen
    plan = stopdown.make_plan("shapes")  # fp16 without overflow: exact powers of two
    stopdown.compare("shapes", prompts=["a red circle moving left"])  # what a precision costs

The command line does the same: `stopdown --help`. Public names are loaded when they are first used, so
`import stopdown` loads neither torch nor Diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "CallSummary": "records",
    "CaptureError": "errors",
    "CheckRecord": "records",
    "Comparison": "comparison.records",
    "ComponentPlan": "records",
    "Conversion": "records",
    "ConvertedComponent": "records",
    "Decision": "records",
    "Diagnosis": "records",
    "Finding": "records",
    "GuardRecord": "records",
    "InputError": "errors",
    "NonFiniteError": "errors",
    "OptionError": "errors",
    "OutputError": "errors",
    "Plan": "records",
    "PlanError": "errors",
    "RankError": "errors",
    "Price": "records",
    "Repair": "records",
    "Request": "pipelines.requests",
    "Rescaling": "scaling.folds",
    "RunRecord": "records",
    "ScalingError": "errors",
    "Source": "pipelines.sources",
    "SourceError": "errors",
    "StopdownError": "errors",
    "StopdownWarning": "errors",
    "Thresholds": "comparison.thresholds",
    "TrialError": "errors",
    "apply_plan": "plans.applier",
    "cast_": "scaling.folds",
    "check": "dtype_rules.check",
    "compare": "comparison.matrix",
    "convert": "checkpoints.convert",
    "explain": "diagnosis",
    "guard": "runtime.guard",
    "load": "plans.load",
    "make_plan": "plans.calibrated",
    "mend": "dtype_rules.mend",
    "read_plan": "plans.plan_files",
    "rescale_": "scaling.rescale",
    "resolve_source": "pipelines.sources",
    "write_plan": "plans.plan_files",
}

__all__ = [
    "CallSummary",
    "CaptureError",
    "CheckRecord",
    "Comparison",
    "ComponentPlan",
    "Conversion",
    "ConvertedComponent",
    "Decision",
    "Diagnosis",
    "Finding",
    "GuardRecord",
    "InputError",
    "NonFiniteError",
    "OptionError",
    "OutputError",
    "Plan",
    "PlanError",
    "Price",
    "RankError",
    "Repair",
    "Request",
    "Rescaling",
    "RunRecord",
    "ScalingError",
    "Source",
    "SourceError",
    "StopdownError",
    "StopdownWarning",
    "Thresholds",
    "TrialError",
    "apply_plan",
    "cast_",
    "check",
    "compare",
    "convert",
    "explain",
    "guard",
    "load",
    "make_plan",
    "mend",
    "read_plan",
    "rescale_",
    "resolve_source",
    "write_plan",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from stopdown.checkpoints.convert import convert
    from stopdown.comparison.matrix import compare
    from stopdown.comparison.records import Comparison
    from stopdown.comparison.thresholds import Thresholds
    from stopdown.diagnosis import explain
    from stopdown.dtype_rules.check import check
    from stopdown.dtype_rules.mend import mend
    from stopdown.errors import (
        CaptureError,
        InputError,
        NonFiniteError,
        OptionError,
        OutputError,
        PlanError,
        RankError,
        ScalingError,
        SourceError,
        StopdownError,
        StopdownWarning,
        TrialError,
    )
    from stopdown.pipelines.requests import Request
    from stopdown.pipelines.sources import Source, resolve_source
    from stopdown.plans.applier import apply_plan
    from stopdown.plans.calibrated import make_plan
    from stopdown.plans.load import load
    from stopdown.plans.plan_files import read_plan, write_plan
    from stopdown.records import (
        CallSummary,
        CheckRecord,
        ComponentPlan,
        Conversion,
        ConvertedComponent,
        Decision,
        Diagnosis,
        Finding,
        GuardRecord,
        Plan,
        Price,
        Repair,
        RunRecord,
    )
    from stopdown.runtime.guard import guard
    from stopdown.scaling.folds import Rescaling, cast_
    from stopdown.scaling.rescale import rescale_


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
