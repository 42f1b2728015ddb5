"""An encoder whose stream overflows, under a plan or a repair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from models.rescaling_models import cast_tree
from models.snapshots import assert_untouched
from stopdown.plans.applier import AppliedPlan, apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import Plan
from stopdown.runtime.guard import Guard, guard


def run(module: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A call with its floating arguments in a dtype."""
    with torch.no_grad():
        return module(**cast_tree(kwargs, dtype))


class Encoder(nn.Module):
    """Four blocks whose stream overflows in the third; what leaves the first is small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(
        self,
        x: torch.Tensor,
        hidden: bool = False,
        gate: Any = None,
        late: Any = None,
        inner: Any = None,
    ) -> Any:
        kept, x = [], self.embed(x)
        for number, (up, down, norm) in enumerate(zip(self.up, self.down, self.norms, strict=True)):
            inside = up(norm(x))
            x = x + down(inside if inner is None or number != 2 else inside + inner)
            if late is not None and number == 2:
                x = x + late
            kept.append(x)
        if gate is not None:
            x = x * torch.sigmoid(x[..., :1] + gate)  # the values themselves, and not their ratio
        return (self.norm(x), *kept[:2]) if hidden else self.norm(x)


PLANS: dict[tuple[type, str, str], Plan] = {}
"""By class, weights and arguments: most tests begin with the same."""


def plan_module(module: nn.Module, kwargs: dict[str, Any]) -> Plan:
    known = type(module), sample_weights(module), str(kwargs)
    if known not in PLANS:
        PLANS[known] = measure_plan({"part": module}, run=lambda: run(module, kwargs))
    return PLANS[known]


@contextmanager
def planned(module: nn.Module, kwargs: dict[str, Any]) -> Iterator[AppliedPlan]:
    plan = plan_module(module, kwargs)
    assert plan.components[0].precision == "fp16"
    assert plan.components[0].in_force.exponents
    with assert_untouched({"part": module}), apply_plan({"part": module}, plan) as applied:
        yield applied


@contextmanager
def repaired(module: nn.Module, kwargs: dict[str, Any]) -> Iterator[Guard]:
    module.half()
    with guard(module, announce=lambda text: None) as handle:
        run(module, kwargs, torch.float16)
        assert [x.action for x in handle.repairs] == ["rescaled"]
        yield handle


class Sized(Encoder):
    """The same with a table of five positions, and one for all other numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = (nn.Parameter(torch.randn(x, 32)) for x in (5, 16))

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        rows = x.shape[1]
        x = self.embed(x)
        x = x + (self.table if rows == 5 else self.other[:rows])
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(up(norm(x)))
        return self.norm(x)


def make_sized() -> tuple[Sized, list[dict[str, Any]]]:
    """The module with calls of other sizes: as the first, without the table, and again."""
    torch.manual_seed(1)
    module = Sized().eval().requires_grad_(False)
    module.up[2].weight.mul_(2.0**10)
    module.down[2].weight.mul_(2.0**9)
    shapes = [(2, 5, 32), (3, 5, 32), (2, 7, 32), (4, 7, 32), (2, 9, 32)]
    return module, [{"x": torch.randn(*shape)} for shape in shapes]


class Modulated(nn.Module):
    """Blocks whose norms are scaled by halves of a linear's result; what that linear gives overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.modulations = nn.ModuleList(nn.Linear(8, 64) for _ in range(3))
        self.norm = nn.LayerNorm(32, elementwise_affine=False)

    def forward(self, x: torch.Tensor, time: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        x = self.enter(x).unflatten(1, grid).flatten(1, 2)
        for block, modulation in zip(self.blocks, self.modulations, strict=True):
            scale, shift = modulation(time).unsqueeze(1).chunk(2, dim=-1)
            x = x + block(self.norm(x) * (1 + scale) + shift)
        return self.leave(self.norm(x))  # type: ignore[no-any-return]


def make_encoder() -> tuple[Encoder, dict[str, Any]]:
    torch.manual_seed(1)
    module = Encoder().eval().requires_grad_(False)
    module.up[2].weight.mul_(2.0**10)
    module.down[2].weight.mul_(2.0**9)
    return module, {"x": torch.randn(2, 5, 32)}
