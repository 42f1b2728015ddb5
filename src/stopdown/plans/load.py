"""`load`: a source as a Diffusers pipeline in the right precisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopdown.environment import choose_device
from stopdown.errors import OptionError
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.sources import (
    OPTIONAL_COMPONENTS,
    has_weights,
    resolve_source,
    verify_source,
)
from stopdown.plans.plan_choice import choose_loader
from stopdown.plans.precision import write_request

if TYPE_CHECKING:
    import torch


def load(
    source: str | Path,
    *,
    precision: str | Path | torch.dtype | Mapping[str, Any] = "auto",
    device: str | torch.device = "auto",
    config: str | Path | None = None,
    revision: str | None = None,
    variant: str | None = None,
    **parts: Any,
) -> Any:
    """A Diffusers pipeline, each component in a precision that fits the device and the checkpoint.

    The pipeline is an ordinary one, and nothing watches it: put `stopdown.guard(pipe)` on it to have
    faults found and repaired. `pipe.stopdown_decisions` holds the decisions with their reasons.

    Args:
        source: Hub id, Diffusers folder, single safetensors file or bundled model.
        precision: `"auto"`, a precision (`"fp16"`, `torch.float16`), one for each component
            (`"transformer=bf16,vae=fp32"`, `{"transformer": torch.bfloat16}`), or the path of a
            plan: `"plan.json"`.
        device: `"auto"`, `"cuda"`, `"cuda:1"`, `"mps"`, `"cpu"`, or a `torch.device`.
        config: for a single file, a Diffusers folder or Hub id with its configs.
        revision: branch, tag or commit of a Hub id.
        variant: of the weights, where there are several: `"fp16"`.
        **parts: what stands in the pipeline instead of its own scheduler, tokenizer or safety
            checker, as in Diffusers: `scheduler=...`, `safety_checker=None`.

    Raises:
        SourceError: the model is missing, damaged or refused.
        OptionError: the precision, the device or a part is unknown or does not work here.
        PlanError: the plan is damaged or belongs to another checkpoint.
    """
    asked = write_request(precision)
    target = choose_device(str(device))
    found = resolve_source(source, revision=revision, config=config, variant=variant)
    verify_source(found)
    with quiet_libraries():
        found = complete_source(found)
        _check_parts(parts, found.components)
        loaded = choose_loader(found, asked, target)()
        loaded.pipe.register_modules(**parts)
    loaded.pipe.stopdown_decisions = loaded.decisions
    return loaded.pipe


def _check_parts(parts: Mapping[str, Any], components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse parts that the pipeline has no place for, and those whose precision nobody decided."""
    words = {"dtype": "precision", "torch_dtype": "precision", "device_map": "device"}
    for name, part in parts.items():
        if name not in (*components, *OPTIONAL_COMPONENTS):
            raise OptionError(
                f"load() takes no {name!r}.",
                expected=f"The parts of this pipeline are {', '.join(components)}.",
                remedy=f"Write {words[name]}=... instead."
                if name in words
                else "Leave it out, or set it on the pipeline that load() returns.",
            )
        if part is not None and has_weights(components.get(name, ("", name))[1]):
            raise OptionError(
                f"load() takes no other {name}: it has weights, and its precision would be decided by "
                "those that it stands in for.",
                expected="Parts without weights, and None for a part that is left out.",
                remedy=f"Set it afterwards, in the dtype that it is to run in: pipe.{name} = ...",
            )
