"""Repairs in words, for people and for records."""

from __future__ import annotations

from stopdown.records import Repair
from stopdown.runtime.repair_order import Remedy


def describe_repair(repair: Repair) -> str:
    """A repair in whole sentences, for people."""
    done = {
        "rescaled": f"`{repair.component}` was rescaled",
        "fp32-module": "One module was put in fp32",
        "bf16": f"`{repair.component}` was cast to bf16",
        "fp32": f"`{repair.component}` was cast to fp32",
        "cast-inputs": "Inputs are cast to the dtype of the weights",
        "replayed": "The call was run again",
        "none": "It was not repaired",
    }[repair.action]
    again = "" if repair.action == "none" else " The call was run again, and the run continues."
    return f"{repair.evidence} {done}: {repair.reason}{again}"


def name_action(remedy: Remedy) -> str:
    """What a record calls a remedy that was put on."""
    names = {"replay": "replayed", "rescale": "rescaled", "fp32-module": "fp32-module"}
    return names.get(remedy.action, remedy.precision)
