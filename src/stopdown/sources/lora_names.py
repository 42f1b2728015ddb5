"""Parsing of tensor names in LoRA files into component, layer and role.

Trainers name layers with dots or underscores, after a prefix for the component, with the names of Diffusers
or of the original checkpoint. The matrices are called `lora_A` or `lora_down`. A name is therefore parsed
from both ends: the suffix gives the role of the tensor, the prefix the component. The rest is looked up
among the model's layers, with dots and underscores treated alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stopdown.sources.headers import DamagedFileError, read_header

DENOISER = "denoiser"
"""Common name of the denoising component: `transformer`, `unet`, `prior`, or another program's name."""

_TABLE = (
    (r"(?:model\.)?diffusion_model\.|(?:transformer|unet|prior)(?:_\d)?\.|net\.", DENOISER),
    (r"lora_(?:unet|transformer|prior_unet)_|lycoris_|base_model\.model\.", DENOISER),
    (r"first_stage_model\.|vae\.", "vae"),
    (r"(?:text_encoder_2|text_encoders\.clip_g)\.|lora_te2_", "text_encoder_2"),
    (r"conditioner\.embedders\.1\.(?:model\.)?", "text_encoder_2"),
    (r"(?:text_encoder_3|text_encoders\.t5xxl)\.|lora_te3_", "text_encoder_3"),
    (r"(?:text_encoder|text_encoders\.\w+|cond_stage_model)\.|lora_te1?_", "text_encoder"),
    (r"conditioner\.embedders\.\d+\.", "text_encoder"),
    (r"image_encoder\.", "image_encoder"),
    (r"controlnet\.", "controlnet"),
)
_PATTERNS = tuple(
    (re.compile(rf"({begin}){'(?:transformer[.])?' * name.startswith('text')}"), name)
    for begin, name in _TABLE
)


def split_prefix(name: str) -> tuple[str, str, str]:
    """Split a tensor's name into its component, the prefix as written, and the rest.

    The component is a name in a pipeline, or `DENOISER` for a transformer, a UNet or a prior. Component
    and prefix are "" for names without a prefix. In `text_encoders.t5xxl.transformer.encoder`,
    `transformer.` belongs neither to the prefix nor to the rest.
    """
    for pattern, component in _PATTERNS:
        if found := pattern.match(name):
            return component, found[1], name[found.end() :]
    return "", "", name


_ROLES = {
    "lora_A": r"lora_A(\.\w+)?\.weight|lora[_.]down\.weight",
    "lora_B": r"lora_B(\.\w+)?\.weight|lora[_.]up\.weight",
    "lora_B.bias": r"lora_B(\.\w+)?\.bias|lora[_.]up\.bias",
    "lora_mid": r"lora_mid\.weight",
    "magnitude": r"dora_scale|lora_magnitude_vector(\.\w+)?(\.weight)?",
    "alpha": r"alpha",
    "diff_b": r"diff_b|b_norm",
    "diff": r"diff|w_norm|set_weight",
}
OTHER_KINDS = {
    "LoHa": r"hada_\w+",
    "LoKr": r"lokr_\w+",
    "OFT": r"oft_\w+(\.weight)?|rescale",
    "GLoRA": r"[ab][12]\.weight",
}
"""Adapters that are neither LoRA nor DoRA, with patterns of their tensor names; each is also a role."""
_SUFFIX = re.compile(
    r"^(?P<stem>.*?)[._](?:"
    + "|".join(
        f"(?P<{role.replace('.', '_dot_')}>{form})" for role, form in (_ROLES | OTHER_KINDS).items()
    )
    + r")$"
)
_ADAPTER = re.compile(r"[._](lora_|lora\.|hada_w|lokr_w|dora_scale|a1\.weight|oft_)")

_FIRST_NORM = re.compile(
    r"(?P<prefix>(?!.*visual).*)transformer\.resblocks\.(?P<number>\d+)\.ln_1\.weight"
)
_CLIP_LAYERS = (*(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")

_COMPONENTS = {"transformer": DENOISER, "unet": DENOISER, "prior": DENOISER}


@dataclass(frozen=True)
class Layer:
    """A layer of a model to which an adapter may add.

    Attributes:
        component: name in the pipeline; "" in a file of one component.
        path: module path of the layer, as the model or its file names it.
        stored: name in the file before `weight` and `bias`, if that is not the path and a dot.
        part: if several layers are stacked in the stored tensor, this layer's number and how many blocks
            of rows there are.
    """

    component: str
    path: str
    stored: str = ""
    part: tuple[int, int] = (0, 1)

    def name_tensor(self, kind: str) -> str:
        """Return the name in the file of the layer's `weight` or `bias`."""
        return f"{self.stored or f'{self.path}.'}{kind}"


def is_lora_file(path: Path) -> bool:
    """Return whether a path is a safetensors file with an adapter and not a model."""
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return False
    try:
        names = list(read_header(path))
    except (DamagedFileError, OSError):
        return False
    return sum(_ADAPTER.search(name) is not None for name in names) > len(names) / 4


def split_lora_name(name: str) -> tuple[str, str] | None:
    """Split a name in a LoRA file into its layer and the role of the tensor; None for any other name."""
    found = _SUFFIX.match(name)
    if found is None:
        return None
    role = next(key for key, text in found.groupdict().items() if text and key != "stem")
    return found["stem"], role.replace("_dot_", ".")


def list_layers(component: str, names: Iterable[str]) -> Iterator[Layer]:
    """Yield the layers of a component, by its tensors' names.

    The layers of open_clip's text encoders are also yielded under Transformers' names, which trainers use.
    """
    from stopdown.sources.single_file_names import read_layouts, rename_tensor

    rules = read_layouts()["open_clip"].rules
    for name in names:
        yield Layer(component, name.rpartition(".")[0])
        if (found := _FIRST_NORM.fullmatch(name)) is None:
            continue
        for own in _CLIP_LAYERS:
            path = f"text_model.encoder.layers.{found['number']}.{own}"
            target, _, place = rename_tensor(f"{path}.weight", rules, {"last": 0}).partition("@")
            yield Layer(
                component,
                found["prefix"].removesuffix("model.") + path,
                f"{found['prefix']}{target.removesuffix('weight')}",
                (int(place), 3) if place else (0, 1),
            )


def index_layers(layers: Iterable[Layer]) -> dict[str, dict[str, Layer]]:
    """Index layers for names in LoRA files: by component, then by path with `_` in place of `.`.

    All transformers, UNets and priors are one component there, `DENOISER`.
    """
    found: dict[str, dict[str, Layer]] = {}
    for layer in layers:
        kind, path = _COMPONENTS.get(layer.component, layer.component), layer.path
        if not kind:
            kind, _, path = split_prefix(path)
        found.setdefault(kind or DENOISER, {})[_flatten(path)] = layer
    return found


def find_layer(stem: str, index: Mapping[str, Mapping[str, Layer]]) -> Layer | None:
    """Find the layer for a name in a LoRA file; None if the model has none."""
    kind, _, bare = split_prefix(stem)
    flat = _flatten(bare)
    plain = re.sub(r"_to_out$", "_to_out_0", flat.replace("_processor_to_", "_to_"))
    known = index.get(kind or DENOISER, {})
    for name in (flat, plain, plain.removeprefix("text_model_")):
        if name in known:
            return known[name]
    return known.get(f"text_model_{plain}")


def _flatten(path: str) -> str:
    return path.replace(".", "_")
