"""Where values came from that are not finite and that no watched component made.

They reach a component as an argument, or leave the pipeline with its result. They were given to the
pipeline, or made by its scheduler, or by its own arithmetic (guidance, scaling of latents).

**Catches** arguments of the pipeline's call; the scheduler's last step; what went into that step.
**Does not catch** which line of the pipeline's code it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stopdown.numerics import count_non_finite, iterate_tensors
from stopdown.pipelines.step_counter import StepCounter
from stopdown.records import Repair
from stopdown.runtime.fault_texts import name_counts


@dataclass(frozen=True)
class Origin:
    """Where a fault began outside of the components.

    Attributes:
        source: `scheduler`, `pipeline`, or the component that was reported before.
        what: one sentence or two.
        remedy: what to type.
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
        steps: of this run.
        repairs: of this run, in order.
        given: arguments of the pipeline's call, by name.
        unwatched: components that nobody could look at, each as a sentence.

    Cost: two host reads for each tensor that is looked at.
    """
    for repair in repairs:
        if repair.action == "none":
            source = repair.module_path if repair.kind == "input" else repair.component
            return Origin(
                source, f"It came from {_PLACES.get(source, f'`{source}`')}, as reported.", ""
            )
    for name, value in given.items():
        if spoilt := _describe(iterate_tensors(value)):
            what = f"The pipeline was called with {spoilt} in `{name}`."
            return Origin("pipeline", what, f"Give finite values for {name}.")
    made, taken = _describe(_take_first(steps.last_result)), _describe(steps.last_inputs)
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


def _take_first(step: Any) -> list[torch.Tensor]:
    """The sample; what else a scheduler returns may be Inf without harm."""
    return list(iterate_tensors(step))[:1]


def _describe(tensors: Iterable[torch.Tensor]) -> str:
    """`12 NaN in 256 values`; "" when all are finite."""
    floats = [x for x in tensors if x.is_floating_point() and x.numel()]
    counts = [count_non_finite(x) for x in floats]
    nan, infinite = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    total = sum(x.numel() for x in floats)
    return f"{name_counts(nan, infinite)} in {total} values" if nan + infinite else ""
