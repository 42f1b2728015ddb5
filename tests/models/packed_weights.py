"""Weights in a class of their own, as quantisation libraries keep them."""

from __future__ import annotations

import torch


class Packed(torch.Tensor):
    """A weight as quantisation libraries wrap it: it says bf16 and holds whole numbers."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Packed:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        made.inner = data
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride) -> Packed:  # type: ignore[no-untyped-def]
        return Packed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].inner)
        raise NotImplementedError(func)
