"""The names of tensors in LoRA files: which layer, and what of it.

Trainers name layers with dots or underscores, behind a prefix for the component, in Diffusers' names or
in those of the original checkpoint, and the matrices `lora_A` or `lora_down`. So a name is read from both
ends: a suffix says what the tensor is, a prefix to which component it belongs, and what is left is looked
up among the layers of the model, dots and underscores alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stopdown.pipelines.headers import DamagedFileError, read_header

DENOISER = "denoiser"

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
_FACTORS = r"hada_w[12]_[ab]|hada_t[12]|lokr_w[12](_[ab])?|lokr_t2"
_SUFFIX = re.compile(
    r"^(?P<stem>.*?)[._](?:"
    + "|".join(f"(?P<{role.replace('.', '_dot_')}>{form})" for role, form in _ROLES.items())
    + rf"|(?P<factor>{_FACTORS}))$"
)
_ADAPTER = re.compile(r"[._](lora_|lora\.|hada_w|lokr_w|dora_scale|a1\.weight|oft_)")

_PREFIXES = (
    (
        r"(lora_te1?_|lora_te_|text_encoder\.|text_encoders\.clip_l\.(transformer\.)?)",
        "text_encoder",
    ),
    (r"(lora_te2_|text_encoder_2\.|text_encoders\.clip_g\.(transformer\.)?)", "text_encoder_2"),
    (r"(lora_te3_|text_encoder_3\.|text_encoders\.t5xxl\.(transformer\.)?)", "text_encoder_3"),
    (r"(model\.)?diffusion_model\.", DENOISER),
    (r"(lora_unet_|lora_transformer_|lora_prior_unet_|lycoris_)", DENOISER),
    (r"(transformer(_2)?\.|unet\.|base_model\.model\.)", DENOISER),
)
_STORED = (
    (r"model\.diffusion_model\.|transformer(_2)?\.|unet\.", DENOISER),
    (r"conditioner\.embedders\.0\.transformer\.|cond_stage_model\.transformer\.", "text_encoder"),
    (r"text_encoders\.clip_l\.transformer\.", "text_encoder"),
    (r"conditioner\.embedders\.1\.model\.|text_encoders\.clip_g\.transformer\.", "text_encoder_2"),
    (r"text_encoders\.t5xxl\.transformer\.", "text_encoder_3"),
)
_COMPONENTS = {"transformer": DENOISER, "unet": DENOISER, "prior": DENOISER}


@dataclass(frozen=True)
class Layer:
    """A layer of a model that an adapter may add to.

    Attributes:
        component: name in the pipeline; "" in a file of one component.
        path: of its weight without `.weight`, as the model or its file names it.
    """

    component: str
    path: str


def is_adapter_name(name: str) -> bool:
    """Whether a tensor of this name is a part of an adapter."""
    return _ADAPTER.search(name) is not None


def is_lora_file(path: Path) -> bool:
    """Whether a path is a safetensors file that holds an adapter and no model."""
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return False
    try:
        names = list(read_header(path))
    except (DamagedFileError, OSError):
        return False
    return bool(names) and sum(map(is_adapter_name, names)) > len(names) / 4


def split_name(name: str) -> tuple[str, str] | None:
    """The layer as a LoRA file names it, and the role of the tensor; None for what is no such name."""
    found = _SUFFIX.match(name)
    if found is None:
        return None
    role = next(key for key, text in found.groupdict().items() if text and key != "stem")
    return found["stem"], found["factor"] or role.replace("_dot_", ".")


def _split_prefix(stem: str) -> tuple[str, str]:
    """The component that a layer of a LoRA file belongs to, and the layer's name there.

    The component is `DENOISER`, or a text encoder's name.
    """
    for pattern, kind in _PREFIXES:
        if match := re.match(pattern, stem):
            return kind, stem[match.end() :]
    return DENOISER, stem


def index_layers(layers: Iterable[Layer]) -> dict[str, dict[str, Layer]]:
    """Kind of component to its layers by their names with underscores alone."""
    found: dict[str, dict[str, Layer]] = {}
    for layer in layers:
        kind, path = _COMPONENTS.get(layer.component, layer.component), layer.path
        if not kind:
            kind = DENOISER
            for pattern, stored in _STORED:
                if match := re.match(pattern, path):
                    kind, path = stored, path[match.end() :]
                    break
        found.setdefault(kind, {})[_flatten(path)] = layer
    return found


def find_layer(stem: str, index: Mapping[str, Mapping[str, Layer]]) -> Layer | None:
    """The layer that a name of a LoRA file means; None where the model has none."""
    kind, bare = _split_prefix(stem)
    flat = _flatten(bare)
    plain = re.sub(r"_to_out$", "_to_out_0", flat.replace("_processor_to_", "_to_"))
    known = index.get(kind, {})
    for name in (flat, plain, plain.removeprefix("text_model_")):
        if name in known:
            return known[name]
    return known.get(f"text_model_{plain}")


def _flatten(path: str) -> str:
    return path.replace(".", "_")
