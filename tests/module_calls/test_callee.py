"""One call that a program makes."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.module_calls.callee import Callee


class Autoencoder(nn.Module):
    def forward(self, sample: object, scale: float = 1.0) -> object:
        return sample

    def decode(self, z: object) -> object:
        return z


def test_the_component_is_the_name_without_the_method() -> None:
    """A component whose name ends alike keeps it."""
    owner = Autoencoder()
    assert Callee("vae.decode", owner, "decode", "decode").component_name == "vae"
    assert Callee("vae", owner, "forward", "denoise").component_name == "vae"


def test_arguments_are_those_of_the_method() -> None:
    """`self` is none of them."""
    owner = Autoencoder()
    assert Callee("vae.decode", owner, "decode", "decode").argument_names == ("z",)
    assert Callee("vae", owner, "forward", "denoise").argument_names == ("sample", "scale")


def test_arguments_of_compiled_code_are_those_of_the_module() -> None:
    """A time that is given by place is not cast under `torch.compile` either."""
    compiled = torch.compile(Autoencoder(), backend="eager")
    callee = Callee("vae", compiled, "forward", "denoise")
    assert callee.argument_names == ("sample", "scale")


def test_arguments_without_names_have_none() -> None:
    """Neither `*args` nor `**kwargs` is the name of one."""

    class Free(nn.Module):
        def forward(self, sample: object, *rest: object, **more: object) -> object:
            return sample

    assert Callee("net", Free(), "forward", "call").argument_names == ("sample",)


def test_a_callee_is_bound_to_another_module() -> None:
    """A copy is called in place of the owner."""
    owner, other = Autoencoder(), Autoencoder()
    assert Callee("vae", owner, "forward", "denoise").bind(other) is other
    assert Callee("vae.decode", owner, "decode", "decode").bind(other).__self__ is other  # type: ignore[attr-defined]
