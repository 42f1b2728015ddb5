"""`StopdownConfig`: the `quantization_config` for `from_pretrained`, also stored in `config.json`."""

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
    """The name of the quantization method; both libraries read its `value` and compare it with strings."""

    STOPDOWN = QUANT_METHOD


class StopdownConfig(QuantizationConfigMixin):
    """Loads a model in fp16 by a plan, in `from_pretrained` of Diffusers and of Transformers.

        CogVideoXTransformer3DModel.from_pretrained(
            folder, subfolder="transformer", dtype=torch.float16,
            quantization_config=stopdown.StopdownConfig(),
        )

    Weights are scaled and cast one at a time as they are read. The model is watched as under
    `stopdown.load`: calls that its exponents don't hold for are repaired, with a warning.

    Args:
        plan: a `Plan` or the path of its file. None uses the plan in the model's folder or the cached one;
            if there is neither, it certifies one from the weights and caches it.
        guard: put a guard on the model, as `model.stopdown_guard`.
        component: name of the plan's component for this model; "" for the one with the model's class.
        folded: the stored weights are scaled already, as Diffusers' `save_pretrained` writes them.
        quant_method: `stopdown`, by which Diffusers and Transformers find this class in a stored config.

    Examples:
        >>> from diffusers import UNet2DConditionModel
        >>> from stopdown.testing import save_pipeline
        >>> folder = save_pipeline("sd", "model")  # a tiny Stable Diffusion
        >>> unet = UNet2DConditionModel.from_pretrained(
        ...     folder, subfolder="unet", dtype=torch.float16,
        ...     quantization_config=stopdown.StopdownConfig(),
        ... )
        >>> unet.dtype
        torch.float16
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
        """Return the settings that are stored in a `config.json`."""
        plan = {"plan": carry_plan(self.plan)} if self.plan is not None else {}
        flags = {name: True for name in ("guard", "folded") if getattr(self, name)}
        component = {"component": self.component} if self.component else {}
        return {"quant_method": QUANT_METHOD, **component, **flags, **plan}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return `to_dict`; Diffusers calls this method, and its own base class doesn't have it."""
        return self.to_dict()

    def find_entry(self, class_name: str, component: str = "") -> ComponentPlan:
        """Return the plan's entry for a model.

        Args:
            class_name: of the model.
            component: name of the model's folder; "" if unknown.

        Raises:
            PlanError: the plan has no entry for it, or several.
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
