# The public names of the core: what scales a torch module, and proves it. This file is the one list of
# them, for type checkers and for `__init__.py`, which reads it. Everything else in here is a detail.

from stopdown.bounds.propagation import bound_call as bound_call
from stopdown.component_calls.call import ComponentCall as ComponentCall
from stopdown.component_calls.call_interception import Rank as Rank
from stopdown.component_calls.call_interception import intercept as intercept
from stopdown.component_calls.call_interception import put_cast as put_cast
from stopdown.graph.capture import Capture as Capture
from stopdown.graph.capture import capture_call as capture_call
from stopdown.graph.operations import find_operation as find_operation
from stopdown.graph.range_measurement import Range as Range
from stopdown.graph.range_measurement import run_capture as run_capture
from stopdown.interception.patches import Patches as Patches
from stopdown.mapped_weights import StoredWeight as StoredWeight
from stopdown.numerics import count_non_finite as count_non_finite
from stopdown.numerics import headroom_bits as headroom_bits
from stopdown.numerics import measure_amax as measure_amax
from stopdown.numerics import relative_l2 as relative_l2
from stopdown.scaling.folds import Rescaling as Rescaling
from stopdown.scaling.folds import cast_ as cast_
from stopdown.scaling.folds import fold_scaling as fold_scaling
from stopdown.scaling.folds import has_more_than_folds as has_more_than_folds
from stopdown.scaling.folds import list_misfits as list_misfits
from stopdown.scaling.folds import load_scaled as load_scaled
from stopdown.scaling.folds import read_headroom as read_headroom
from stopdown.scaling.rescale import rescale_ as rescale_
from stopdown.scaling.trial import run_reference as run_reference
from stopdown.scaling.trial import try_scaling as try_scaling
from stopdown.scaling_records import Operands as Operands
from stopdown.scaling_records import ResidualStream as ResidualStream
from stopdown.scaling_records import Scaling as Scaling
from stopdown.scaling_records import Trial as Trial

__all__: list[str]
