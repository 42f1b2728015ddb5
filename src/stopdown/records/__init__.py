"""Records of decisions, runs and findings: plain data that outlives a process.

All records are frozen dataclasses with a schema number, and survive JSON unchanged. Nothing here reads a
tensor, so a report can be made without torch.
"""

from __future__ import annotations

from stopdown.records.checks import Alternative as Alternative
from stopdown.records.checks import CheckRecord as CheckRecord
from stopdown.records.checks import Clue as Clue
from stopdown.records.checks import DeviceHealth as DeviceHealth
from stopdown.records.checks import Diagnosis as Diagnosis
from stopdown.records.checks import FileCheck as FileCheck
from stopdown.records.checks import FilePart as FilePart
from stopdown.records.checks import Finding as Finding
from stopdown.records.checks import FormatHealth as FormatHealth
from stopdown.records.checks import KnownFit as KnownFit
from stopdown.records.checks import MachineHealth as MachineHealth
from stopdown.records.checks import Outlook as Outlook
from stopdown.records.checks import Switch as Switch
from stopdown.records.json_text import SCHEMA as SCHEMA
from stopdown.records.json_text import Record as Record
from stopdown.records.json_text import convert_record as convert_record
from stopdown.records.json_text import describe_no_run as describe_no_run
from stopdown.records.json_text import describe_other as describe_other
from stopdown.records.json_text import from_json as from_json
from stopdown.records.json_text import read_kind as read_kind
from stopdown.records.json_text import read_record as read_record
from stopdown.records.json_text import to_json as to_json
from stopdown.records.plans import PLAN_IN_CONFIG as PLAN_IN_CONFIG
from stopdown.records.plans import ComponentPlan as ComponentPlan
from stopdown.records.plans import Conversion as Conversion
from stopdown.records.plans import ConvertedComponent as ConvertedComponent
from stopdown.records.plans import MemoryForecast as MemoryForecast
from stopdown.records.plans import MemoryPlan as MemoryPlan
from stopdown.records.plans import MemoryRow as MemoryRow
from stopdown.records.plans import Plan as Plan
from stopdown.records.plans import Reduction as Reduction
from stopdown.records.plans import StepDown as StepDown
from stopdown.records.plans import group_components as group_components
from stopdown.records.runs import STAGES as STAGES
from stopdown.records.runs import BlockMaximum as BlockMaximum
from stopdown.records.runs import CallSummary as CallSummary
from stopdown.records.runs import GuardRecord as GuardRecord
from stopdown.records.runs import JournalUse as JournalUse
from stopdown.records.runs import Repair as Repair
from stopdown.records.runs import RunRecord as RunRecord
from stopdown.records.runs import ScriptRecord as ScriptRecord
from stopdown.scaling_records import Operands as Operands
from stopdown.scaling_records import ResidualStream as ResidualStream
from stopdown.scaling_records import Scaling as Scaling
from stopdown.scaling_records import Trial as Trial
