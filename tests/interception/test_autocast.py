"""Programs that keep fp32 weights and run under `torch.autocast` to fp16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from models.mixed_dtype_models import make_block, make_call
from models.overlapping_calls import overlap_calls
from models.pipeline_calls import quiet
from models.programs import make_program, overflow_
from models.snapshots import assert_untouched
from stopdown import cast_, rescale_
from stopdown.errors import NonFiniteError
from stopdown.interception.autocast import run_within, without_autocast
from stopdown.interception.patches import Patches
from stopdown.numerics import relative_l2
from stopdown.runtime.guard import guard


def run(program: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        found: torch.Tensor = program.run()
    return found


def test_exponents_hold_under_autocast() -> None:
    """Found inside of it, they are exact in fp32 outside, and bring the module's own calls into range."""
    block, (x, t) = make_block(), make_call()
    plain = block(x, t)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not torch.isfinite(block(x, t)).all()
        rescaling = rescale_(block, (x, t))
        found = block(x, t)
    assert rescaling.exponents
    assert torch.equal(block(x, t), plain)
    assert relative_l2(found.float(), plain) < 0.005
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_l2(block(x, t).float(), plain) > 4 * relative_l2(found.float(), plain)
    rescaling.undo()


def test_where_folding_does_not_do_the_module_is_cast() -> None:
    """Sums in fp32 would be undone by autocast: its calls leave it, and undoing restores all."""
    block, (x, t) = make_block(is_pinned=True), make_call()
    plain = block(x, t)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not torch.isfinite(block(x, t)).all()
        rescaling = rescale_(block, (x, t))
        assert relative_l2(block(x, t).float(), plain) < 0.005
        assert torch.is_autocast_enabled("cpu")
        rescaling.undo()
        assert not torch.isfinite(block(x, t)).all()
    assert torch.equal(block(x, t), plain)


def test_weights_that_autocast_keeps_are_forgotten() -> None:
    """Autocast keeps casts of weights that can be trained; folding and undoing make them anew."""
    block, (x, t) = make_block().requires_grad_(True), make_call()
    plain = block(x, t).detach()
    with torch.autocast("cpu", dtype=torch.float16):
        assert not torch.isfinite(block(x, t)).all()
        rescaling = rescale_(block, (x, t))
        assert relative_l2(block(x, t).detach().float(), plain) < 0.005
        rescaling.undo()
        assert not torch.isfinite(block(x, t)).all()


def test_what_stays_in_fp32_is_left_alone_by_autocast() -> None:
    """A module that was cast with parts in fp32 gives the same under autocast as outside of it."""
    block, (x, t) = make_block(is_pinned=True), make_call()
    rescaling = rescale_(block, (x, t))
    cast_(block, torch.float16, rescaling)
    plain = block(x.half(), t)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(block(x.half(), t), plain)
        assert torch.is_autocast_enabled("cpu")
    rescaling.undo()


@pytest.mark.parametrize("kind", ["module", "engine", "patcher"])
def test_a_fault_under_autocast_is_one_of_fp16(kind: str) -> None:
    """The guard reads the precision from autocast, finds exponents, and the result is near that of fp32."""
    program = make_program(kind, torch.float32)
    block: Any = program.unet.blocks[1]
    overflow_(block)
    wide = program.run()
    assert not torch.isfinite(run(program)).all()
    with assert_untouched(program.given), guard(program.given, announce=quiet) as handle:
        found = run(program)
    (repair,) = handle.repairs
    assert (repair.kind, repair.action) == ("range", "rescaled")
    assert repair.module_path == f"{program.component}:{program.path}blocks.1.wide"
    assert " in fp16 at " in repair.evidence
    assert found.dtype == wide.dtype
    assert relative_l2(found.float(), wide) < 0.01


def test_an_error_under_autocast_speaks_of_fp16() -> None:
    """Weights in fp32 that autocast brings to fp16 are not called damaged."""
    program = make_program("module", torch.float32)
    block: Any = program.unet.blocks[1]
    overflow_(block)
    with (
        guard(program.given, on_fault="raise"),
        pytest.raises(NonFiniteError, match="in fp16") as caught,
    ):
        run(program)
    assert "damaged" not in str(caught.value)


def test_a_healthy_run_under_autocast_keeps_its_bits() -> None:
    """No fault: the same bits, and the precisions of the record say what was computed in."""
    program = make_program("module", torch.float32)
    plain = run(program)
    with guard(program.given) as handle:
        assert torch.equal(run(program), plain)
    assert {call.precisions for call in handle.record.calls} == {("fp16", "fp32")}


class Region(torch.nn.Module):
    """Enters autocast by itself, or leaves it, as code with `disable_first_stage_autocast` does."""

    def __init__(self, part: torch.nn.Module, *, enabled: bool) -> None:
        super().__init__()
        self.part, self.enabled = part, enabled

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.enabled):
            found: torch.Tensor = self.part(x, t)
        return found


@pytest.mark.parametrize("is_pinned", [False, True], ids=["folded", "fp32 parts"])
@pytest.mark.parametrize("around", [False, True], ids=["alone", "under autocast"])
def test_exponents_of_code_that_enters_autocast(is_pinned: bool, around: bool) -> None:
    """Its own autocast is off where bits are compared in fp32, and on where it runs in fp16."""
    block, (x, t) = make_block(is_pinned=is_pinned), make_call()
    plain, region = block(x, t), Region(block, enabled=True).eval()
    with torch.autocast("cpu", dtype=torch.float16, enabled=around):
        assert not torch.isfinite(region(x, t)).all()
        rescaling = rescale_(region, (x, t))
        assert rescaling.exponents
        assert relative_l2(region(x, t).float(), plain) < 0.005
        cast_(region, torch.float16, rescaling)
        assert relative_l2(region(x.half(), t).float(), plain) < 0.005
        rescaling.undo()
        assert not torch.isfinite(region(x, t)).all()
    assert torch.equal(block(x, t), plain)


@pytest.mark.parametrize("is_pinned", [False, True], ids=["folded", "fp32 parts"])
def test_exponents_of_code_that_leaves_autocast(is_pinned: bool) -> None:
    """It computes in fp32 until it is cast, and is near that in fp16."""
    block, (x, t) = make_block(is_pinned=is_pinned), make_call()
    plain, region = block(x, t), Region(block, enabled=False)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(region(x, t), plain)
        rescaling = rescale_(region, (x, t))
        assert relative_l2(region(x, t).float(), plain) < 0.005
        cast_(region, torch.float16, rescaling)
        assert relative_l2(region(x.half(), t).float(), plain) < 0.005
        rescaling.undo()
        assert torch.equal(region(x, t), plain)


@pytest.mark.parametrize("is_pinned", [False, True], ids=["folded", "fp32 parts"])
def test_a_fault_of_code_that_enters_autocast_is_one_of_fp16(is_pinned: bool) -> None:
    """Its weights are fp32 and not called damaged: the layer is named, and the call is repaired."""
    block, (x, t) = make_block(is_pinned=is_pinned), make_call()
    plain, region = block(x, t), Region(block, enabled=True).eval()
    with assert_untouched(region), guard({"net": region}, announce=quiet) as handle:
        found = region(x, t)
    (repair,) = handle.repairs
    assert (repair.module_path, repair.action) == ("net:part.second", "rescaled")
    assert " in fp16 at " in repair.evidence
    assert "fp16" in handle.record.calls[0].precisions
    assert relative_l2(found.float(), plain) < 0.005
    with (
        guard({"net": region}, on_fault="raise"),
        pytest.raises(NonFiniteError, match="in fp16") as caught,
    ):
        region(x, t)
    assert "damaged" not in str(caught.value)


class Embedded(torch.nn.Module):
    """Returns what no operation of autocast made, which keeps its dtype, beside what one made."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 64)
        self.second, self.factor = torch.nn.Linear(64, 4), factor

    def forward(self, numbers: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.table(numbers) + h, self.second(self.first(h) * self.factor)


OTHERS = (
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float64, torch.bfloat16),
)


@pytest.mark.parametrize(("own", "ambient"), OTHERS)
def test_outputs_of_another_dtype_than_that_of_autocast_are_checked(
    own: torch.dtype, ambient: torch.dtype
) -> None:
    """Gives the bits and dtypes of the unguarded call, with all that a guard can note switched on."""
    module = Embedded().to(own).eval()
    call = torch.arange(4), torch.randn(4, 4).to(own)
    with torch.no_grad(), torch.autocast("cpu", dtype=ambient):
        plain = module(*call)
        with guard(module, maxima=True) as handle:
            found = module(*call)
    assert not handle.repairs
    assert [x.dtype for x in found] == [x.dtype for x in plain]
    assert all(map(torch.equal, found, plain))


def test_a_fault_in_autocast_of_another_dtype_is_repaired() -> None:
    """A model in bf16 that overflows in autocast of fp16 is as near to fp32 as bf16 is."""
    module = Embedded(1e6).bfloat16().eval()
    numbers, h = torch.arange(4), torch.randn(4, 4).bfloat16()
    with torch.no_grad():
        wide = copy.deepcopy(module).float()(numbers, h.float())
        near = module(numbers, h)
        with guard(module, announce=quiet) as handle, torch.autocast("cpu", dtype=torch.float16):
            found = module(numbers, h)
    assert [x.action for x in handle.repairs] == ["fp32"]
    for own, right, bf16 in zip(found, wide, near, strict=True):
        assert relative_l2(own, right) <= relative_l2(bf16, right)


def test_autocast_is_that_of_each_thread() -> None:
    """Two threads are in one module at a time, one of them in autocast: each leaves it as it came."""
    module, patches = torch.nn.Identity(), Patches()
    after = list[bool]()

    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(torch.ones(1))
            after.append(torch.is_autocast_enabled("cpu"))

    with patches:
        run_within(module, without_autocast, patches)
        overlap_calls(module, call, lambda: module(torch.ones(1)))
    assert [*after, torch.is_autocast_enabled("cpu")] == [True, False]
