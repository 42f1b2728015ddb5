"""The exponents of each layer's input and output, as a plan has them beside those of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType

import torch

from stopdown import rescale_
from stopdown.testing import make_pipeline

Values = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)


def make_call(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 2, 4, 4, 4, generator=draw),
        "encoder_hidden_states": torch.randn(
            1, 8, transformer.config.text_embed_dim, generator=draw
        ),
        "timestep": torch.tensor([500]),
    }


def watch(module: torch.nn.Module, call: Mapping[str, torch.Tensor]) -> Values:
    """Input, weight and output of every layer in one call."""
    found: Values = {}

    def note(layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found[names[layer]] = (args[0].clone(), layer.weight.detach().clone(), output.clone())

    names = {part: name for name, part in module.named_modules() if isinstance(part, LAYERS)}
    # it is to see the exponents, for which a user's hook takes them off
    see = FunctionType(note.__code__, {"__name__": "stopdown"}, closure=note.__closure__)
    handles = [part.register_forward_hook(see) for part in names]
    with torch.no_grad():
        module(**call)
    for handle in handles:
        handle.remove()
    return found


def test_the_exponents_of_layers_are_those_of_their_values() -> None:
    """Input and output of each layer are the original's times 2**exponent, bit for bit, and its weight
    that of their difference."""
    transformer = make_pipeline("cogvideox", overflow="transformer").transformer
    call = make_call(transformer)
    before = watch(transformer, call)
    scaling = rescale_(transformer, (), call).scaling
    after = watch(transformer, call)
    seen = 0
    for layer, values in before.items():
        blocks = {name: x for name, x in scaling.layers.items() if name.startswith(f"{layer}[")}
        for block, (_, result) in blocks.items():
            start, stop = map(int, block[len(layer) + 1 : -1].split(":"))
            ends = values[2][..., start:stop], after[layer][2][..., start:stop]
            assert torch.equal(torch.ldexp(ends[0], torch.tensor(result)), ends[1])
        if blocks:
            continue
        source, result = scaling.layers.get(layer, (0, 0))
        exponents = (source, result - source, result)
        for old, new, exponent in zip(values, after[layer], exponents, strict=True):
            assert torch.equal(torch.ldexp(old, torch.tensor(exponent)), new), layer
        seen += layer in scaling.layers
    assert seen > 5
    assert any(result for _, result in scaling.layers.values())
