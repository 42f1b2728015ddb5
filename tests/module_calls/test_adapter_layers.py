"""Layers that PEFT puts around others, known by their attributes."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.module_calls.adapter_layers import (
    find_role_tensors,
    is_adapter_layer,
    list_adapter_layers,
    list_adapter_names,
    unwrap_name,
)


class Wrapped(nn.Module):
    """Has what PEFT's layers have, and no PEFT."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_magnitude_vector")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"a": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 4)})
        self.lora_magnitude_vector = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})

    def get_base_layer(self) -> nn.Module:
        return self.base_layer


class Named(nn.Module):
    """Has one attribute of PEFT's layers by chance."""

    adapter_layer_names = ("lora_A",)


def test_layers_are_known_by_their_attributes() -> None:
    """The layer that is wrapped is none itself."""
    module = nn.Sequential(nn.Linear(4, 4), Wrapped())
    assert list_adapter_layers(module) == [module[1]]
    assert not is_adapter_layer(module[1].base_layer)
    assert not is_adapter_layer(Named())
    assert list_adapter_names(module[1]) == {"a", "b"}
    assert list_adapter_names(module[0]) == set()


def test_tensors_are_found_by_their_roles() -> None:
    """A bias is named beside its matrix, and a DoRA's magnitude by itself."""
    layer = Wrapped()
    first, second = find_role_tensors(layer, "a"), find_role_tensors(layer, "b")
    assert sorted(first) == ["lora_A", "lora_B", "lora_B.bias", "magnitude"]
    assert first["lora_B.bias"] is layer.lora_B["a"].bias
    assert sorted(second) == ["lora_B", "lora_B.bias"]


def test_names_are_those_without_adapters() -> None:
    """Also where the layer itself is named, and where nothing is wrapped."""
    assert unwrap_name("block.to_q.base_layer.weight") == "block.to_q.weight"
    assert unwrap_name("block.to_q.base_layer") == "block.to_q"
    assert unwrap_name("block.to_q.weight") == "block.to_q.weight"
