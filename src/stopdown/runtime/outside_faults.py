"""Where values came from that are not finite and that no watched component made.

They reach a component as an argument, or leave the pipeline with its result. They were given to the
pipeline, or made by its scheduler, or by its own arithmetic (guidance, scaling of latents).

**Catches** arguments of the pipeline's call; the scheduler's last step; what went into that step.
**Does not catch** which line of the pipeline's code it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stopdown.component_calls.step_counter import StepCounter
from stopdown.numerics import iterate_tensors
from stopdown.records import Repair
from stopdown.runtime.fault_texts import describe_counts


@dataclass(frozen=True)
class Origin:
    """Where a fault began outside of the components.

    Attributes:
        source: `scheduler`, `pipeline`, or the component that was reported before.
    """

    source: str
    what: str
    remedy: str


def find_origin(
    steps: StepCounter,
    repairs: Iterable[Repair],
    given: Mapping[str, Any],
    unwatched: Iterable[str],
) -> Origin:
    """Where values came from that are not finite.

    Args:
        unwatched: components that could not be examined, each as a sentence.

    Cost: two host reads for each tensor that is looked at.
    """
    for repair in repairs:
        if repair.action == "none":
            source = repair.module_path if repair.kind == "input" else repair.component
            return Origin(
                source, f"It came from {_PLACES.get(source, f'`{source}`')}, as reported.", ""
            )
    for name, value in given.items():
        if spoilt := describe_counts(iterate_tensors(value)):
            what = f"The pipeline was called with {spoilt} in `{name}`."
            return Origin("pipeline", what, f"Give finite values for {name}.")
    made = describe_counts(itertools.islice(iterate_tensors(steps.last_result), 1))
    taken = describe_counts(steps.last_inputs)
    if made and taken:
        what = f"The pipeline's own arithmetic gave its scheduler {taken}{steps.name_last_step()}."
        return Origin("pipeline", f"{what} {_say_finite(unwatched)}", _WIDER)
    if made:
        name = type(steps.pipe.scheduler).__name__
        remedy = (
            "Use another scheduler, or make this one anew: pipe.scheduler = "
            f"{name}.from_config(pipe.scheduler.config)."
        )
        what = f"The scheduler ({name}) gave {made}{steps.name_last_step()}, of finite ones."
        return Origin("scheduler", what, remedy)
    what = f"It came from the pipeline's own code. {_say_finite(unwatched)}"
    return Origin("pipeline", what, _WIDER)


_PLACES = {"scheduler": "the scheduler", "pipeline": "outside of the components"}

_WIDER = "Use a lower guidance scale, or load the pipeline in bf16 or fp32."


def _say_finite(unwatched: Iterable[str]) -> str:
    said = " ".join(unwatched)
    if not said:
        return "Every component gave finite values."
    return f"Every component that was watched gave finite values. {said}"
