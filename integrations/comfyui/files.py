"""A model written to a file in fp16, with exponents that other programs need to know nothing of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def save_fp16(model: Any, session: Any, prefix: str) -> str:
    """Write a model with its exponents folded in, and say where.

    Args:
        model: the MODEL; patches of LoRA are written too.
        session: that the model was sampled in.
        prefix: of the file, below ComfyUI's output folder.

    Raises:
        ScalingError: powers of two in its weights alone do not keep it in fp16's range.

    Cost: a copy of the weights in fp32 in host memory, and two forwards there for each call.
    """
    import comfy.model_management
    import torch
    from safetensors.torch import save_file

    from stopdown.embedding import RESCALED_ENTRY
    from stopdown.errors import InputError
    from stopdown.scaling import fold_scaling

    calls = session.calls.get("diffusion_model")
    if not calls:
        raise InputError(
            "The model of this report wasn't sampled.",
            expected="Exponents are found for the calls of a run.",
            remedy="Connect the node to the report of the Run in fp16 node that the sampler's model "
            "comes from.",
        )
    with torch.inference_mode(False), torch.no_grad():
        comfy.model_management.load_models_gpu([model], force_patch_weights=True)
        module = copy_to_host(model.model.diffusion_model)
        for part in module.modules():
            vars(part).pop("comfy_cast_weights", None)
        scaling = _find_scaling(module, [_renew(call, module) for call in calls])
        fold_scaling(module, scaling)
        weights = {name: _narrow(name, x) for name, x in module.state_dict().items()}
    path = _find_path(prefix)
    entries = {RESCALED_ENTRY: "diffusion_model"} if scaling.exponents else {}
    save_file(weights, path, metadata={"format": "pt", **entries})
    return f"{path}: {len(weights)} tensors, {len(scaling.exponents)} of them scaled."


def copy_to_host(module: Any) -> Any:
    """A copy in fp32 in host memory, tensor by tensor: the device has no room for a second model."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)  # quantised weights are copied by their own code
    memo: dict[int, Any] = {}
    for tensor in (x for x in (*module.parameters(), *module.buffers()) if type(x) in plain):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        made = tensor.detach().to("cpu", copy=True).to(dtype)
        is_weight = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_weight else made
    return copy.deepcopy(module, memo).float().cpu()


def _renew(call: Any, module: Any) -> Any:
    """The same call of another copy, with fp32 arguments in host memory."""
    import dataclasses

    import torch
    from torch.utils import _pytree as pytree

    def widen(value: Any) -> Any:
        value = value.detach().cpu().clone()
        return value.float() if value.is_floating_point() else value

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (call.args, call.kwargs))
    callee = dataclasses.replace(call.callee, owner=module)
    return dataclasses.replace(call, callee=callee, args=args, kwargs=kwargs)


def _find_scaling(module: Any, calls: list[Any]) -> Any:
    """Exponents as files hold them."""
    from stopdown import rescale_
    from stopdown.embedding import express_component
    from stopdown.records import ComponentPlan

    given = [(module, call.args, call.kwargs) for call in calls]
    rescaling = rescale_(module, calls=given)
    rescaling.undo()
    entry = ComponentPlan(
        "diffusion_model", type(module).__name__, "", "fp16", scaling=rescaling.scaling
    )
    return express_component(module, entry, lambda: calls, has_config=False).scaling


def _narrow(name: str, tensor: Any) -> Any:
    """A tensor as it is written.

    Raises:
        ScalingError: fp16 does not hold it.
    """
    from stopdown.errors import ScalingError

    if not tensor.is_floating_point():
        return tensor.contiguous().clone()
    found = tensor.half().contiguous()
    if not bool(found.isfinite().all()):
        raise ScalingError(f"The weight {name} is beyond 65504, and no call of the run used it.")
    return found


def _find_path(prefix: str) -> Path:
    """A name that is not taken, in ComfyUI's output folder."""
    import folder_paths

    folder, name, counter, _, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_output_directory()
    )
    while (path := Path(folder) / f"{name}_{counter:05}.safetensors").exists():
        counter += 1
    return path
