"""Files read and run by ComfyUI's own loader and model code, in a process without Stopdown and Diffusers.

Started with one argument: JSON of `root`, a checkout of ComfyUI, and `runs`: each has `path` of the file,
`dtype`, `inputs` (a file of tensors), `plain` (other arguments), `output` (where to write), `prefix` of
its names, `method` of the model, and `target` with `options` where a class is built by itself. What it
writes holds the tensor `y`. With `program` set to `sgm`, `root` is a checkout of Stability-AI's
generative-models, every run has a target, and 16 bits are computed under autocast, as sgm's scripts do.

ComfyUI imports torchvision and torchaudio for models that are not read here; empty modules take their place
where they are not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for packages that are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "torchaudio"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def prepare(root: str) -> None:
    """Make ComfyUI importable, on the CPU."""
    import transformers

    transformers.PreTrainedModel, transformers.CLIPTokenizer  # noqa: B018 - before the empty modules
    sys.meta_path.append(_Finder())
    sys.argv = sys.argv[:1]
    sys.path.insert(0, root)
    from comfy.cli_args import args

    args.cpu = True


def load(run: dict[str, Any], dtype: Any) -> Any:
    """The model of a file: by ComfyUI's loader, or a class of its, built and filled."""
    import comfy.ops
    import comfy.sd
    import comfy.utils

    tensors, metadata = comfy.utils.load_torch_file(run["path"], return_metadata=True)
    if run["prefix"]:
        kept = {run["prefix"]: ""}
        tensors = comfy.utils.state_dict_prefix_replace(tensors, kept, filter_keys=True)
    if run["target"] == "image encoder":
        import comfy.clip_vision

        config = Path(run["path"]).with_suffix(".config.json")  # as ComfyUI of 2025 asks for one
        config.write_text(json.dumps(run["options"]), encoding="utf-8")
        encoder = comfy.clip_vision.ClipVisionModel(str(config))
        lacking, _ = encoder.load_sd(comfy.clip_vision.convert_to_transformers(tensors, ""))
        assert not lacking, lacking
        return encoder.model.to(dtype)
    if run["target"] == "vae":
        return comfy.sd.VAE(sd=tensors, dtype=dtype, metadata=metadata).first_stage_model.to(dtype)
    if not run["target"]:
        found = comfy.sd.load_diffusion_model_state_dict(tensors, model_options={"dtype": dtype})
        return found.model.diffusion_model.to(dtype)
    module, _, name = run["target"].partition(":")
    kind = getattr(importlib.import_module(module), name)
    options = {"dtype": dtype, "device": "cpu", "operations": comfy.ops.disable_weight_init}
    takes = "operations" in inspect.signature(kind).parameters
    model = kind(**run["options"], **(options if takes else {}))
    lacking, others = model.load_state_dict(rename(tensors, model), strict=False)
    # No reader of these has `norm_final`, or uses it.
    assert not [x for x in lacking if not x.startswith("norm_final")], lacking
    assert not others, others
    return model.to(dtype)


def prepare_sgm(root: str) -> None:
    """Make sgm importable without what its packages import of training."""
    for part in ("sgm", "sgm.modules", "sgm.models"):
        package = types.ModuleType(part)
        package.__path__ = [f"{root}/{part.replace('.', '/')}"]
        sys.modules[part] = package


def load_in_sgm(run: dict[str, Any], dtype: Any) -> Any:
    """A class of sgm, built and filled with all that its part of a file has."""
    import torch
    from safetensors.torch import load_file

    module, _, name = run["target"].partition(":")
    model = getattr(importlib.import_module(module), name)(**run["options"])
    tensors, prefix = load_file(run["path"]), run["prefix"]
    mine = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    model.load_state_dict(mine)
    model = model.to(dtype)
    for norm in model.modules():  # autocast computes these in fp32 on a GPU, and not on a CPU
        if isinstance(norm, torch.nn.GroupNorm):
            norm.float()
    return model


def run_checkpoint(run: dict[str, Any], inputs: dict[str, Any], dtype: Any) -> Any:
    """A whole checkpoint by ComfyUI's guessing loader: its encoder, a step of its UNet, its decoder."""
    import comfy.sd
    import torch

    model, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(
        run["path"], model_options={"dtype": dtype}, te_model_options={"dtype": dtype}
    )
    condition = clip.encode_from_tokens(clip.tokenize(run["plain"]["prompt"])).to(dtype)
    unet, decoder = model.model.diffusion_model.to(dtype), vae.first_stage_model.to(dtype)
    noise = unet(inputs["x"], inputs["timesteps"], condition)
    picture = decoder.decode(inputs["x"])
    return torch.cat([x.float().flatten() for x in (condition, noise, picture)])


def rename(tensors: dict[str, Any], model: Any) -> dict[str, Any]:
    """As ComfyUI's loader: newer versions call the `scale` of a norm its `weight`."""
    known = model.state_dict().keys()
    return {
        name if name in known else name.replace(".scale", ".weight"): x
        for name, x in tensors.items()
    }


def main(request: dict[str, Any]) -> None:
    """Run every file on its inputs; those that this version cannot read are named on stdout at the end."""
    is_sgm = request.get("program") == "sgm"
    (prepare_sgm if is_sgm else prepare)(request["root"])
    import torch

    torch.set_num_threads(1)
    unread = {}
    for run in request["runs"]:
        try:
            read_one(run, load_in_sgm if is_sgm else load)
        except Exception as error:  # a version of ComfyUI that does not know the model or its size
            if not request.get("may_fail"):
                raise
            unread[run["path"]] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    sys.stdout.write(f"\n{json.dumps(unread)}\n")


def read_one(run: dict[str, Any], load: Callable[[dict[str, Any], Any], Any]) -> None:
    """Read a file, run it, and write what it gives."""
    import torch
    from safetensors.torch import load_file, save_file

    dtype = getattr(torch, run["dtype"])
    inputs = {
        name: x if "timestep" in name else x.to(dtype)
        for name, x in load_file(run["inputs"]).items()
    }
    with torch.no_grad():
        if run["target"] == "checkpoint":
            y = run_checkpoint(run, inputs, dtype)
        else:
            model = load(run, dtype).eval()
            with torch.autocast("cpu", dtype, enabled=load is load_in_sgm and dtype.itemsize == 2):
                positional = inputs.values() if run["method"] != "forward" else ()
                y = getattr(model, run["method"])(
                    *positional, **({} if positional else inputs), **run["plain"]
                )
    y = y[run.get("output_number", 0)] if isinstance(y, (list, tuple)) else y
    save_file({"y": y.float().contiguous()}, run["output"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
