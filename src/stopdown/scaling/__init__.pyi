# The public names of the core: what scales a torch module, and proves it. This file is the one list of
# them, for type checkers and for `__init__.py`, which reads it. Everything else in here is a detail.

from stopdown.interception.patches import Patches as Patches
from stopdown.mapped_weights import StoredWeight as StoredWeight
from stopdown.module_calls.call import ComponentCall as ComponentCall
from stopdown.module_calls.call_interception import Rank as Rank
from stopdown.module_calls.call_interception import intercept as intercept
from stopdown.module_calls.call_interception import put_cast as put_cast
from stopdown.module_calls.callee import Callee as Callee
from stopdown.numerics import count_non_finite as count_non_finite
from stopdown.numerics import relative_l2 as relative_l2
from stopdown.scaling.folding.folds import Rescaling as Rescaling
from stopdown.scaling.folding.folds import cast_ as cast_
from stopdown.scaling.folding.folds import fold_scaling as fold_scaling
from stopdown.scaling.folding.folds import has_more_than_folds as has_more_than_folds
from stopdown.scaling.folding.folds import list_misfits as list_misfits
from stopdown.scaling.folding.folds import load_scaled as load_scaled
from stopdown.scaling.folding.folds import read_headroom as read_headroom
from stopdown.scaling.graph.capture import Capture as Capture
from stopdown.scaling.graph.capture import capture_call as capture_call
from stopdown.scaling.rescale import rescale_ as rescale_
from stopdown.scaling.trials.call_search import scale_calls as scale_calls
from stopdown.scaling.trials.folds_alone import FoldsAlone as FoldsAlone
from stopdown.scaling.trials.observed_calls import ObservedCalls as ObservedCalls
from stopdown.scaling.trials.traced_calls import TracedCalls as TracedCalls
from stopdown.scaling.watch.call_watch import CallWatch as CallWatch
from stopdown.scaling.watch.call_watch import Refusal as Refusal
from stopdown.scaling.watch.call_watch import WatchOptions as WatchOptions
from stopdown.scaling_records import Operands as Operands
from stopdown.scaling_records import ResidualStream as ResidualStream
from stopdown.scaling_records import Scaling as Scaling
from stopdown.scaling_records import Trial as Trial

__all__: list[str]
