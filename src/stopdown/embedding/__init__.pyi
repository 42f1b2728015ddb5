# Public names for programs that call models themselves, such as the ComfyUI nodes, beside those of
# `stopdown` and `stopdown.scaling`. This file is the one list of them.

from stopdown.app.doctor_command import print_health as print_health
from stopdown.app.explain_command import print_diagnosis as print_diagnosis
from stopdown.checkpoints.file_exponents import express_component as express_component
from stopdown.component_calls.components import find_callees as find_callees
from stopdown.component_calls.components import find_components as find_components
from stopdown.doctor import examine as examine
from stopdown.runtime.guard import Guard as Guard
from stopdown.runtime.guard import GuardOptions as GuardOptions
from stopdown.runtime.repair_cache import RepairCache as RepairCache
from stopdown.sources.headers import RESCALED_ENTRY as RESCALED_ENTRY

__all__: list[str]
