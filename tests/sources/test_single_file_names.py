"""Names in single files: Diffusers' own converters read what is written, and it comes back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

from models.single_file_models import MODELS, OTHERS
from readers.single_file_readers import OWN_NAMES, PUBLISHED_ONLY, UNREAD_BY_DIFFUSERS
from stopdown.sources import single_file_names
from stopdown.sources.single_file_names import arrange, lay_out, read_layouts, take_apart

SMALL = {name: model.build for name, model in MODELS.items()} | OTHERS


def convert(module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Diffusers' converter makes of a file's tensors."""
    from diffusers.loaders import single_file_model

    kind = single_file_model._get_single_file_loadable_mapping_class(type(module))
    mapping = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    prefix = {"UNet2DConditionModel": "model.diffusion_model.", "AutoencoderKLLTXVideo": "vae."}
    tensors = {prefix.get(kind, "") + name: x for name, x in tensors.items()}
    found: dict[str, torch.Tensor] = mapping(checkpoint=tensors, config=dict(module.config))
    return found


@pytest.mark.parametrize("name", sorted(SMALL))
def test_what_is_put_together_comes_apart(name: str) -> None:
    """Every tensor of a component has one place in its file, and comes back from there."""
    module = SMALL[name]()
    state, tensors = module.state_dict(), arrange(module)
    if type(module).__name__ not in read_layouts():
        assert set(tensors) <= set(state)
        return
    assert sum(x.numel() for x in tensors.values()) == sum(x.numel() for x in state.values())
    assert single_file_names.find_arranged_shapes(module) == {
        key: tuple(x.shape) for key, x in tensors.items()
    }
    back = take_apart(module, tensors)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], x) for key, x in state.items())


@pytest.mark.parametrize(
    "name", sorted(SMALL.keys() - {*UNREAD_BY_DIFFUSERS, *OWN_NAMES, "clip", "t5"})
)
def test_diffusers_reads_what_is_written(name: str) -> None:
    """Its converter finds every tensor, with every value in its place."""
    module = SMALL[name]()
    found = convert(module, arrange(module))
    for key, x in module.state_dict().items():
        assert torch.equal(found[key], x), key


def test_diffusers_reads_an_open_clip() -> None:
    """The second text encoder of SDXL in one file: fused projections, and one that is transposed."""
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, projection_dim=64,
    )  # fmt: skip
    module = CLIPTextModelWithProjection(config)
    tensors = {f"x.{name}": x for name, x in arrange(module, "open_clip").items()}
    found = convert_open_clip_checkpoint(module, tensors, prefix="x.")
    state = {name.removeprefix("text_model."): x for name, x in module.state_dict().items()}
    assert {name.removeprefix("text_model.") for name in found} == state.keys()
    for name, x in found.items():
        assert torch.equal(x, state[name.removeprefix("text_model.")]), name


LATER_LTX = {
    "decoder_block_out_channels": (256, 512, 1024),
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2,) * 3,
    "timestep_conditioning": True,
}


def build_wide(name: str) -> Any:
    """A model of the published width, without memory."""
    import diffusers

    options: dict[str, tuple[str, dict[str, Any]]] = {
        "flux": ("FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
        "chroma": ("ChromaTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
        "hunyuan-video": (
            "HunyuanVideoTransformer3DModel",
            {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
        ),
        "lumina2": ("Lumina2Transformer2DModel", {"num_layers": 1}),
        "ltx-vae-0.9.1": (
            "AutoencoderKLLTXVideo",
            {
                **LATER_LTX,
                "decoder_layers_per_block": (5, 6, 7, 8),
                "decoder_inject_noise": (True, True, True, False),
            },
        ),
        "ltx-vae-0.9.5": (
            "AutoencoderKLLTXVideo",
            {
                **LATER_LTX,
                "block_out_channels": (128, 256, 512, 1024, 2048),
                "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
                "layers_per_block": (4, 6, 6, 2, 2),
                "decoder_layers_per_block": (5, 5, 5, 5),
                "spatio_temporal_scaling": (True,) * 4,
                "decoder_inject_noise": (False,) * 4,
                "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            },
        ),
    }
    class_name, arguments = options[name]
    with init_empty_weights():
        return getattr(diffusers, class_name)(**arguments)


@pytest.mark.parametrize("name", [*PUBLISHED_ONLY, "ltx-vae-0.9.1", "ltx-vae-0.9.5"])
def test_diffusers_reads_published_widths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the number of its row in place of each value, one column wide."""
    module, last, state = build_wide(name), 0, {}
    for key, x in module.state_dict().items():
        rows = torch.arange(last, last + (len(x) if x.dim() else 1), dtype=torch.float64)
        state[key] = rows.view(-1, *(1 for _ in x.shape[1:])) if x.dim() else rows[0]
        if key == "encoder.conv_out.conv.weight":  # its columns tell Diffusers the version
            state[key] = state[key].expand(-1, x.shape[1], 1, 1, 1)
        last += len(x) if x.dim() else 1
    monkeypatch.setattr(module, "state_dict", lambda: state)
    found = convert(module, arrange(module))
    for key, x in state.items():
        assert torch.equal(found[key], x), key


def test_a_wrong_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With q and k in each other's place the converter gives other values: the test above fails then."""
    table = read_layouts()["ZImageTransformer2DModel"]
    other = {"@0": "@1", "@1": "@0"}
    swapped = [(x, y[:-2] + other.get(y[-2:], y[-2:])) for x, y in table.rules]
    wrong = single_file_names.Layout(table.class_name, table.source, tuple(swapped))
    monkeypatch.setattr(single_file_names, "read_layouts", lambda: {table.class_name: wrong})
    module = SMALL["z-image"]()
    found = convert(module, arrange(module))
    assert not all(torch.equal(found[key], x) for key, x in module.state_dict().items())


def test_an_unknown_class_is_named() -> None:
    """A class without a table has no names; what is left to do is said."""
    from diffusers import CogView3PlusTransformer2DModel

    with init_empty_weights():
        module = CogView3PlusTransformer2DModel(num_layers=1)
    with pytest.raises(Exception, match="The names of a CogView3PlusTransformer2DModel in single"):
        lay_out(module)


def test_shapes_come_without_values() -> None:
    """A component is found in a file by names and shapes that its class alone says."""
    with init_empty_weights():
        module = SMALL["wan"]()
    assert single_file_names.find_arranged_shapes(module) == {
        key: tuple(x.shape) for key, x in arrange(SMALL["wan"]()).items()
    }
