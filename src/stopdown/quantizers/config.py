"""`StopdownConfig`: what `from_pretrained` is given, and what a `config.json` carries."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from stopdown.argument_types import check_type
from stopdown.component_call_names import QUANT_METHOD
from stopdown.errors import PlanError
from stopdown.plans.plan_files import carry_plan, read_carried_plan, take_plan
from stopdown.records import ComponentPlan, Plan


class StopdownMethod(enum.StrEnum):
    """The name of the method. Both libraries ask for its `value`, and compare it with texts."""

    STOPDOWN = QUANT_METHOD


class StopdownConfig(QuantizationConfigMixin):
    """Loads a model in fp16 by a plan, in `from_pretrained` of Diffusers and of Transformers.

        CogVideoXTransformer3DModel.from_pretrained(
            folder, subfolder="transformer", dtype=torch.float16,
            quantization_config=stopdown.StopdownConfig(),
        )

    Weights are folded and cast one after the other as they are read. The model is watched as under
    `stopdown.load`: calls that its exponents do not hold for are repaired, with a warning.

    Args:
        plan: a `Plan` or the path of its file. None takes the plan that lies beside the model or was kept
            for it, and certifies one from the weights otherwise; it is kept.
        guard: put a guard on the model: `model.stopdown_guard`.
        component: which component of the plan; "" for the one that fits the model.
        folded: the stored weights have their exponents already, as `save_pretrained` of Diffusers writes
            them.
    """

    def __init__(
        self,
        plan: Plan | str | Path | Mapping[str, Any] | None = None,
        *,
        guard: bool = False,
        component: str = "",
        folded: bool = False,
        quant_method: str = QUANT_METHOD,
    ) -> None:
        check_type(
            "StopdownConfig(guard=...)", guard, bool, "It is True or False.", "Use guard=True."
        )
        self.quant_method = StopdownMethod(quant_method)
        self.is_carried = isinstance(plan, Mapping)
        self.guard, self.component, self.folded = guard, component, folded
        self.plan: Plan | None = None
        if isinstance(plan, Mapping):
            self.plan = read_carried_plan(plan)
        elif plan is not None:
            self.plan = take_plan(plan)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that a `config.json` carries."""
        plan = {"plan": carry_plan(self.plan)} if self.plan is not None else {}
        flags = {name: True for name in ("guard", "folded") if getattr(self, name)}
        component = {"component": self.component} if self.component else {}
        return {"quant_method": QUANT_METHOD, **component, **flags, **plan}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return `to_dict`: Diffusers asks for it, and its own base class does not have it."""
        return self.to_dict()

    def find_entry(self, class_name: str, component: str = "") -> ComponentPlan:
        """Return the entry that this config's plan has for a model.

        Args:
            class_name: of the model.
            component: that the model is by its folder's name; "" if that is not known.

        Raises:
            PlanError: the plan has none for it, or several.
        """
        assert self.plan is not None
        fitting = [x for x in self.plan.components if x.class_name == class_name]
        wanted = self.component or component
        named = [x for x in fitting if x.component == wanted]
        found = named if len(fitting) > 1 or self.component else fitting
        if len(found) == 1:
            return found[0]
        held = ", ".join(f"{x.component} ({x.class_name})" for x in self.plan.components)
        count = "no entry" if wanted or not fitting else "several entries"
        raise PlanError(
            f"The plan for {self.plan.source} has {count} "
            f"for a {class_name}{f' called {wanted}' if wanted else ''}.",
            expected=f"It has {held}.",
            remedy="Name the component, StopdownConfig(plan, component=...), or give the plan of this "
            "model.",
        )
