"""Faults that users make, planted into tiny pipelines of real classes, and where `check` must find them.

A live fault is planted into a pipeline in memory. Unless weights are its cause they are then moved to
`meta`: what is found is found without them. A stored fault is planted into a folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.pipeline_calls import CALLS
from stopdown.component_calls.components import cast_component_, find_components
from stopdown.dtype_rules.check import check
from stopdown.records import Finding
from stopdown.testing import make_pipeline, save_pipeline

Plant = Callable[[Any], Any]
"""Changes a pipeline in place; what it returns, if anything, takes its place."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: what is wrong, in a few words.
        group: the class of the fault.
        pipeline: of `stopdown.testing`, or `sana`.
        dtype: what the healthy pipeline is loaded in.
        device: what it is checked for.
        plant: puts the fault in.
        kind, module_path: what must be found.
        needs_weights: the fault is in the values of weights.
        arguments: of the pipeline's call, beside the usual ones.
        autocast: the check happens under this autocast.
        stored: the fault is in a folder: `plant` gets it.
        precision: what the folder is checked in.
    """

    name: str
    group: str
    pipeline: str
    dtype: torch.dtype
    device: str
    plant: Plant
    kind: str
    module_path: str
    needs_weights: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()
    autocast: torch.dtype | None = None
    stored: bool = False
    precision: str | None = None


def load_healthy(name: str, dtype: torch.dtype) -> Any:
    """A tiny pipeline as loading in a dtype makes it: fp32 modules are in fp32."""
    pipe = make_pipeline(name)
    for module in find_components(pipe).values():
        cast_component_(module, dtype)
    return pipe


def plant_fault(fault: Fault, folder: Path) -> Any:
    """What is to be checked: a pipeline without weights, one with them, or a folder."""
    if fault.stored:
        return plant_stored(fault, folder)
    pipe = load_healthy(fault.pipeline, fault.dtype)
    pipe = fault.plant(pipe) or pipe
    if not fault.needs_weights:
        for module in find_components(pipe).values():
            drop_weights(module)
    return pipe


def drop_weights(module: nn.Module) -> None:
    """Every parameter and buffer on `meta`: names, shapes and dtypes are left."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta:
                    table[name] = _on_meta(tensor)  # type: ignore[assignment]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


def plant_stored(fault: Fault, folder: Path) -> Path:
    """The folder of a fault that is stored."""
    if fault.pipeline == "sana":
        write_sana(folder)
    else:
        save_pipeline(fault.pipeline, folder, dtype=fault.dtype)
    fault.plant(folder)
    return folder


def check_fault(fault: Fault, planted: Any) -> list[Finding]:
    """All findings of a planted fault."""
    arguments = {**call_of(fault.pipeline), **dict(fault.arguments)}
    around: Any = contextlib.nullcontext()
    if fault.autocast is not None:
        around = torch.autocast("cpu", dtype=fault.autocast)
    with around:
        return check(planted, device=fault.device, precision=fault.precision, arguments=arguments)


def call_of(name: str) -> dict[str, Any]:
    """The smallest call of a pipeline, two steps."""
    if name == "sana":
        return {"height": 64, "width": 64, "num_inference_steps": 2, "clean_caption": False}
    return {**CALLS[name], "num_inference_steps": 2}


# ---------------------------------------------------------------------------------------------
# Ways to plant


def cast(path: str, dtype: torch.dtype) -> Plant:
    """Cast one module: `transformer:blocks.0`."""
    name, _, inner = path.partition(":")
    return lambda pipe: getattr(pipe, name).get_submodule(inner).to(dtype) and None


def cast_output(path: str, dtype: torch.dtype) -> Plant:
    """A hook that casts what a module returns, as somebody's patch does."""
    name, _, inner = path.partition(":")

    def plant(pipe: Any) -> None:
        module = getattr(pipe, name).get_submodule(inner)
        module.register_forward_hook(lambda _, args, output: output.to(dtype))

    return plant


def fill(path: str, value: float, *, everywhere: bool = False) -> Plant:
    """One value of a weight, or all of it, overwritten."""
    name, _, key = path.partition(":")

    def plant(pipe: Any) -> None:
        tensor = dict(getattr(pipe, name).named_parameters())[key]
        with torch.no_grad():
            tensor.fill_(value) if everywhere else tensor.view(-1)[0].fill_(value)

    return plant


def fill_stored(component: str, key: str, value: float) -> Plant:
    """One value of a weight in a safetensors file overwritten."""

    def plant(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        (path,) = (folder / component).glob("*.safetensors")
        tensors = load_file(path)
        tensors[key].view(-1)[0] = value
        save_file(tensors, path, metadata={"format": "pt"})

    return plant


def nothing(_: Any) -> None:
    """The fault is in what was asked for."""


class FusedRMSNorm(nn.RMSNorm):
    """As Apex has it: the weight's dtype is what it takes, and nothing is cast back."""


def fuse_norms(name: str) -> Plant:
    """T5's own norms, which cast back to 16 bits, replaced by fused ones, which do not."""

    def plant(pipe: Any) -> None:
        encoder = getattr(pipe, name)
        for path, module in list(encoder.named_modules()):
            if type(module).__name__.endswith("T5LayerNorm"):
                fused = FusedRMSNorm(module.weight.shape[0], dtype=module.weight.dtype)
                owner, _, leaf = path.rpartition(".")
                setattr(encoder.get_submodule(owner), leaf, fused)

    return plant


class SixteenBitRope(nn.Module):
    """Rotary embedding whose positions are cast before they are multiplied."""

    def __init__(self, inner: nn.Module, length: int) -> None:
        super().__init__()
        self.inner, self.length = inner, length

    def forward(self, *args: Any) -> Any:
        positions = torch.arange(self.length).to(args[0].dtype)
        frequencies = torch.outer(positions, torch.ones(4, dtype=args[0].dtype))
        self.inner.last = frequencies.cos().sum()  # type: ignore[assignment]
        return self.inner(*args)


def wrap_rope(path: str, length: int) -> Plant:
    """A rotary embedding replaced by one in 16 bits."""
    name, _, inner = path.partition(":")

    def plant(pipe: Any) -> None:
        module = getattr(pipe, name)
        setattr(module, inner, SixteenBitRope(getattr(module, inner), length))

    return plant


def shorten_table(table: str, dtype: torch.dtype) -> Plant:
    """A table of the scheduler in 16 bits."""

    def plant(pipe: Any) -> None:
        setattr(pipe.scheduler, table, getattr(pipe.scheduler, table).to(dtype))

    return plant


class EmptyMasks:
    """A tokenizer whose attention masks let nothing through, as for a prompt without tokens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **options: Any) -> Any:
        made = self.inner(*args, **options)
        made["attention_mask"] = torch.zeros_like(made["attention_mask"])
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def empty_masks(pipe: Any) -> None:
    """Every mask of the prompt is 0."""
    pipe.tokenizer = EmptyMasks(pipe.tokenizer)


def mask_attention(path: str, value: float, dtype: torch.dtype) -> Plant:
    """A hook that hands an attention a mask of its own."""
    name, _, inner = path.partition(":")

    def plant(pipe: Any) -> None:
        module = getattr(pipe, name).get_submodule(inner)

        def add_mask(_: nn.Module, args: Any, kwargs: Any) -> Any:
            keys = kwargs["encoder_hidden_states"].shape[1]
            mask = torch.full((2, 1, keys), value, dtype=dtype)
            return args, {**kwargs, "attention_mask": mask}

        module.register_forward_pre_hook(add_mask, with_kwargs=True)

    return plant


def half_lose(name: str) -> Plant:
    """`.half()` on a component."""
    return lambda pipe: getattr(pipe, name).half() and None


def from_pipe(pipe: Any) -> Any:
    """Another pipeline of the same components, cast on the way."""
    from diffusers import CogVideoXVideoToVideoPipeline

    made = CogVideoXVideoToVideoPipeline.from_pipe(pipe, torch_dtype=torch.float16)
    made.set_progress_bar_config(disable=True)
    return made


def offload_cast(pipe: Any) -> None:
    """Cast, then offloaded by Accelerate: the weights are elsewhere."""
    from accelerate import cpu_offload

    pipe.text_encoder.to(torch.float16)
    cpu_offload(pipe.text_encoder, execution_device=torch.device("cpu"))


def run_in_fp64(path: str) -> Plant:
    """A hook that sums in fp64."""
    name, _, inner = path.partition(":")

    def plant(pipe: Any) -> None:
        module = getattr(pipe, name).get_submodule(inner)
        module.register_forward_hook(
            lambda _, args, output: (output.double() * 1.5).to(output.dtype)
        )

    return plant


def filter_by_fft(path: str) -> Plant:
    """A hook that filters by a Fourier transform in the dtype that comes."""
    name, _, inner = path.partition(":")

    def plant(pipe: Any) -> None:
        module = getattr(pipe, name).get_submodule(inner)
        module.register_forward_hook(
            lambda _, args, output: torch.fft.ifftn(torch.fft.fftn(output)).real.to(output.dtype)
        )

    return plant


def stop_upcast(pipe: Any) -> Any:
    """SDXL as a pipeline of one's own that does not read force_upcast."""

    class Own(type(pipe)):  # type: ignore[misc]
        def upcast_vae(self) -> None:
            pass

    pipe.vae.to = lambda *args, **kwargs: pipe.vae
    pipe.__class__ = Own


def write_sana(folder: Path) -> None:
    """The configs of a tiny SanaPipeline."""
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel
    from transformers import Gemma2Config

    index = {
        "_class_name": "SanaPipeline",
        "tokenizer": ["transformers", "GemmaTokenizer"],
        "text_encoder": ["transformers", "Gemma2Model"],
        "vae": ["diffusers", "AutoencoderDC"],
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "tokenizer").mkdir()
    Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ).save_pretrained(folder / "text_encoder")
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=32,
    )
    transformer.save_config(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_config(folder / "scheduler")
    AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    ).save_config(folder / "vae")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYER = "encoder.layers.0"
FAULTS = (
    # operands of different dtypes
    Fault(
        "linear of a block in fp32", "operands", "cogvideox", BF16, "a100",
        cast("transformer:transformer_blocks.1.ff.net.2", FP32),
        "mixed-parameters", "transformer:transformer_blocks.1.ff.net.2",
    ),
    Fault(
        "layer norm in fp32", "operands", "sd", BF16, "a100",
        cast(f"text_encoder:{LAYER}.layer_norm1", FP32),
        "mixed-parameters", f"text_encoder:{LAYER}.layer_norm1",
    ),
    Fault(
        "group norm in fp32", "operands", "sd", BF16, "a100",
        cast("unet:down_blocks.0.resnets.0.norm1", FP32),
        "mixed-parameters", "unet:down_blocks.0.resnets.0.norm1",
    ),
    Fault(
        "convolution in fp32", "operands", "sdxl", BF16, "a100",
        cast("vae:decoder.mid_block.resnets.0.conv1", FP32),
        "mixed-parameters", "vae:decoder.mid_block.resnets.0.conv1",
    ),
    Fault(
        "3D convolution in fp32", "operands", "cogvideox", BF16, "a100",
        cast("vae:decoder.conv_in", FP32), "mixed-parameters", "vae:decoder.conv_in.conv",
    ),
    Fault(
        "queries upcast alone", "operands", "sd", BF16, "a100",
        cast_output("unet:down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", FP32),
        "mixed-operands", "unet:down_blocks.0.attentions.0.transformer_blocks.0.attn1",
    ),
    Fault(
        "mask of attention in another 16-bit format", "operands", "sd", BF16, "a100",
        mask_attention("unet:mid_block.attentions.0.transformer_blocks.0.attn2", 0.0, FP16),
        "mixed-operands", "unet:mid_block.attentions.0.transformer_blocks.0.attn2",
    ),
    Fault(
        "text half of a concatenation in fp32", "operands", "cogvideox", BF16, "a100",
        cast_output("transformer:patch_embed.text_proj", FP32),
        "mixed-operands", "transformer:transformer_blocks.0.norm1.norm",
    ),
    Fault(
        "token embedding in fp32", "operands", "sd", BF16, "a100",
        cast("text_encoder:embeddings.token_embedding", FP32),
        "mixed-parameters", "text_encoder:embeddings.token_embedding",
    ),
    Fault(
        "T5's embedding in fp32", "operands", "cogview3plus", BF16, "a100",
        cast("text_encoder:shared", FP32), "several-dtypes", "text_encoder:shared",
    ),
    Fault(
        "RMSNorm of the queries in fp32", "operands", "flux", BF16, "a100",
        cast("transformer:transformer_blocks.0.attn.norm_q", FP32),
        "several-dtypes", "transformer:transformer_blocks.0.attn.norm_q",
    ),
    Fault(
        "time embedding in fp32", "operands", "svd", FP16, "v100",
        cast("unet:time_embedding", FP32), "mixed-parameters", "unet:time_embedding.linear_1",
    ),
    Fault(
        "T5 in fp16 with fused norms, wo in fp32", "fp32 module comes back", "cogvideox", FP16, "v100",
        fuse_norms("text_encoder"), "fp32-module-not-cast-back",
        "text_encoder:encoder.block.1.layer.0.SelfAttention.q",
    ),
    # several dtypes in one component
    Fault(
        "second half of a transformer in fp16", "partial load", "cogvideox", BF16, "a100",
        cast("transformer:transformer_blocks.1", FP16),
        "mixed-parameters", "transformer:transformer_blocks.1.norm1.linear",
    ),
    Fault(
        "middle block in fp32", "partial load", "sdxl", FP16, "v100",
        cast("unet:mid_block", FP32), "mixed-parameters", "unet:mid_block.resnets.0.norm1",
    ),
    Fault(
        "decoder in fp32, encoder in fp16", "partial load", "wan", FP16, "v100",
        cast("vae:decoder.mid_block", FP32), "mixed-parameters",
        "vae:decoder.mid_block.resnets.0.norm1",
    ),
    Fault(
        "norm in fp32 that the CPU takes", "partial load", "sd", BF16, "cpu",
        cast(f"text_encoder:{LAYER}.layer_norm1", FP32),
        "several-dtypes", f"text_encoder:{LAYER}.layer_norm1",
    ),
    # fp32 modules
    Fault(
        "T5 by .half()", "fp32 module lost", "cogview3plus", BF16, "v100", half_lose("text_encoder"),
        "fp32-module-lost", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wo",
    ),
    Fault(
        "Wan by .to(bfloat16)", "fp32 module lost", "wan", BF16, "a100",
        lambda pipe: pipe.transformer.to(BF16) and None,
        "fp32-module-lost", "transformer",
    ),
    Fault(
        "UMT5 by .to(float16)", "fp32 module lost", "wan", FP16, "v100",
        lambda pipe: pipe.text_encoder.to(FP16) and None,
        "fp32-module-lost", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wo",
    ),
    Fault(
        "T5 by from_pipe with a dtype", "fp32 module lost", "cogvideox-video", FP16, "v100", from_pipe,
        "fp32-module-lost", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wo",
    ),
    Fault(
        "T5 cast, then offloaded", "fp32 module lost", "cogvideox", FP16, "v100", offload_cast,
        "fp32-module-lost", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wo",
    ),
    # components that disagree
    Fault(
        "text encoder in fp32", "boundary", "cogvideox", BF16, "a100", cast("text_encoder:", FP32),
        "boundary", "transformer:patch_embed.text_proj",
    ),
    Fault(
        "second text encoder in fp32", "boundary", "sdxl", FP16, "v100",
        cast("text_encoder_2:", FP32), "boundary",
        "unet:down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
    ),
    Fault(
        "decoder in fp32 behind latents in bf16", "boundary", "sd", BF16, "a100",
        cast("vae:", FP32), "boundary", "vae:post_quant_conv",
    ),
    Fault(
        "decoder in fp32 of Flux", "boundary", "flux", BF16, "a100", cast("vae:", FP32),
        "boundary", "vae:post_quant_conv",
    ),
    Fault(
        "encoder in fp32, picture in bf16", "boundary", "cogvideox-image", BF16, "a100",
        cast("vae:", FP32), "boundary", "vae:encoder.conv_in.conv",
    ),
    Fault(
        "encoder in fp32, video in bf16", "boundary", "cogvideox-video", BF16, "a100",
        cast("vae:", FP32), "boundary", "vae:encoder.conv_in.conv",
    ),
    Fault(
        "image encoder in fp16, UNet in bf16", "boundary", "svd", BF16, "a100",
        cast("image_encoder:", FP16), "boundary", "unet:time_embedding.linear_1",
    ),
    Fault(
        "added time ids in fp32 to embeddings in fp16", "boundary", "svd", FP16, "v100",
        cast("image_encoder:", FP32), "boundary", "unet:conv_in",
    ),
    # not implemented
    Fault(
        "bf16 3D convolutions on a V100", "not implemented", "cogvideox", BF16, "v100", nothing,
        "not-implemented", "vae:decoder.conv_in.conv",
    ),
    Fault(
        "Fourier filter in fp16 on a CPU", "not implemented", "sd", FP16, "cpu",
        filter_by_fft("unet:up_blocks.1"), "not-implemented", "unet:up_blocks.1",
    ),
    Fault(
        "fp64 on MPS", "not implemented", "cogvideox", FP16, "mps-m1",
        run_in_fp64("text_encoder:encoder.final_layer_norm"),
        "not-implemented", "text_encoder:encoder.final_layer_norm",
    ),
    # positions, timesteps, sigmas
    Fault(
        "rotary positions in bf16", "16-bit positions", "wan", BF16, "a100",
        wrap_rope("transformer:rope", 512), "positions-collapse", "transformer:rope",
    ),
    Fault(
        "rotary positions in fp16", "16-bit positions", "flux", FP16, "v100",
        wrap_rope("transformer:pos_embed", 4096), "positions-collapse", "transformer:pos_embed",
    ),
    Fault(
        "300 timesteps in bf16", "16-bit positions", "flux", BF16, "a100", nothing,
        "timesteps-collapse", "transformer", arguments=(("num_inference_steps", 300),),
    ),
    Fault(
        "alphas in bf16", "16-bit positions", "cogvideox", BF16, "a100",
        shorten_table("alphas_cumprod", BF16), "sigmas-collapse", "scheduler",
    ),
    Fault(
        "alphas in bf16 of Euler", "16-bit positions", "sdxl", BF16, "a100",
        shorten_table("alphas_cumprod", BF16), "sigmas-collapse", "scheduler",
    ),
    # clamps and upcasts
    Fault(
        "clip of CogView3-Plus", "clamp", "cogview3plus", FP16, "v100", nothing,
        "clamp-may-bite", "transformer:transformer_blocks.0",
    ),
    Fault(
        "clip of Flux", "clamp", "flux", FP16, "v100", nothing,
        "clamp-may-bite", "transformer:transformer_blocks.0",
    ),
    Fault(
        "clamp of T5", "clamp", "cogvideox", FP16, "v100", nothing,
        "clamp-may-bite", "text_encoder:encoder.block.0",
    ),
    Fault(
        "force_upcast that SD does not read", "force_upcast", "sd", FP16, "v100", nothing,
        "force-upcast-unread", "vae",
    ),
    Fault(
        "force_upcast that one's own SDXL does not read", "force_upcast", "sdxl", FP16, "v100",
        stop_upcast, "force-upcast-unread", "vae",
    ),
    # devices
    Fault(
        "bf16 on a V100", "device", "cogview3plus", BF16, "v100", nothing,
        "format-emulated", "text_encoder",
    ),
    Fault(
        "bf16 on a T4", "device", "flux", BF16, "t4", nothing, "format-emulated", "text_encoder",
    ),
    Fault(
        "fp16 on a GTX 1080", "device", "sd", FP16, "gtx10", nothing, "format-slow", "text_encoder",
    ),
    Fault(
        "fp16 on a GTX 1660", "device", "sd", FP16, "gtx16", nothing,
        "format-broken", "text_encoder",
    ),
    # weights
    Fault(
        "a NaN", "weights", "cogvideox", BF16, "a100",
        fill("transformer:proj_out.weight", float("nan")),
        "weight-not-finite", "transformer:proj_out.weight", needs_weights=True,
    ),
    Fault(
        "an Inf", "weights", "svd", FP16, "v100", fill("unet:conv_in.weight", float("inf")),
        "weight-not-finite", "unet:conv_in.weight", needs_weights=True,
    ),
    Fault(
        "a stored value of 1e6, asked for in fp16", "weights", "sd", BF16, "v100",
        fill_stored("unet", "conv_in.weight", 1e6), "weight-out-of-range", "unet:conv_in.weight",
        stored=True, precision="fp16-plain",
    ),
    Fault(
        "weights of 1e-6 in fp16", "weights", "flux", FP16, "v100",
        fill("transformer:x_embedder.weight", 1e-6, everywhere=True),
        "weight-subnormal", "transformer:x_embedder.weight", needs_weights=True,
    ),
    # autocast
    Fault(
        "autocast over T5's wo", "autocast", "cogvideox", FP16, "cpu", nothing,
        "autocast-overrides", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wo",
        autocast=BF16,
    ),
    Fault(
        "autocast over Wan's time embedding", "autocast", "wan", BF16, "cpu", nothing,
        "autocast-overrides", "transformer:condition_embedder.time_embedder.linear_1",
        autocast=BF16,
    ),
    # masks
    Fault(
        "a prompt whose mask is empty", "mask", "wan", BF16, "a100", empty_masks,
        "mask-empty-row", "text_encoder:encoder.block.0.layer.0.SelfAttention",
    ),
    Fault(
        "a mask of -inf", "mask", "sd", FP32, "a100",
        mask_attention("unet:mid_block.attentions.0.transformer_blocks.0.attn2", -torch.inf, FP32),
        "mask-empty-row", "unet:mid_block.attentions.0.transformer_blocks.0.attn2",
    ),
    # needs of single models, and of checkpoints
    Fault(
        "Sana in fp32", "model", "sana", FP32, "a100", nothing, "model-needs", "transformer",
        stored=True, precision="fp32",
    ),
    Fault(
        "Gemma 2 in fp16", "model", "sana", FP16, "v100", nothing, "model-needs", "text_encoder",
        stored=True, precision="fp16-plain",
    ),
    Fault(
        "stored in bf16, asked for in fp16", "model", "cogvideox", BF16, "v100", nothing,
        "range-unplanned", "text_encoder", stored=True, precision="fp16-plain",
    ),
)  # fmt: skip
"""Every planted fault."""
