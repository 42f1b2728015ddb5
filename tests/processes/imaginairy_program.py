"""imaginAIry's video command with tiny checkpoints, made by its own classes.

    python tests/processes/imaginairy_program.py make CHECKOUT FOLDER
    python tests/processes/imaginairy_program.py autocast ARGUMENTS OF AIMG...

The first copies its package into FOLDER with a smaller `configs/svd.yaml`, and fills the folder that it
keeps downloads in. The second runs its command as CUDA would: all of it under autocast to fp16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

OVERFLOW = "model.diffusion_model.input_blocks.1.0.out_layers.3.weight"
"""What is larger by a power of two in the checkpoint that does not fit in fp16."""

SHIM = """
import huggingface_hub

class HfFolder:  # which left huggingface_hub with 1.0
    get_token = staticmethod(lambda: None)

huggingface_hub.HfFolder = HfFolder
"""

_CLIP: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 224, "layers": 1, "width": 32, "head_width": 16, "patch_size": 56},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
}
_UNET = {
    "model_channels": 32, "attention_resolutions": [2, 1], "num_res_blocks": 1,
    "channel_mult": [1, 2], "num_head_channels": 16, "context_dim": 32,
}  # fmt: skip
_VAE = {"resolution": 64, "ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1}


def make(checkout: Path, folder: Path) -> None:
    """The program, its configuration and its downloads: `cache`, and `faulty` with an overflow."""
    shutil.copytree(checkout / "imaginairy", folder / "imaginairy")
    (folder / "sitecustomize.py").write_text(SHIM)
    exec(SHIM)  # as Python will at its start
    sys.path.insert(0, str(folder))
    import open_clip
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    clip = folder / "clip"
    clip.mkdir()
    (clip / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": _CLIP, "preprocess_cfg": {}})
    )
    save_file(open_clip.CLIP(**_CLIP).state_dict(), clip / "open_clip_model.safetensors")
    path = folder / "imaginairy" / "configs" / "svd.yaml"
    config = OmegaConf.load(path)
    params = config.model.params
    params.network_config.params.update(_UNET)
    embedders = params.conditioner_config.params.emb_models
    embedders[0].params.open_clip_embedding_config.params.update(
        {"arch": f"local-dir:{clip}", "version": None}
    )
    embedders[3].params.encoder_config.params.ddconfig.update(_VAE)
    for name in ("encoder_config", "decoder_config"):
        params.first_stage_config.params[name].params.update(_VAE)
    OmegaConf.save(config, path)

    from imaginairy.enhancers.video_interpolation.rife.RIFE_HDv3 import Model
    from imaginairy.utils import instantiate_from_config

    from models.rescaling_models import randomise

    params.sampler_config.params.num_steps = 2
    params.sampler_config.params.guider_config.params.num_frames = 2
    torch.manual_seed(0)
    engine = instantiate_from_config(config.model)
    for part in (engine.model, engine.first_stage_model):
        randomise(part)
    weights = {name: x.half().contiguous().clone() for name, x in engine.state_dict().items()}
    for name in ("cache", "faulty"):
        downloads = folder / name / "imaginairy"
        downloads.mkdir(parents=True)
        save_file(weights, downloads / "svd.fp16.safetensors")
        flow = Model().flownet.state_dict()
        save_file(flow, downloads / "rife-flownet-4.13.2.safetensors")
        weights[OVERFLOW] = (weights[OVERFLOW].float() * 2.0**16).half()


def autocast(words: list[str]) -> None:
    """`aimg` with these arguments."""
    from imaginairy.cli.main import aimg
    from imaginairy.utils import fix_torch_group_norm

    sys.argv = ["aimg", *words]
    with fix_torch_group_norm(), torch.autocast("cpu", dtype=torch.float16):
        aimg()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        autocast(sys.argv[2:])
