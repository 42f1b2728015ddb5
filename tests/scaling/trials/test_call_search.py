"""The strategies for the calls of a module: which is tried after which, and what the result says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import make_example
from stopdown.errors import InputError, ScalingError
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import call_search, measurement
from stopdown.scaling.trials.call_search import plan_stream, scale_calls


class RefusingHalf(nn.Module):
    """Beyond fp16; it fails when it runs with an input in fp16, and runs with casts to fp32 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.embed.weight.data.mul_(2.0**20)

    def forward(self, x: torch.Tensor) -> Any:
        if type(x) is torch.Tensor and x.dtype == torch.float16:  # a capture's isn't one
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        return self.out(self.norm(self.embed(x)))


@pytest.mark.parametrize(
    ("kinds", "said"), [([], "no calls"), ([[]], "a group without calls"), ((), "no calls")]
)
@pytest.mark.parametrize("options", [{}, {"residual": "fp32"}, {"ranges": "bound"}])
def test_without_calls_there_is_one_error(kinds: Any, said: str, options: Any) -> None:
    """It says what was missing, whatever else was asked."""
    with pytest.raises(InputError, match=f"scale_calls was given {said}. Exponents are found for"):
        scale_calls(nn.Linear(2, 2), kinds, **options)


@pytest.mark.parametrize("residual", ["native", "fp32"])
def test_the_next_strategy_is_taken_and_said(residual: str) -> None:
    """Where exponents do not run, what hooks show that fp16 can hold does; the result says why."""
    torch.manual_seed(0)
    module, x = RefusingHalf().eval().requires_grad_(False), torch.randn(3, 4)
    reference = module(x)
    rescaling = rescale_(module, (x,), residual=residual)
    assert rescaling.exponents == {}
    assert "In fp16 with casts it raises RuntimeError" in rescaling.scaling.note
    assert "So there are no exponents" in rescaling.scaling.note
    assert rescaling.trial is not None
    assert rescaling.trial.calls == 1
    assert torch.equal(module(x), reference)


class Growing(nn.Module):
    """A stream that its first values are 2**30 times smaller in than its last: one exponent does not do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norms = nn.Linear(4, 16), nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.write, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.write(self.norms[0](h))
        return self.out(self.norms[1](h))  # type: ignore[no-any-return]


def test_an_fp32_stream_is_taken_where_one_exponent_is_worse_than_bf16() -> None:
    """Exact and finite is not enough: what loses more than bf16 does is tried with an fp32 stream."""
    torch.manual_seed(0)
    module, x = Growing().eval().requires_grad_(False), torch.randn(3, 4)
    module.write.weight.mul_(2.0**36)
    reference = module(x)
    rescaling = rescale_(module, (x,))
    found = rescaling.trial
    assert found is not None
    assert found.rel_err < found.bf16_rel_err
    assert rescaling.residual == "fp32"
    assert rescaling.scaling.note.startswith(
        "The residual stream is kept in fp32: In fp16 with casts"
    )
    assert torch.equal(module(x), reference)


class Added(nn.Module):
    """Adds its input, which nothing scales, to what fp16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.write = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.write(self.norm(self.first(x)))  # type: ignore[no-any-return]


def test_an_output_that_nothing_scales_is_returned_in_fp32() -> None:
    """No exponents exist; what fp16 holds runs in it, and the output stays fp32."""
    torch.manual_seed(0)
    module, x = Added().eval().requires_grad_(False), torch.randn(3, 4)
    module.write.weight.mul_(2.0**18)
    reference = module(x)
    assert reference.abs().max() > 65504
    rescaling = rescale_(module, (x,), cast=True)
    low = module(x.half())
    assert low.dtype == torch.float32
    assert float((low - reference).norm() / reference.norm()) < 1e-3
    assert rescaling.scaling.note.startswith("No exponents keep every value in range")
    assert "1 of 2 matrices run in fp16" in rescaling.scaling.note


def test_exactness_is_demanded_before_anything_is_cast() -> None:
    """A module whose fp32 output changes by itself is refused, not tried."""
    calls: list[int] = []

    class Drifting(RefusingHalf):
        def forward(self, x: torch.Tensor) -> Any:
            calls.append(1)
            return super().forward(x) + (len(calls) if type(x) is torch.Tensor else 0)

    module, x = Drifting().eval().requires_grad_(False), torch.randn(3, 4)
    with pytest.raises(ScalingError, match="isn't bit for bit what it was"):
        scale_calls(module, [[(module, (x,), {})]])


@pytest.mark.thorough
def test_an_embedding_that_cannot_be_fp32_is_left_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is fp32 all the same."""
    module, calls = make_example("CogVideoX rotary")
    demand = call_search.demand_agreement

    def refuse(plain: Any, streamed: Any) -> None:
        first = next(n for n in streamed.graph.graph.nodes if n.name.startswith("linear"))
        if first.meta["val"].dtype == torch.float32:
            raise ScalingError("The first linear is fp32.")
        demand(plain, streamed)

    monkeypatch.setattr(call_search, "demand_agreement", refuse)
    stream = plan_stream(module, calls, measurement.Captures())
    assert "time_embedding.linear_1" in stream.cast_input_down
