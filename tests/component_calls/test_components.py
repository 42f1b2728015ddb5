"""Tests of components: component calls, stages, what is kept in fp32, and casts that keep it."""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers

from stopdown import testing
from stopdown.component_calls.components import (
    cast_component_,
    find_callees,
    find_kept_fp32,
    find_stage,
    list_call_names,
    read_precisions,
)


def test_the_callees_of_a_pipeline() -> None:
    """An autoencoder has two, every other module one; tokenizers and schedulers have none."""
    callees = find_callees(testing.make_pipeline("svd"))
    assert [(callee.name, callee.method, callee.stage) for callee in callees] == [
        ("vae.encode", "encode", "encode"),
        ("vae.decode", "decode", "decode"),
        ("image_encoder", "forward", "encode"),
        ("unet", "forward", "denoise"),
    ]


def test_a_class_without_forward_is_called_by_what_it_decodes_with() -> None:
    """Shap-E's renderer has methods alone, and its arguments are brought to its dtype there."""
    from diffusers.pipelines.shap_e import ShapERenderer

    assert list_call_names("renderer", ShapERenderer) == (
        "renderer.decode_to_image",
        "renderer.decode_to_mesh",
    )
    program = SimpleNamespace(components={"renderer": ShapERenderer.__new__(ShapERenderer)})
    assert [(x.name, x.method, x.stage) for x in find_callees(program)] == [
        ("renderer.decode_to_image", "decode_to_image", "decode"),
        ("renderer.decode_to_mesh", "decode_to_mesh", "decode"),
    ]


def test_what_a_module_made_in_16_bits_is_cast_with_it() -> None:
    """As if it had been loaded so; a table in fp32 is meant to be exact."""
    model = torch.nn.Linear(2, 2).bfloat16()
    model.box, model.table = torch.ones(3).bfloat16(), torch.ones(3)  # type: ignore[assignment]
    cast_component_(model, torch.float16)
    assert (model.box.dtype, model.table.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("component", "stage"),
    [
        ("text_encoder_2", "encode"),
        ("image_encoder", "encode"),
        ("transformer_2", "denoise"),
        ("safety_checker", "decode"),
    ],
)
def test_the_stage_of_a_component(component: str, stage: str) -> None:
    """By its name; the methods of an autoencoder are stages of their own."""
    assert find_stage(component) == stage


@pytest.mark.parametrize(
    ("module_class", "fp16", "bf16"),
    [
        (transformers.T5EncoderModel, ("wo",), ()),
        (diffusers.AutoencoderKL, (), ()),
        (diffusers.UNet2DConditionModel, (), ()),
    ],
)
def test_what_is_kept_in_fp32(
    module_class: type, fp16: tuple[str, ...], bf16: tuple[str, ...]
) -> None:
    """Transformers keeps T5's wo for fp16 only."""
    assert find_kept_fp32(module_class, "fp16") == fp16
    assert find_kept_fp32(module_class, "bf16") == bf16
    assert find_kept_fp32(module_class, "fp32") == ()


def test_diffusers_keeps_in_both() -> None:
    """The transformer of Wan keeps its norms and times in fp32 for fp16 and for bf16."""
    kept = find_kept_fp32(diffusers.WanTransformer3DModel, "bf16")
    assert "time_embedder" in kept
    assert kept == find_kept_fp32(diffusers.WanTransformer3DModel, "fp16")


@pytest.mark.parametrize(
    ("name", "component"),
    [("wan", "transformer"), ("wan", "text_encoder"), ("cogvideox", "text_encoder")],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_is_as_if_it_had_been_loaded_so(
    save_tiny: object, name: str, component: str, dtype: torch.dtype
) -> None:
    """Every weight has the dtype, and the bits, that `from_pretrained` would have given it."""
    folder = save_tiny(name, "fp32") / component  # type: ignore[operator]
    module_class = type(getattr(testing.make_pipeline(name), component))
    loaded = module_class.from_pretrained(folder, dtype=dtype).state_dict()
    cast = cast_component_(module_class.from_pretrained(folder, dtype=torch.float32), dtype)
    for key, tensor in cast.state_dict().items():
        assert tensor.dtype == loaded[key].dtype, key
        assert torch.equal(tensor, loaded[key]), key


def test_precisions_are_ordered_by_size() -> None:
    """The format of most values comes first; integers do not count."""
    module = torch.nn.Module()
    module.small = torch.nn.Parameter(torch.ones(1))
    module.large = torch.nn.Parameter(torch.ones(9, dtype=torch.float16))
    module.whole = torch.nn.Parameter(torch.ones(99, dtype=torch.int64), requires_grad=False)
    assert read_precisions(module) == (torch.float16, torch.float32)


def test_absent_components_have_no_call() -> None:
    """A pipeline published without its safety checker has None in its place."""
    pipe = SimpleNamespace(components={"safety_checker": None, "scheduler": object()})
    assert find_callees(pipe) == ()
