"""CogVideo's `sat/sample_video.py` with tiny checkpoints, made by its own classes.

    python tests/processes/sat_program.py FOLDER

writes what `sample_video.py --base FOLDER/model.yaml FOLDER/inference.yaml` reads: a T5, the
transformer's checkpoint, the autoencoder's, and a prompt. It is run where `sat` and the folder of the
script can be imported, as the program itself is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from models.rescaling_models import randomise
from stopdown.pipelines.tiny_pipelines import build_part, make_t5_tokenizer

TEXT = 8
"""Length of the prompt that the transformer was made for."""

_MLP = "model.diffusion_model.transformer.layers.1.mlp"
"""Where values are planted that fp16 does not hold."""

_DISCRETE = {
    "target": "sgm.modules.diffusionmodules.discretizer.ZeroSNRDDPMDiscretization",
    "params": {"shift_scale": 3.0},
}
_VAE = {
    "double_z": True, "z_channels": 4, "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 1, 1], "attn_resolutions": [], "num_res_blocks": 1, "dropout": 0.0,
}  # fmt: skip


def describe_model(folder: Path, width: int) -> dict[str, Any]:
    """`configs/cogvideox1.5_5b.yaml` in small.

    Args:
        width: of what the text encoder gives.
    """
    where, modules = "vae_modules.cp_enc_dec.ContextParallel", "sgm.modules.diffusionmodules"
    return {
        "scale_factor": 1.15258426,
        "disable_first_stage_autocast": True,
        "log_keys": ["txt"],
        "denoiser_config": {
            "target": f"{modules}.denoiser.DiscreteDenoiser",
            "params": {
                "num_idx": 1000,
                "quantize_c_noise": False,
                "weighting_config": {"target": f"{modules}.denoiser_weighting.EpsWeighting"},
                "scaling_config": {"target": f"{modules}.denoiser_scaling.VideoScaling"},
                "discretization_config": _DISCRETE,
            },
        },
        "network_config": {
            "target": "dit_video_concat.DiffusionTransformer",
            "params": {
                "time_embed_dim": 16, "elementwise_affine": True, "num_frames": 9,
                "time_compressed_rate": 4, "latent_width": 8, "latent_height": 8, "num_layers": 2,
                "patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "hidden_size": 64,
                "adm_in_channels": 16, "num_attention_heads": 2,
                "transformer_args": {
                    "checkpoint_activations": False, "vocab_size": 1, "max_sequence_length": 64,
                    "layernorm_order": "pre", "skip_init": False, "model_parallel_size": 1,
                    "is_decoder": False,
                },
                "modules": {
                    "pos_embed_config": {
                        "target": "dit_video_concat.Rotary3DPositionEmbeddingMixin",
                        "params": {"hidden_size_head": 32, "text_length": TEXT},
                    },
                    "patch_embed_config": {
                        "target": "dit_video_concat.ImagePatchEmbeddingMixin",
                        "params": {"text_hidden_size": width},
                    },
                    "adaln_layer_config": {
                        "target": "dit_video_concat.AdaLNMixin", "params": {"qk_ln": True},
                    },
                    "final_layer_config": {"target": "dit_video_concat.FinalLayerMixin"},
                },
            },
        },
        "conditioner_config": {
            "target": "sgm.modules.GeneralConditioner",
            "params": {"emb_models": [{
                "is_trainable": False, "input_key": "txt", "ucg_rate": 0.1,
                "target": "sgm.modules.encoders.modules.FrozenT5Embedder",
                "params": {"model_dir": str(folder / "t5"), "max_length": TEXT},
            }]},
        },
        "first_stage_config": {
            "target": "vae_modules.autoencoder.VideoAutoencoderInferenceWrapper",
            "params": {
                "cp_size": 1, "ckpt_path": str(folder / "vae.pt"), "ignore_keys": ["loss"],
                "loss_config": {"target": "torch.nn.Identity"},
                "regularizer_config": {
                    "target": "vae_modules.regularizers.DiagonalGaussianRegularizer",
                },
                "encoder_config": {"target": f"{where}Encoder3D",
                                   "params": _VAE | {"gather_norm": True}},
                "decoder_config": {"target": f"{where}Decoder3D",
                                   "params": _VAE | {"gather_norm": False}},
            },
        },
        "loss_fn_config": {
            "target": f"{modules}.loss.VideoDiffusionLoss",
            "params": {"offset_noise_level": 0, "sigma_sampler_config": {
                "target": f"{modules}.sigma_sampling.DiscreteSampling",
                "params": {"uniform_sampling": True, "num_idx": 1000,
                           "discretization_config": _DISCRETE},
            }},
        },
        "sampler_config": {
            "target": f"{modules}.sampling.VPSDEDPMPP2MSampler",
            "params": {
                "num_steps": 3, "verbose": True, "discretization_config": _DISCRETE,
                "guider_config": {"target": f"{modules}.guiders.DynamicCFG",
                                  "params": {"scale": 6, "exp": 5, "num_steps": 3}},
            },
        },
    }  # fmt: skip


def describe_run(folder: Path) -> dict[str, Any]:
    """`configs/inference.yaml` in small, in fp16 and without a GPU."""
    return {
        "latent_channels": 4, "mode": "inference", "load": str(folder / "transformer"),
        "batch_size": 1, "input_type": "txt", "input_file": str(folder / "prompts.txt"),
        "sampling_image_size": [32, 32], "sampling_num_frames": 3, "sampling_fps": 8,
        "fp16": True, "output_dir": "outputs", "force_inference": True,
        "distributed_backend": "gloo", "only_save_latents": False,
    }  # fmt: skip


def write(folder: Path) -> None:
    """Everything that the program reads."""
    import yaml

    torch.manual_seed(0)
    encoder = build_part("t5")
    encoder.save_pretrained(folder / "t5")
    make_t5_tokenizer().save_pretrained(folder / "t5")
    (folder / "prompts.txt").write_text("a girl riding a bike\n")
    model = describe_model(folder, encoder.config.d_model)
    first = model["first_stage_config"]["params"]
    for name, table in (
        (
            "vae-none.yaml",
            {
                "model": {
                    **model,
                    "first_stage_config": {
                        **model["first_stage_config"],
                        "params": {**first, "ckpt_path": None},
                    },
                }
            },
        ),
        ("model.yaml", {"model": model}),
        ("inference.yaml", {"args": describe_run(folder)}),
        ("overflow.yaml", {"args": {"load": str(folder / "overflow")}}),
        ("fp32.yaml", {"args": {"fp16": False}}),
    ):
        (folder / name).write_text(yaml.safe_dump(table))
    from arguments import get_args
    from diffusion_video import SATVideoDiffusionEngine
    from sat.model.base_model import get_model

    args = get_args(["--base", str(folder / "vae-none.yaml"), str(folder / "inference.yaml")])
    engine = get_model(args, SATVideoDiffusionEngine)
    for part in (engine.model, engine.first_stage_model):
        randomise(part)
    torch.save({"state_dict": engine.first_stage_model.state_dict()}, folder / "vae.pt")
    weights = {k: v for k, v in engine.state_dict().items() if k.startswith("model.")}
    _save(weights, folder / "transformer")
    weights[f"{_MLP}.dense_h_to_4h.weight"] *= 2.0**16
    weights[f"{_MLP}.dense_4h_to_h.weight"] *= 2.0**-10
    _save(weights, folder / "overflow")


def _save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "latest").write_text("1")
    torch.save({"module": weights}, folder / "1" / "mp_rank_00_model_states.pt")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
