# The public names: this file is the one list of them, for type checkers and for `__init__.py`,
# which reads it. Records are in `stopdown.records`, errors in `stopdown.errors`.

from stopdown import errors as errors
from stopdown import records as records
from stopdown.checkpoints.convert import convert as convert
from stopdown.comparison.matrix import compare as compare
from stopdown.diagnosis.explained import explain as explain
from stopdown.dtype_rules.check import check as check
from stopdown.dtype_rules.mend import mend as mend
from stopdown.errors import StopdownError as StopdownError
from stopdown.errors import StopdownWarning as StopdownWarning
from stopdown.pipelines.requests import Request as Request
from stopdown.plans.applier import apply_plan as apply_plan
from stopdown.plans.plan_files import read_plan as read_plan
from stopdown.plans.plan_files import write_plan as write_plan
from stopdown.quantizers.config import StopdownConfig as StopdownConfig
from stopdown.quantizers.script_loading import quantization as quantization
from stopdown.runtime.guard import guard as guard
from stopdown.runtime.load import load as load
from stopdown.runtime.plan_maker import fp16 as fp16
from stopdown.runtime.plan_maker import make_plan as make_plan
from stopdown.scaling.folding.folds import cast_ as cast_
from stopdown.scaling.rescale import rescale_ as rescale_
from stopdown.sources.sources import resolve_source as resolve_source

__version__: str
__all__: list[str]
