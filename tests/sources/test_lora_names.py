"""Names in LoRA files, as trainers write them."""

from __future__ import annotations

import pytest

from stopdown.sources.lora_names import Layer, find_layer, index_layers, split_prefix

NAMES = {
    "transformer.blocks.0.attn.to_q": "blocks.0.attn.to_q",
    "lora_unet_blocks_0_attn_to_q": "blocks.0.attn.to_q",
    "diffusion_model.blocks.0.attn.to_q": "blocks.0.attn.to_q",
    "unet.blocks.0.attn.processor.to_q": "blocks.0.attn.to_q",
    "transformer.blocks.0.attn.to_k": "",
}


@pytest.mark.parametrize(("stem", "path"), NAMES.items())
def test_a_layer_is_found_by_any_trainers_name(stem: str, path: str) -> None:
    """Dots and underscores are one; a layer that the model lacks is not guessed."""
    index = index_layers([Layer("transformer", "blocks.0.attn.to_q")])
    found = find_layer(stem, index)
    assert (found.path if found else "") == path


def test_a_layer_of_another_component_is_not_taken() -> None:
    """The prefix names the component."""
    index = index_layers([Layer("text_encoder", "layers.0.q"), Layer("unet", "layers.0.q")])
    found = find_layer("text_encoder.layers.0.q", index)
    assert found is not None
    assert found.component == "text_encoder"
    assert split_prefix("layers.0.q") == ("", "", "layers.0.q")


def test_a_stored_name_may_have_rows_of_a_larger_tensor() -> None:
    """Weight and bias are named after what the file has."""
    assert Layer("", "a.b").name_tensor("weight") == "a.b.weight"
    assert Layer("", "q", "attn.in_proj_", (0, 3)).name_tensor("bias") == "attn.in_proj_bias"
