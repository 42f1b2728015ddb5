"""Plain attributes of modules follow a cast, and come back."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.interception.own_dtypes import list_own_dtypes, set_own_dtypes
from stopdown.interception.patches import Patches


class Part(nn.Module):
    def __init__(self, dtype: object) -> None:
        super().__init__()
        self.inner, self.dtype = nn.Linear(2, 2), dtype


def test_attributes_follow_where_they_had_a_dtype_of_the_parameters() -> None:
    """Another value and a module without parameters stay; all are undone exactly."""
    own, other, empty = Part(torch.float32), Part(torch.float64), Part(torch.float32)
    del empty.inner
    model = nn.ModuleList([own, other, empty])
    before = list_own_dtypes(model)
    assert before == {torch.float32}
    with Patches() as patches:
        set_own_dtypes(model, before, torch.float16, patches)
        assert [x.dtype for x in (own, other, empty)] == [
            torch.float16, torch.float64, torch.float32,
        ]  # fmt: skip
    assert own.dtype == torch.float32


def test_tables_in_16_bits_follow() -> None:
    """Shap-E's box is made in the format that it's built in; tables in fp32 stay exact."""
    model = nn.Linear(2, 2).bfloat16()
    model.box, model.table = torch.ones(3).bfloat16(), torch.ones(3)  # type: ignore[assignment]
    box = model.box
    with Patches() as patches:
        set_own_dtypes(model, list_own_dtypes(model), torch.float16, patches)
        assert model.box.dtype == torch.float16
        assert model.table.dtype == torch.float32
    assert model.box is box
