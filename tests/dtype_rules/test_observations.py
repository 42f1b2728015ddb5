"""Rules that judge single operations: operands, formats, positions, masks and clamps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from models.pipeline_calls import CALLS
from models.programs import make_half
from stopdown import check
from stopdown.devices import device_profiles as profiles
from stopdown.devices.backend_rules import Place
from stopdown.dtype_rules import inspection
from stopdown.dtype_rules.observations import Case, Judge, count_empty
from stopdown.dtype_rules.tracer import DtypeOrigin, Operand, Step
from stopdown.testing import make_pipeline

CASE = Case("unet", "unet", torch.float16, Place("cuda"))


def make_step(name: str, *dtypes: torch.dtype, **arguments: Any) -> Step:
    """An operation in `blocks.0` on operands without values."""
    made = DtypeOrigin("made", "randn", "blocks.0")
    operands = tuple(Operand(f"x{n}", dtype, made) for n, dtype in enumerate(dtypes))
    return Step("blocks.0", name, operands, {}, arguments, ())


@pytest.mark.parametrize(
    ("first", "last", "dtype", "is_found"),
    [
        (0, 2048, torch.float16, False),
        (0, 2050, torch.float16, True),
        (0, 256, torch.bfloat16, False),
        (0, 258, torch.bfloat16, True),
        (0, 2050, torch.float32, False),
    ],
)
def test_positions_collapse_beyond_the_format_s_integers(
    first: int, last: int, dtype: torch.dtype, is_found: bool
) -> None:
    """Each integer up to 2048 has a number of fp16, and up to 256 one of bf16; then some are lost."""
    judge, positions = Judge(CASE), torch.arange(first, last)
    judge.watch(make_step("to", torch.int64), positions, positions.to(dtype))
    assert [x.kind for x in judge.found] == ["positions-collapse"] * is_found
    if is_found:
        facts = judge.found[0].facts
        assert int(facts["left"]) < int(facts["distinct"]) == last - first
        assert (judge.found[0].module_path, facts["largest"]) == ("unet:blocks.0", str(last - 1))


def test_numbers_that_are_no_positions_may_be_rounded() -> None:
    """Fractions in 16 bits are activations, whose neighbours may become equal."""
    judge, values = Judge(CASE), torch.linspace(0, 1, 5000)
    judge.watch(make_step("to", torch.float32), values, values.half())
    assert judge.found == []


MASKS = {
    "each item sees a key": (torch.tensor([[[True, False], [True, True]]]), False, 0),
    "one row hides all keys": (torch.tensor([[[True, False], [False, False]]]), False, 0),
    "one of two items hides all": (torch.tensor([[[True]], [[False]]]), False, 1),
    "True hides": (torch.tensor([[[True]], [[False]], [[True]]]), True, 2),
    "-Inf hides": (torch.full((2, 1, 3), -torch.inf), False, 2),
    "fp16's lowest number hides": (torch.full((1, 1, 3), -65504.0).half(), False, 1),
    "-1e4 in fp32 hides less than all": (torch.full((1, 1, 3), -1e4), False, 0),
    "integers are no mask": (torch.zeros(1, 1, 3, dtype=torch.int64), False, 0),
    "no keys": (torch.zeros(1, 0, 0, dtype=torch.bool), False, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_items_are_counted_that_a_mask_hides_whole(name: str) -> None:
    """Padding rows are harmless; an item without any key makes the softmax NaN."""
    mask, is_hidden, count = MASKS[name]
    assert count_empty(mask, is_hidden=is_hidden) == count


@pytest.mark.parametrize(
    ("dtype", "limit", "is_rescaled", "is_found"),
    [
        (torch.float16, 65504.0, False, True),
        (torch.float16, 64000.0, False, True),
        (torch.float16, 10.0, False, False),
        (torch.float32, 65504.0, False, False),
        (torch.float16, 65504.0, True, False),
    ],
)
def test_a_clamp_at_the_maximum_of_fp16_may_bite(
    dtype: torch.dtype, limit: float, is_rescaled: bool, is_found: bool
) -> None:
    """Only in fp16, at about 65504, and not where exponents keep activations below."""
    case = Case("unet", "unet", dtype, Place("cuda"), is_rescaled=is_rescaled)
    judge = Judge(case)
    assert not judge(make_step("clamp", dtype, min=-limit, max=limit))
    assert [x.kind for x in judge.found] == ["clamp-may-bite"] * is_found


@pytest.mark.parametrize(("known", "is_found"), [(None, True), (65504.0, True), (1e-6, False)])
def test_a_bound_in_a_tensor_counts_by_its_value(known: float | None, is_found: bool) -> None:
    """T5 chooses one by its activations, so it isn't known; a small one, as of a norm, is no limit."""
    judge = Judge(Case("unet", "unet", torch.float16, Place("cuda")))
    bound = torch.tensor(1.0 if known is None else known).half()
    step = make_step("clamp", torch.float16, min=bound)
    step = dataclasses.replace(step, known={} if known is None else {"min": bound})
    assert not judge(step)
    assert [x.kind for x in judge.found] == ["clamp-may-bite"] * is_found


def test_with_the_rules_off_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of dtypes is found by the judge: without it nothing is."""
    monkeypatch.setattr(inspection.Judge, "__call__", lambda self, step: False)
    program = make_half("module")
    assert check(program.given, device="v100", run=program.run) == []


def test_an_outer_product_by_einsum_takes_two_dtypes() -> None:
    """PyTorch brings its operands to one; where a letter is summed over, it refuses them."""

    class Table(torch.nn.Module):
        def forward(self, x: torch.Tensor, equation: str) -> torch.Tensor:
            return torch.einsum(equation, x, torch.ones(4, 4, dtype=torch.float64))

    table, x = Table(), torch.ones(4)
    assert table(x, "a,bc->abc").dtype == torch.float64
    assert check(table, device="cpu", run=lambda: table(x, "a,bc->abc")) == []
    with pytest.raises(RuntimeError, match="expected scalar type"):
        table(x, "a,ac->c")
    (found,) = check(table, device="cpu", run=lambda: table(x, "a,ac->c"))
    assert (found.kind, found.severity) == ("boundary", "error")


def make_odd_bias() -> Any:
    """A tiny Stable Diffusion in fp16, the bias of one transposed convolution in bf16."""
    pipe = make_pipeline("sd", dtype=torch.float16)
    pipe.vae.post_quant_conv = torch.nn.ConvTranspose2d(4, 4, 1).half()
    pipe.vae.post_quant_conv.bias.data = pipe.vae.post_quant_conv.bias.data.bfloat16()
    return pipe


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("device", "onednn", "is_refused"),
    [
        ("cpu-amx", None, True),
        ("cpu-generic", None, False),
        ("cpu", ("fp32", "bf16", "fp16"), True),
        ("cpu", ("fp32", "bf16"), False),
    ],
)
def test_a_processor_is_judged_by_its_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, device: str, onednn: tuple[str, ...], is_refused: bool
) -> None:
    """Where oneDNN takes fp16, a bias in bf16 is refused; elsewhere PyTorch takes it."""
    monkeypatch.setattr(profiles, "read_onednn_formats", lambda: onednn)
    call = {**CALLS["sd"], "num_inference_steps": 1}
    found = [
        f for f in check(make_odd_bias(), device=device, arguments=call) if "conv" in f.module_path
    ]
    errors = [(f.module_path, f.kind) for f in found if f.severity == "error"]
    assert errors == ([("vae:post_quant_conv", "mixed-parameters")] if is_refused else [])
